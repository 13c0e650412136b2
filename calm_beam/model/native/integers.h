/* Products of 8-bit integers, and other vector operations of certified heads, for AVX-512 with VNNI or for AVX2. */

#ifndef CALM_BEAM_INTEGERS_H_
#define CALM_BEAM_INTEGERS_H_

#include <stdint.h>
#include <string.h>

#include "memory.h"
#include "vectors.h"

enum {
  kSides = 16,       /* Entries whose weights are adjacent. */
  kBlock = 64,       /* Entries of a block of the vocabulary. */
  kVectors = kBlock / kLanes,
  kAhead = 8,        /* Bytes that are prefetched during the products of a column with kRowsAtATime rows. */
};

typedef int32_t UnalignedIntegers __attribute__((vector_size(4 * kLanes), aligned(4)));

/* Into the L2 cache: the L1 cache takes prefetches at half the rate. */
static inline void ask_for_line(const void* memory) { __builtin_prefetch(memory, 0, 2); }

/* Returns the bits of floats as integers in the order of the floats, and the other way round. */
static inline Integers in_order(Integers bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

/* Stores whole vectors past the caches; other threads see them after `finish_far_stores`. */
static inline void store_far(float* values, Floats what) { OF_WIDTH(stream_ps)(values, (Lanes)what); }

static inline void finish_far_stores(void) { _mm_sfence(); }

#ifdef __AVX512VNNI__

typedef int8_t Multiple; /* The integers of quantised states. */

enum { kMostParts = 2 }; /* Parts of a quantised state. */

static inline float largest_multiple(int64_t width) { return (void)width, 127; }

static inline void store_multiples(Multiple* multiples, Floats integers) {
  _mm_storeu_si128((__m128i*)multiples, _mm512_cvtepi32_epi8((__m512i)whole(integers)));
}

/* Appends the values that are `enough`, and their indices, the first of which is given, and returns their number.
   Writes a whole vector. */
static inline int64_t gather_reaching(Floats from, float enough, int32_t place, float* values, int32_t* places) {
  const __mmask16 reaches = _mm512_cmp_ps_mask((__m512)from, _mm512_set1_ps(enough), _CMP_GE_OQ);
  /* In registers: stores that compress take a hundred cycles on some processors. */
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(reaches, (__m512)from));
  _mm512_storeu_si512(places, _mm512_maskz_compress_epi32(reaches, (__m512i)(of_lanes() + place)));
  return __builtin_popcount(reaches);
}

/* Writes the products of `count` states with a block of weights to `sums`, [count, 64]; with kRowsAtATime states, it
   prefetches [width, 8] bytes of `ahead`, little by little: more at a time would delay the weights.

   States are [count, stride], weights [4, width / 4, 16, 4]. Both are padded with zeros to a multiple of four. */
static inline __attribute__((always_inline)) void multiply(const uint8_t* weights, const Multiple* states, int64_t width,
                                                           int64_t stride, const int count, const uint8_t* ahead,
                                                           int32_t* sums) {
  __m512i total[kRowsAtATime][kVectors];
  for (int row = 0; row < count; ++row)
    for (int vector = 0; vector < kVectors; ++vector) total[row][vector] = _mm512_setzero_si512();
  for (int64_t column = 0; column < width; column += 4) {
    if (count == kRowsAtATime && column % (kLine / kAhead) == 0) ask_for_line(ahead + column * kAhead);
    __m512i block[kVectors];
    for (int vector = 0; vector < kVectors; ++vector)
      block[vector] = _mm512_loadu_si512(weights + (vector * width + column) * kSides);
    for (int row = 0; row < count; ++row) {
      int32_t four;
      memcpy(&four, states + row * stride + column, sizeof four);
      const __m512i state = _mm512_set1_epi32(four);
      for (int vector = 0; vector < kVectors; ++vector)
        total[row][vector] = _mm512_dpbusd_epi32(total[row][vector], block[vector], state);
    }
  }
  for (int row = 0; row < count; ++row)
    for (int vector = 0; vector < kVectors; ++vector)
      _mm512_storeu_si512(sums + row * kBlock + vector * kLanes, total[row][vector]);
}

#else

typedef int16_t Multiple; /* Products of 8-bit integers would overflow in pairs here. */

enum { kMostParts = 1 };

/* Sums of products with weights must have room. */
static inline float largest_multiple(int64_t width) {
  const int64_t most = INT32_MAX / (UINT8_MAX * width);
  return most < INT16_MAX ? most : INT16_MAX;
}

static inline void store_multiples(Multiple* multiples, Floats integers) {
  const __m256i wide = (__m256i)whole(integers);
  _mm_storeu_si128((__m128i*)multiples, _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}

static inline int64_t gather_reaching(Floats from, float enough, int32_t place, float* values, int32_t* places) {
  unsigned reaches = (unsigned)_mm256_movemask_ps(_mm256_cmp_ps((__m256)from, _mm256_set1_ps(enough), _CMP_GE_OQ));
  int64_t found = 0;
  for (; reaches; reaches &= reaches - 1, ++found) {
    const int lane = __builtin_ctz(reaches);
    values[found] = from[lane];
    places[found] = place + lane;
  }
  return found;
}

/* Four entries' products with four columns of one row are eight sums of two. */
static inline __attribute__((always_inline)) void multiply_some(const uint8_t* weights, const Multiple* states,
                                                                int64_t width, int64_t stride, const int count,
                                                                const int fours, const uint8_t* ahead, int32_t* sums) {
  __m256i total[kRowsAtATime][4];
  for (int row = 0; row < count; ++row)
    for (int four = 0; four < fours; ++four) total[row][four] = _mm256_setzero_si256();
  for (int64_t column = 0; column < width; column += 4) {
    if (count == kRowsAtATime && column % kLine == 0) ask_for_line(ahead + column);
    __m256i block[4];
    for (int four = 0; four < fours; ++four)
      block[four] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(weights + column * kSides) + four));
    for (int row = 0; row < count; ++row) {
      int64_t columns;
      memcpy(&columns, states + row * stride + column, sizeof columns);
      const __m256i state = _mm256_set1_epi64x(columns);
      for (int four = 0; four < fours; ++four) {
        total[row][four] = _mm256_add_epi32(total[row][four], _mm256_madd_epi16(block[four], state));
        /* Keeps gcc from computing all products first, which would spill sums from registers. */
        __asm__("" : "+x"(total[row][four]));
      }
    }
  }
  for (int row = 0; row < count; ++row)
    for (int four = 0; four < fours; ++four) {
      /* Multiply by one each: entries one and two, then three and four. */
      const __m256i sum = _mm256_hadd_epi32(total[row][four], total[row][four]);
      const __m128i low = _mm256_castsi256_si128(sum), high = _mm256_extracti128_si256(sum, 1);
      _mm_storeu_si128((__m128i*)(sums + row * kBlock + 4 * four), _mm_unpacklo_epi64(low, high));
    }
}

static inline __attribute__((always_inline)) void multiply(const uint8_t* weights, const Multiple* states, int64_t width,
                                                           int64_t stride, const int count, const uint8_t* ahead,
                                                           int32_t* sums) {
  /* Few rows leave registers for all adjacent entries. */
  const int fours = count <= 2 ? 4 : 2;
  for (int side = 0; side < kBlock / kSides; ++side)
    for (int four = 0; four < 4; four += fours, ahead += width)
      multiply_some(weights + side * width * kSides + 16 * four, states, width, stride, count, fours, ahead,
                    sums + side * kSides + 4 * four);
}

#endif

#endif
