// Sweeps random bits with each instruction set, alone and in four threads at once, and compares the
// results with those of portable code. For sanitizers, and for processors that Python does not run on:
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
    size_t counts[5] = {};
    counts[4] = compare(isa, portable, 4);
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
