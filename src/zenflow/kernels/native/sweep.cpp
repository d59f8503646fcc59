// The sweep, compiled once for each instruction set (build.py says with which flags and macros).
//
// The contract is kernels/reference.py's, bit for bit: each operation below rounds once, and
// -ffp-contract=off keeps the compiler from fusing a product with a sum.
//
// State is read and written once for each sweep and slots are read once, so with one slot memory
// decides the speed. From about four slots on, it is square roots and divisions, the only operations
// that are not pipelined well.
#include "api.h"
#include "lanes.h"

#define ZENFLOW_EACH_VECTOR for (size_t j = 0; j < n; ++j)

namespace zenflow::ZENFLOW_ISA {
namespace {

// Elements worked on together: a cache line of fp32 state.
constexpr size_t kRun = 16;

// How far ahead of the work memory is asked for. A processor sees only a few runs ahead by itself, and
// its own prefetching begins anew with each page. 256 to 1024 were alike.
constexpr size_t kAhead = 512;

// A run of `n` whole vectors.
struct Whole {
  static constexpr size_t n = kRun / kLanes;

  template <class Element>
  ZENFLOW_INLINE void load(Floats (&to)[n], const typename Element::Stored* from) const {
    ZENFLOW_EACH_VECTOR to[j] = Element::load(from + j * kLanes);
  }
  template <class Element>
  ZENFLOW_INLINE void store(typename Element::Stored* to, const Floats (&from)[n]) const {
    ZENFLOW_EACH_VECTOR Element::store(to + j * kLanes, from[j]);
  }
};

// The first `count` elements of one vector: what is left at the end.
struct Part {
  static constexpr size_t n = 1;
  size_t count;

  template <class Element>
  ZENFLOW_INLINE void load(Floats (&to)[n], const typename Element::Stored* from) const {
    typename Element::Stored padded[kLanes] = {};
    memcpy(padded, from, count * sizeof *from);
    to[0] = Element::load(padded);
  }
  template <class Element>
  ZENFLOW_INLINE void store(typename Element::Stored* to, const Floats (&from)[n]) const {
    typename Element::Stored padded[kLanes];
    Element::store(padded, from[0]);
    memcpy(to, padded, count * sizeof *to);
  }
};

template <size_t n>
struct State {
  Floats master[n], exp_avg[n], exp_avg_sq[n], update[n];
};

template <size_t n>
ZENFLOW_INLINE void form_update(State<n>& s, const Coefficients& c) {
  ZENFLOW_EACH_VECTOR {
    const Floats denominator = sqrt(s.exp_avg_sq[j]) * c.inv_sqrt_bias2 + c.eps;
    s.update[j] = (s.exp_avg[j] / denominator) * c.step_size;
  }
}

template <size_t n>
ZENFLOW_INLINE void sub_step(State<n>& s, const Floats (&grad)[n], const Coefficients& c) {
  ZENFLOW_EACH_VECTOR {
    const Floats g = grad[j];
    s.master[j] *= c.decay;
    s.exp_avg[j] = s.exp_avg[j] * c.beta1 + g * c.one_minus_beta1;
    s.exp_avg_sq[j] = s.exp_avg_sq[j] * c.beta2 + (g * g) * c.one_minus_beta2;
  }
  form_update(s, c);
  ZENFLOW_EACH_VECTOR s.master[j] -= s.update[j];
}

template <class Grad, class Run, size_t n>
ZENFLOW_INLINE void load_slot(Floats (&grad)[n], const SweepArgs& a, size_t slot, size_t at, Run run) {
  run.template load<Grad>(grad, static_cast<const typename Grad::Stored*>(a.grads[slot]) + at);
  ZENFLOW_EACH_VECTOR grad[j] *= a.coefficients[slot].scale;
}

template <class Grad, class Run, size_t n>
ZENFLOW_INLINE void replay(State<n>& s, const SweepArgs& a, size_t at, Run run) {
  Floats grad[n];
  for (size_t slot = 0; slot < a.num_slots; ++slot) {
    load_slot<Grad>(grad, a, slot, at, run);
    sub_step(s, grad, a.coefficients[slot]);
  }
}

template <class Grad, class Run, size_t n>
ZENFLOW_INLINE void accumulate(State<n>& s, const SweepArgs& a, size_t at, Run run) {
  Floats total[n], grad[n];
  load_slot<Grad>(total, a, 0, at, run);
  for (size_t slot = 1; slot < a.num_slots; ++slot) {
    load_slot<Grad>(grad, a, slot, at, run);
    ZENFLOW_EACH_VECTOR total[j] += grad[j];
  }
  ZENFLOW_EACH_VECTOR total[j] *= a.inv_num_slots;
  sub_step(s, total, a.coefficients[a.num_slots - 1]);
}

template <class Grad, class Weight, class Run>
ZENFLOW_INLINE void sweep_run(const SweepArgs& a, size_t at, Run run) {
  constexpr size_t n = Run::n;
  State<n> s;
  run.template load<Fp32>(s.master, a.master + at);
  run.template load<Fp32>(s.exp_avg, a.exp_avg + at);
  run.template load<Fp32>(s.exp_avg_sq, a.exp_avg_sq + at);
  if (a.num_slots == 0) {
    form_update(s, a.coefficients[0]);
  } else {
    if (a.mean) {
      accumulate<Grad>(s, a, at, run);
    } else {
      replay<Grad>(s, a, at, run);
    }
    run.template store<Fp32>(a.master + at, s.master);
    run.template store<Fp32>(a.exp_avg + at, s.exp_avg);
    run.template store<Fp32>(a.exp_avg_sq + at, s.exp_avg_sq);
  }
  if (a.delay != 0) ZENFLOW_EACH_VECTOR s.master[j] -= s.update[j] * a.delay;
  run.template store<Weight>(static_cast<typename Weight::Stored*>(a.out) + at, s.master);
}

template <class Grad, class Weight>
ZENFLOW_INLINE void prefetch_run(const SweepArgs& a, size_t at) {
  __builtin_prefetch(a.master + at, 1);
  __builtin_prefetch(a.exp_avg + at, 1);
  __builtin_prefetch(a.exp_avg_sq + at, 1);
  __builtin_prefetch(static_cast<typename Weight::Stored*>(a.out) + at, 1);
  for (size_t slot = 0; slot < a.num_slots; ++slot) {
    __builtin_prefetch(static_cast<const typename Grad::Stored*>(a.grads[slot]) + at);
  }
}

template <class Grad, class Weight>
void sweep(const SweepArgs& a) {
  size_t at = 0;
  for (; a.numel - at >= kRun; at += kRun) {
    prefetch_run<Grad, Weight>(a, at + kAhead);
    sweep_run<Grad, Weight>(a, at, Whole{});
  }
  for (; at < a.numel; at += kLanes) {
    const size_t left = a.numel - at;
    sweep_run<Grad, Weight>(a, at, Part{left < kLanes ? left : kLanes});
  }
}

}  // namespace

extern const Select select;  // select.cpp

extern const InstructionSet instruction_set;
const InstructionSet instruction_set = {
    {{sweep<Fp32, Fp32>, sweep<Fp32, Bf16>, sweep<Fp32, Fp16>},
     {sweep<Bf16, Fp32>, sweep<Bf16, Bf16>, sweep<Bf16, Fp16>},
     {sweep<Fp16, Fp32>, sweep<Fp16, Bf16>, sweep<Fp16, Fp16>}},
    &select,
};

}  // namespace zenflow::ZENFLOW_ISA
