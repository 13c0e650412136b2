/* Vectors of numbers: AVX-512, AVX2, or a compiler's vectors of four numbers. */

#ifndef CALM_BEAM_VECTORS_H_
#define CALM_BEAM_VECTORS_H_

#include <math.h>
#include <stdint.h>
#include <string.h>

enum {
#if defined __AVX512F__
  kLanes = 16,       /* Numbers in a vector. */
  kTileVectors = 4,  /* Vectors of a row whose sums are kept in registers for kRowsAtATime rows. */
  kVectorsOfRow = 4, /* The same for one row, and for two. */
  kVectorsOfTwoRows = 4,
#elif defined __AVX2__
  kLanes = 8,
  kTileVectors = 2,
  kVectorsOfRow = 8,
  kVectorsOfTwoRows = 4,
#else
  kLanes = 4,
  kTileVectors = 2,
  kVectorsOfRow = 8,
  kVectorsOfTwoRows = 4,
#endif
  kRowsAtATime = 6,  /* Rows whose sums fit in registers, together with some weights. */
};

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedFloats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Naturals __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UnalignedHalves __attribute__((vector_size(2 * kLanes), aligned(2)));

static inline Floats load(const float* values) { return *(const UnalignedFloats*)values; }

static inline void store(float* values, Floats what) { *(UnalignedFloats*)values = what; }

/* Returns the first numbers, padded with zeros. */
static inline Floats load_some(const float* values, int64_t count) {
  Floats some = {0};
  memcpy(&some, values, sizeof(float) * count);
  return some;
}

static inline Floats of_bfloat16(UnalignedHalves halves) {
  return (Floats)(__builtin_convertvector(halves, Naturals) << 16);
}

static inline Floats all(float value) { return value - (Floats){0}; }

/* Returns the lanes where `is_taken` is -1, and zeros where it is 0. */
static inline Floats taken(Integers is_taken, Floats values) { return (Floats)(is_taken & (Integers)values); }

/* Returns one where `is_one` is -1, and the other where it is 0. */
static inline Floats either(Integers is_one, Floats one, Floats other) {
  return (Floats)((is_one & (Integers)one) | (~is_one & (Integers)other));
}

static inline Floats magnitude(Floats values) { return (Floats)((Integers)values & 0x7fffffff); }

static inline Integers of_lanes(void) {
  Integers lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  return lanes;
}

/* Returns -1 in the lanes of indices below `size`; the first lane is index `first`. */
static inline Integers before(int64_t size, int64_t first) {
  return of_lanes() < (int32_t)(size - first < kLanes ? size - first : kLanes);
}

#ifdef __AVX2__

#include <immintrin.h>

#ifdef __AVX512F__
typedef __m512 Lanes;
typedef __m256i HalfLanes;
#define OF_WIDTH(name) _mm512_##name
#define ROUNDED(values) _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#else
typedef __m256 Lanes;
typedef __m128i HalfLanes;
#define OF_WIDTH(name) _mm256_##name
#define ROUNDED(values) _mm256_round_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#endif

/* Returns one * other + sum, rounded once. */
static inline Floats fused(Floats one, Floats other, Floats sum) {
  return (Floats)OF_WIDTH(fmadd_ps)((Lanes)one, (Lanes)other, (Lanes)sum);
}

/* Returns the second argument if either is NaN. */
static inline Floats larger(Floats one, Floats other) { return (Floats)OF_WIDTH(max_ps)((Lanes)one, (Lanes)other); }

static inline Floats smaller(Floats one, Floats other) { return (Floats)OF_WIDTH(min_ps)((Lanes)one, (Lanes)other); }

/* Rounds to the nearest integer. */
static inline Floats rounded(Floats values) { return (Floats)ROUNDED((Lanes)values); }

static inline Integers whole(Floats integers) { return (Integers)OF_WIDTH(cvtps_epi32)((Lanes)integers); }

static inline Floats of_float16(UnalignedHalves halves) { return (Floats)OF_WIDTH(cvtph_ps)((HalfLanes)halves); }

#else

/* Rounded once only where all processors of this kind can. */
static inline Floats fused(Floats one, Floats other, Floats sum) {
#ifdef __FP_FAST_FMAF
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] = __builtin_fmaf(one[lane], other[lane], sum[lane]);
  return sum;
#else
  return one * other + sum;
#endif
}

static inline Floats larger(Floats one, Floats other) { return either(one > other, one, other); }

static inline Floats smaller(Floats one, Floats other) { return either(one < other, one, other); }

/* For magnitudes up to 2^22. */
static inline Floats rounded(Floats values) { return values + 0x1.8p23f - 0x1.8p23f; }

static inline Integers whole(Floats integers) { return __builtin_convertvector(integers, Integers); }

/* Portable code is given no such weights: few processors convert them without AVX2. */
static inline Floats of_float16(UnalignedHalves halves) { return (void)halves, all(NAN); }

#endif

#ifdef __AVX512F__

static inline float sum_of(Floats values) { return _mm512_reduce_add_ps((__m512)values); }

static inline float most_of(Floats values) { return _mm512_reduce_max_ps((__m512)values); }

#else

/* Reduces halves, until one number is left. */
static inline float sum_of(Floats values) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) values[lane] += values[lane + half];
  return values[0];
}

static inline float most_of(Floats values) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      values[lane] = values[lane] > values[lane + half] ? values[lane] : values[lane + half];
  return values[0];
}

#endif

/* Returns values of about 1 times two to the power of integers from -125 to 0: the exponent is above 23 bits. */
static inline Floats scaled(Floats values, Floats powers) {
  return (Floats)((Integers)values + (whole(powers) << 23));
}

#endif
