// Runs every kernel on random bits with each instruction set, alone and in four threads at once, and
// compares the results with those of portable code. For sanitizers, and for processors that Python does not run on:
//
//   aarch64-linux-gnu-g++ ... && qemu-aarch64-static ./driver
//
// Exits with 1 if anything differs.
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "api.h"

extern "C" {
const char* zenflow_isa_name(int isa);
int zenflow_isa_runs_here(int isa);
void zenflow_sweep(int isa, int grad_type, int weight_type, const zenflow::SweepArgs* args);
void zenflow_take(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* grads,
    uint8_t* finite);
void zenflow_all_finite(
    int isa, zenflow::Turns* turns, size_t n, const void* const* grads, const size_t* numels,
    const int32_t* types, uint8_t* finite);
void zenflow_update(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* grads,
    const int32_t* which, const zenflow::Coefficients* coefficients);
void zenflow_publish(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* staged);
void zenflow_preview(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, const void* const* grads,
    const float* scales, const float* sizes);
void zenflow_num_changed(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, size_t* count);
void zenflow_num_different(
    int isa, zenflow::Turns* turns, size_t n, const zenflow::Side* sides, size_t* count);
void zenflow_energy(
    int isa, int grad_type, const void* grad, size_t num_rows, size_t row_numel, size_t block_rows,
    float* energy);
}

namespace {

using zenflow::Coefficients;

constexpr int kNumTypes = zenflow::kNumElementTypes;
constexpr size_t kSizes[kNumTypes] = {4, 2, 2};
constexpr uint32_t kInfinities[kNumTypes] = {0x7f800000, 0x7f80, 0x7c00};

// Bytes of exactly the length that a sweep may touch, so that a step over it is seen.
using Bytes = std::vector<unsigned char>;

struct Case {
  size_t numel, num_slots;
  int grad_type, weight_type, mean;
  float delay;
  Bytes state[3], out;
  std::vector<Bytes> grads;
  std::vector<Coefficients> coefficients;

  explicit Case(std::mt19937& random) {
    numel = random() % 700;
    num_slots = random() % 9;
    grad_type = static_cast<int>(random() % kNumTypes);
    weight_type = static_cast<int>(random() % kNumTypes);
    mean = static_cast<int>(random() % 2);
    delay = random() % 2 ? 2.5f : 0.0f;
    const bool any_bits = random() % 2;
    auto fill = [&](Bytes& bytes, int type) {
      bytes.resize(numel * kSizes[type]);
      for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
      // Without the second highest bit, numbers are below two.
      for (size_t i = kSizes[type] - 1; !any_bits && i < bytes.size(); i += kSizes[type]) bytes[i] &= 0xbf;
    };
    for (Bytes& bytes : state) fill(bytes, zenflow::kFp32);
    for (size_t i = 3; !any_bits && i < state[2].size(); i += 4) state[2][i] &= 0x7f;
    fill(out, weight_type);
    for (size_t s = 0; s < num_slots; ++s) fill(grads.emplace_back(), grad_type);
    for (size_t s = 0; s <= num_slots; ++s) {
      const float scale = s % 2 ? 1.0f : 0.37f;
      coefficients.push_back({scale, 0.9999f, 0.9f, 0.1f, 0.999f, 0.001f, 10.0f, 1e-8f, 1e-3f});
    }
  }

  void sweep(int isa) {
    std::vector<const void*> slots;
    for (const Bytes& grad : grads) slots.push_back(grad.data());
    auto floats = [](Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); };
    const float inv_num_slots = num_slots ? 1.0f / static_cast<float>(num_slots) : 1.0f;
    const zenflow::SweepArgs args = {
        numel, floats(state[0]), floats(state[1]), floats(state[2]), out.data(), slots.data(),
        coefficients.data(), num_slots, mean, inv_num_slots, delay};
    zenflow_sweep(isa, grad_type, weight_type, &args);
  }
};

