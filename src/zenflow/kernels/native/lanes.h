// One vector register's worth of elements and what the sweep needs of it.
//
// Arithmetic is written with the compilers' vector extensions, so the same text becomes AVX-512, AVX2,
// NEON or whatever the target has. What they do not express well is here, one branch for each
// instruction set. Every branch gives the same bits.
//
// No standard header with inline functions may be included: the linker keeps one copy of those, and
// it might be the one compiled for AVX-512.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(ZENFLOW_PORTABLE) && (defined(__AVX2__) || defined(__AVX512F__))
#include <immintrin.h>
#elif !defined(ZENFLOW_PORTABLE) && defined(__aarch64__)
#include <arm_neon.h>
#define ZENFLOW_NEON
#endif

static_assert(FLT_EVAL_METHOD == 0, "each operation must round to fp32");

#define ZENFLOW_INLINE inline __attribute__((always_inline))

namespace zenflow::ZENFLOW_ISA {

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif
constexpr size_t kLanes = kVectorBytes / sizeof(float);

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

template <class To, class From>
ZENFLOW_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector>
ZENFLOW_INLINE Vector load_vector(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

// 16-bit elements, zero-extended.
ZENFLOW_INLINE Words widen(const uint16_t* from) {
#if !defined(ZENFLOW_PORTABLE) && defined(__AVX512F__)
  return bits_of<Words>(_mm512_cvtepu16_epi32(load_vector<__m256i>(from)));
#elif !defined(ZENFLOW_PORTABLE) && defined(__AVX2__)
  return bits_of<Words>(_mm256_cvtepu16_epi32(load_vector<__m128i>(from)));
#else
  return __builtin_convertvector(load_vector<Halves>(from), Words);
#endif
}

ZENFLOW_INLINE Floats sqrt(Floats x) {
#if defined(ZENFLOW_PORTABLE)
  for (size_t i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#elif defined(__AVX512F__)
  return bits_of<Floats>(_mm512_sqrt_ps(bits_of<__m512>(x)));
#elif defined(__AVX2__)
  return bits_of<Floats>(_mm256_sqrt_ps(bits_of<__m256>(x)));
#elif defined(ZENFLOW_NEON)
  return bits_of<Floats>(vsqrtq_f32(bits_of<float32x4_t>(x)));
#endif
}

struct Fp32 {
  using Stored = float;
  static ZENFLOW_INLINE Floats load(const float* from) { return load_vector<Floats>(from); }
  static ZENFLOW_INLINE void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }
};

// Rounded to nearest even in integers: AVX-512's own conversion would flush denormals.
struct Bf16 {
  using Stored = uint16_t;

  static ZENFLOW_INLINE Floats load(const uint16_t* from) {
    return bits_of<Floats>(widen(from) << 16);
  }

  static ZENFLOW_INLINE void store(uint16_t* to, Floats x) {
    const Words bits = bits_of<Words>(x);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const Halves out = __builtin_convertvector(x != x ? quiet : rounded, Halves);
    memcpy(to, &out, sizeof out);
  }
};

struct Fp16 {
  using Stored = uint16_t;

#if !defined(ZENFLOW_PORTABLE) && defined(__AVX512F__)
  static ZENFLOW_INLINE Floats load(const uint16_t* from) {
    return bits_of<Floats>(_mm512_cvtph_ps(load_vector<__m256i>(from)));
  }
  static ZENFLOW_INLINE void store(uint16_t* to, Floats x) {
    const __m256i out = _mm512_cvtps_ph(bits_of<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
    memcpy(to, &out, sizeof out);
  }
#elif !defined(ZENFLOW_PORTABLE) && defined(__AVX2__)
  static ZENFLOW_INLINE Floats load(const uint16_t* from) {
    return bits_of<Floats>(_mm256_cvtph_ps(load_vector<__m128i>(from)));
  }
  static ZENFLOW_INLINE void store(uint16_t* to, Floats x) {
    const __m128i out = _mm256_cvtps_ph(bits_of<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
    memcpy(to, &out, sizeof out);
  }
#elif defined(ZENFLOW_NEON)
  static ZENFLOW_INLINE Floats load(const uint16_t* from) {
    return bits_of<Floats>(vcvt_f32_f16(load_vector<float16x4_t>(from)));
  }
  static ZENFLOW_INLINE void store(uint16_t* to, Floats x) {
    const float16x4_t out = vcvt_f16_f32(bits_of<float32x4_t>(x));
    memcpy(to, &out, sizeof out);
  }
#else
  static ZENFLOW_INLINE Floats load(const uint16_t* from) {
    const Words half = widen(from);
    const Words magnitude = half & 0x7fff;
    const Words normal = (magnitude << 13) + (112u << 23);
    const Words special = (magnitude << 13) | (255u << 23);  // infinities and NaN
    const Floats tiny = __builtin_convertvector(bits_of<Ints>(magnitude), Floats) * 0x1p-24f;
    const Words finite = magnitude < 0x400 ? bits_of<Words>(tiny) : normal;
    const Words unsigned_bits = magnitude >= 0x7c00 ? special : finite;
    return bits_of<Floats>(unsigned_bits | ((half & 0x8000) << 16));
  }
  static ZENFLOW_INLINE void store(uint16_t* to, Floats x) {
    const Words bits = bits_of<Words>(x);
    const Words magnitude = bits & 0x7fffffff;
    const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 1/2 leaves a denormal half's bits, rounded, at the end of the sum's.
    const Floats shifted = bits_of<Floats>(magnitude) + 0.5f;
    const Words small = bits_of<Words>(shifted) - 0x3f000000;
    const Words finite = magnitude < 0x38800000 ? small : normal;
    const Words special = magnitude > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
    const Words unsigned_bits = magnitude >= 0x47800000 ? special : finite;
    const Words half = unsigned_bits | ((bits >> 16) & 0x8000);
    const Halves out = __builtin_convertvector(half, Halves);
    memcpy(to, &out, sizeof out);
  }
#endif
};

}  // namespace zenflow::ZENFLOW_ISA
