// What the Python side calls: plain C, raw pointers and sizes, no torch and no Python.
//
// Nothing here allocates, locks, keeps state or checks its arguments; the caller (native/__init__.py)
// has done that. Any number of threads may call at once on disjoint memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zenflow {

// The fields of zenflow.core.rules.Coefficients, in its order, each rounded to fp32.
struct Coefficients {
  float scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_bias2, eps, step_size;
};

// The order of native/__init__.py's table of dtypes.
enum ElementType : int { kFp32, kBf16, kFp16, kNumElementTypes };

struct SweepArgs {
  size_t numel;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  void* out;                         // numel weights
  const void* const* grads;          // num_slots arrays of numel gradients, oldest first
  const Coefficients* coefficients;  // num_slots
  size_t num_slots;                  // 0: only write the weights that a sweep ending with coefficients[0] writes
  int mean;                          // one update with the mean gradient instead of one for each
  float inv_num_slots;               // what the sum of the gradients is multiplied by for the mean
  float delay;                       // steps to extrapolate the written weights by
};

using Sweep = void (*)(const SweepArgs&);

// What sweep.cpp, compiled for one instruction set, offers.
struct InstructionSet {
  Sweep sweep[kNumElementTypes][kNumElementTypes];  // by the slots' type, then by the weights'
};

}  // namespace zenflow