// Equal bits, or NaN both.
size_t num_different(const Bytes& a, const Bytes& b, int type) {
  size_t count = 0;
  const uint32_t magnitude = type == zenflow::kFp32 ? 0x7fffffff : 0x7fff;
  for (size_t i = 0; i < a.size(); i += kSizes[type]) {
    uint32_t x = 0, y = 0;
    memcpy(&x, &a[i], kSizes[type]);
    memcpy(&y, &b[i], kSizes[type]);
    const bool nan = (x & magnitude) > kInfinities[type] && (y & magnitude) > kInfinities[type];
    count += x != y && !nan;
  }
  return count;
}

// A segment's device side and what passes through it.
struct SideCase {
  zenflow::Side side = {};
  std::vector<int64_t> channels, fingerprint;
  Bytes weight, state[3], selected_grad, is_selected, deferred_lanes, grad, staged, energy;
  std::vector<float> factors;
  std::vector<size_t> counts;

  explicit SideCase(std::mt19937& random) {
    const size_t num_channels = 1 + random() % 90;
    side.num_rows = 1 + random() % 20;
    side.kernel_numel = random() % 3 ? 1 : 1 + random() % 9;
    side.row_numel = num_channels * side.kernel_numel;
    side.num_selected = random() % num_channels;
    side.weight_type = side.grad_type = static_cast<int>(random() % kNumTypes);
    const size_t size = kSizes[side.weight_type], row_bytes = side.row_numel * size;
    side.row_stride = row_bytes + size * (random() % 2 ? random() % 9 : 0);
    side.lane_bytes = row_bytes % 8 || side.row_stride % 8 ? static_cast<int>(size) : 8;
    side.num_lanes = row_bytes / static_cast<size_t>(side.lane_bytes);
    auto fill = [&](Bytes& bytes, size_t count) {
      bytes.resize(count);
      for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
      if (size == 4) {
        for (size_t i = 3; i < count; i += 4) bytes[i] &= 0xbf;
      } else {
        for (size_t i = 1; i < count; i += 2) bytes[i] &= 0xbf;
      }
    };
    fill(weight, side.row_stride * (side.num_rows - 1) + row_bytes);
    fill(grad, row_bytes * side.num_rows);
    fill(staged, row_bytes * side.num_rows);
    is_selected.resize(side.row_numel);
    for (size_t c = 0; channels.size() < side.num_selected; ++c) {
      if (num_channels - c > side.num_selected - channels.size() && random() % 2) continue;
      channels.push_back(static_cast<int64_t>(c));
      for (size_t i = 0; i < side.kernel_numel; ++i) is_selected[c * side.kernel_numel + i] = 1;
    }
    const size_t numel = side.num_rows * side.num_selected * side.kernel_numel;
    for (Bytes& bytes : state) {
      bytes.resize(numel * 4);
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 4 == 3 ? 0x3c : static_cast<unsigned char>(random());
    }
    fill(selected_grad, numel * size);
    deferred_lanes.resize(side.num_lanes, 1);
    fingerprint.resize(side.num_lanes);
    energy.resize(side.row_numel * 4);
    for (size_t i = 0; i < side.num_rows + side.row_numel; ++i) factors.push_back(static_cast<float>(random() % 9));
  }

