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

// A segment's device side, or a resident parameter: kernels.selective.DeviceSide, whose words these
// are. Rows lie `row_stride` bytes apart; within a row elements are adjacent. A resident parameter is
// one row.
struct Side {
  void* weight;
  size_t row_stride;
  size_t num_rows;
  size_t row_numel;         // channels times kernel_numel
  size_t kernel_numel;      // elements of one channel in one row
  const int64_t* channels;  // num_selected of them; null: all
  size_t num_selected;
  float* master;  // num_rows * num_selected * kernel_numel, as the two moments are
  float* exp_avg;
  float* exp_avg_sq;
  void* selected_grad;            // the same number, of grad_type
  const uint8_t* is_selected;     // row_numel; null: none is
  int64_t* fingerprint;           // num_lanes
  const uint8_t* deferred_lanes;  // num_lanes
  const float* factors;           // num_rows, then row_numel, of a preview; null: there are none
  size_t num_lanes;
  int32_t lane_bytes;
  int32_t weight_type;
  int32_t grad_type;
  int32_t padding;
};

// How far a batch is that several threads share. Both are 0 before.
struct Turns {
  size_t taken;  // items that some thread has begun, and the vain tries to begin one more
  size_t done;
};

// What select.cpp, compiled for one instruction set, offers; the contract is kernels/selective.py's.
struct Select {
  // Gathers a gradient's selected channels, if any, into `selected_grad`; says whether all is finite.
  bool (*take)(const Side&, const void* grad);
  bool (*all_finite)(const void* grad, int grad_type, size_t numel);
  // One AdamW sub-step of the state, and the weights from it.
  void (*update)(const Side&, const void* grad, const Coefficients&);
  // The weights of deferred channels from `staged`, and the fingerprint of all.
  void (*publish)(const Side&, const void* staged);
  // Moves weights by what a gradient of their own type is going to do, and takes the fingerprint of all.
  void (*preview)(const Side&, const void* grad, float scale, float size);
  // Deferred lanes that have lost their fingerprint.
  size_t (*num_changed)(const Side&);
  // Weights that are not their masters, rounded; of a resident parameter.
  size_t (*num_different)(const Side&);
  // Squared norm of each column, in the order of core.selection.channel_energy.
  void (*energy)(
      const void* grad, int grad_type, size_t num_rows, size_t row_numel, size_t block_rows, float* out);
};

// What the object files compiled for one instruction set offer.
struct InstructionSet {
  Sweep sweep[kNumElementTypes][kNumElementTypes];  // by the slots' type, then by the weights'
  const Select* select;
};

}  // namespace zenflow
