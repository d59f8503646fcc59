// The exported functions, and which instruction sets this machine can run.
#include "api.h"

#include <sched.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace zenflow {

// One for each instruction set that build.py compiles sweep.cpp and select.cpp for.
namespace portable { extern const InstructionSet instruction_set; }
namespace avx2 { extern const InstructionSet instruction_set; }
namespace avx512 { extern const InstructionSet instruction_set; }
namespace neon { extern const InstructionSet instruction_set; }

namespace {

struct Candidate {
  const char* name;
  const InstructionSet* code;
  bool (*runs_here)();
};

bool always() { return true; }

#if defined(__x86_64__)
struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  explicit Cpuid(uint32_t leaf) { __get_cpuid_count(leaf, 0, &eax, &ebx, &ecx, &edx); }
};

constexpr bool bit(uint32_t word, int position) { return word >> position & 1; }

// Whether the operating system saves these registers when it switches threads.
bool saved(uint32_t registers) {
  if (!bit(Cpuid(1).ecx, 27)) return false;  // xgetbv is not allowed
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

bool has_avx2() {
  return saved(0x06) && bit(Cpuid(1).ecx, 29) /* F16C */ && bit(Cpuid(7).ebx, 5);
}

bool has_avx512() {
  const uint32_t features = Cpuid(7).ebx;
  return saved(0xe6) && bit(features, 16) /* F */ && bit(features, 17) /* DQ */ &&
         bit(features, 30) /* BW */ && bit(features, 31) /* VL */;
}
#endif

// Best first.
constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {"avx512", &avx512::instruction_set, has_avx512},
    {"avx2", &avx2::instruction_set, has_avx2},
#elif defined(__aarch64__)
    {"neon", &neon::instruction_set, always},
#endif
    {"portable", &portable::instruction_set, always},
};
constexpr int kNumCandidates = sizeof kCandidates / sizeof kCandidates[0];

void add(size_t& count, size_t more) { __atomic_fetch_add(&count, more, __ATOMIC_RELAXED); }

// Calls `each(i)` for every i below n that no other thread has taken. Without `turns` there is none.
template <class Each>
void share(Turns* turns, size_t n, Each each) {
  if (!turns) {
    for (size_t i = 0; i < n; ++i) each(i);
    return;
  }
  size_t i;
  while ((i = __atomic_fetch_add(&turns->taken, 1, __ATOMIC_RELAXED)) < n) {
    each(i);
    __atomic_fetch_add(&turns->done, 1, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(&turns->done, __ATOMIC_ACQUIRE) < n) sched_yield();
}

}  // namespace
}  // namespace zenflow

using zenflow::kCandidates;

extern "C" {

#define ZENFLOW_EXPORT __attribute__((visibility("default")))

// A digest of the sources and flags that this library was built from.
ZENFLOW_EXPORT const char* zenflow_build_id() { return ZENFLOW_BUILD_ID; }

// Instruction sets compiled in, best first: null behind the last.
ZENFLOW_EXPORT const char* zenflow_isa_name(int isa) {
  return isa < zenflow::kNumCandidates ? kCandidates[isa].name : nullptr;
}

ZENFLOW_EXPORT int zenflow_isa_runs_here(int isa) { return kCandidates[isa].runs_here(); }

ZENFLOW_EXPORT void zenflow_sweep(
    int isa, int grad_type, int weight_type, const zenflow::SweepArgs* args) {
  kCandidates[isa].code->sweep[grad_type][weight_type](*args);
}

// The selective path takes a batch in each call, because a model has hundreds of tensors and a call
// from Python costs as much as the work on a small one. Threads that call with the same `turns` and the
// same batch share it; each returns when all of it is done.

ZENFLOW_EXPORT void zenflow_take(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* grads,
    uint8_t* finite) {
  const auto take = kCandidates[isa].code->select->take;
  zenflow::share(turns, n, [=](size_t i) { finite[i] = take(sides[i], grads[i]); });
}

ZENFLOW_EXPORT void zenflow_all_finite(
    int isa, zenflow::Turns* turns, size_t n, const void* const* grads, const size_t* numels,
    const int32_t* types, uint8_t* finite) {
  const auto all_finite = kCandidates[isa].code->select->all_finite;
  zenflow::share(turns, n, [=](size_t i) { finite[i] = all_finite(grads[i], types[i], numels[i]); });
}

ZENFLOW_EXPORT void zenflow_update(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* grads,
    const int32_t* which, const zenflow::Coefficients* coefficients) {
  const auto update = kCandidates[isa].code->select->update;
  zenflow::share(turns, n, [=](size_t i) { update(sides[i], grads[i], coefficients[which[i]]); });
}

ZENFLOW_EXPORT void zenflow_publish(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* staged) {
  const auto publish = kCandidates[isa].code->select->publish;
  zenflow::share(turns, n, [=](size_t i) { publish(sides[i], staged[i]); });
}

ZENFLOW_EXPORT void zenflow_preview(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* grads,
    const float* scales, const float* sizes) {
  const auto preview = kCandidates[isa].code->select->preview;
  zenflow::share(turns, n, [=](size_t i) { preview(sides[i], grads[i], scales[i], sizes[i]); });
}

// Adds to `count`, which is 0 before.
ZENFLOW_EXPORT void zenflow_num_changed(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, size_t* count) {
  const auto num_changed = kCandidates[isa].code->select->num_changed;
  zenflow::share(turns, n, [=](size_t i) { zenflow::add(*count, num_changed(sides[i])); });
}

ZENFLOW_EXPORT void zenflow_num_different(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, size_t* count) {
  const auto num_different = kCandidates[isa].code->select->num_different;
  zenflow::share(turns, n, [=](size_t i) { zenflow::add(*count, num_different(sides[i])); });
}

ZENFLOW_EXPORT void zenflow_energy(
    int isa, int grad_type, const void* grad, size_t num_rows, size_t row_numel, size_t block_rows,
    float* energy) {
  kCandidates[isa].code->select->energy(grad, grad_type, num_rows, row_numel, block_rows, energy);
}
}