  // The side with pointers to where this case now is.
  const zenflow::Side& placed() {
    auto floats = [](Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); };
    side.weight = weight.data();
    side.channels = channels.empty() ? nullptr : channels.data();
    side.master = floats(state[0]);
    side.exp_avg = floats(state[1]);
    side.exp_avg_sq = floats(state[2]);
    side.selected_grad = selected_grad.data();
    side.is_selected = channels.empty() ? nullptr : is_selected.data();
    side.fingerprint = fingerprint.data();
    side.deferred_lanes = deferred_lanes.data();
    side.factors = factors.data();
    return side;
  }

  void run(int isa) {
    placed();
    const void *whole = grad.data(), *selected = selected_grad.data(), *rows = staged.data();
    size_t changed[2] = {}, different = 0;
    const Coefficients c = {0.37f, 0.9999f, 0.9f, 0.1f, 0.999f, 0.001f, 10.0f, 1e-8f, 1e-3f};
    const int32_t first = 0;
    const size_t numel = side.num_rows * side.row_numel;
    uint8_t finite[2] = {};
    zenflow_all_finite(isa, nullptr, 1, &whole, &numel, &side.grad_type, finite);
    if (side.channels) {
      zenflow_take(isa, nullptr, 1, &side, &whole, finite + 1);
      zenflow_update(isa, nullptr, 1, &side, &selected, &first, &c);
    }
    zenflow_publish(isa, nullptr, 1, &side, &rows);
    const float scale = 0.37f, size = 1e-3f;
    zenflow_preview(isa, nullptr, 1, &side, &whole, &scale, &size);
    zenflow_num_changed(isa, nullptr, 1, &side, &changed[0]);
    for (int64_t& sum : fingerprint) sum ^= 1;
    zenflow_num_changed(isa, nullptr, 1, &side, &changed[1]);
    float* energies = reinterpret_cast<float*>(energy.data());
    zenflow_energy(isa, side.grad_type, whole, side.num_rows, side.row_numel, 8, energies);
    zenflow::Side resident = side;  // its masters are what the state has of them
    std::vector<float> masters(numel, 0.5f);
    resident.master = masters.data();
    resident.row_stride = 0;
    resident.weight = staged.data();
    zenflow_num_different(isa, nullptr, 1, &resident, &different);
    counts = {finite[0], finite[1], changed[0], changed[1], different};
  }
};

size_t num_different(const SideCase& a, const SideCase& b) {
  size_t count = a.counts != b.counts || a.fingerprint != b.fingerprint;
  for (int i = 0; i < 3; ++i) count += num_different(a.state[i], b.state[i], zenflow::kFp32);
  count += a.weight != b.weight;
  count += num_different(a.selected_grad, b.selected_grad, a.side.grad_type);
  return count + num_different(a.energy, b.energy, zenflow::kFp32);
}

size_t compare(int isa, int portable, unsigned seed) {
  std::mt19937 random(seed);
  size_t count = 0;
  for (int repeat = 0; repeat < 600; ++repeat) {
    Case ours(random);
    Case theirs = ours;
    ours.sweep(isa);
    theirs.sweep(portable);
    for (int i = 0; i < 3; ++i) count += num_different(ours.state[i], theirs.state[i], zenflow::kFp32);
    count += num_different(ours.out, theirs.out, ours.weight_type);
    SideCase one(random);
    SideCase other = one;
    one.run(isa);
    other.run(portable);
    count += num_different(one, other);
  }
  return count;
}

// One batch, carried out by several threads that share it.
size_t run_batch(int isa, int num_threads, std::vector<SideCase>& batch) {
  std::vector<zenflow::Side> sides;
  std::vector<const void*> staged;
  for (SideCase& each : batch) {
    sides.push_back(each.placed());
    staged.push_back(each.staged.data());
  }
  zenflow::Turns turns[2] = {};
  size_t changed = 0;
  const auto work = [&] {
    zenflow_publish(isa, &turns[0], sides.size(), sides.data(), staged.data());
    zenflow_num_changed(isa, &turns[1], sides.size(), sides.data(), &changed);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return changed;
}

size_t compare_batches(int isa) {
  std::mt19937 random(5);
  size_t count = 0;
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::vector<SideCase> shared;
    for (int i = 0; i < 20; ++i) shared.emplace_back(random);
    std::vector<SideCase> alone = shared;
    count += run_batch(isa, 3, shared) != run_batch(isa, 1, alone);
    for (size_t i = 0; i < shared.size(); ++i) count += num_different(shared[i], alone[i]);
  }
  return count;
}

}  // namespace

int main() {
  int portable = 0;
  while (zenflow_isa_name(portable + 1)) ++portable;  // the last
  size_t total = 0;
  for (int isa = 0; isa <= portable; ++isa) {
    if (!zenflow_isa_runs_here(isa)) continue;
    size_t counts[6] = {};
    counts[4] = compare(isa, portable, 4);
    counts[5] = compare_batches(isa);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 4; ++i) {
      threads.emplace_back([&counts, isa, portable, i] { counts[i] = compare(isa, portable, i); });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t count : counts) total += count;
    printf("%s: %zu differ from %s so far\n", zenflow_isa_name(isa), total, zenflow_isa_name(portable));
  }
  return total != 0;
}
