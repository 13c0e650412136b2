/* Attention of one row's queries over some keys and values, which are read in place. */

#ifndef CALM_BEAM_ATTENTION_H_
#define CALM_BEAM_ATTENTION_H_

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exponentials.h"
#include "memory.h"
#include "products.h"
#include "vectors.h"

enum { kMostVectors = 4 }; /* Of a head, whose sums are kept in registers. */

/* The exponent without keys: far below that of any logit. */
static const float kNothing = -1e10f;

/* Arrays of keys and values, and the biases of their logits. */
typedef struct {
  int64_t heads, key_heads, size; /* Numbers of a head. */
  const float *keys, *values;     /* [nodes, key_heads * size] */
  const float* biases; /* [bias heads, ages]: by how many steps a key is older */
  int64_t bias_heads, ages;
} Keys;

/* The positions that a row sees: `count` of them, with the indices of their keys, and their ages; and room for logits,
   which are read by whole vectors. */
typedef struct {
  int64_t count;
  int64_t* offsets;
  int32_t* ages;
  float* logits;
} Seen;

/* Returns room for `most` positions; free it by `forget`. */
static inline Seen seen_of(int64_t most, int* has_memory) {
  return (Seen){
      .offsets = memory_of(sizeof(int64_t) * most, has_memory),
      .ages = memory_of(sizeof(int32_t) * most, has_memory),
      .logits = memory_of(sizeof(float) * (most + kLanes), has_memory),
  };
}

static inline void forget(Seen* seen) { free(seen->offsets), free(seen->ages), free(seen->logits); }

/* Replaces logits by their exponentials, divided by a power of two; writes its exponent and the sum to `largest` and
   `total`. */
static void exponentiate(float* logits, int64_t count, float* largest, float* total) {
  Floats most = all(-INFINITY);
  /* NaN is ignored here, and propagates through the exponential. */
  for (int64_t at = 0; at < count; at += kLanes) {
    const Integers is_there = before(count, at);
    const Floats here = load(logits + at);
    most = larger(either(is_there, here, most), most);
  }
  const float highest = most_of(most);
  *largest = ceilf(highest * kLog2);
  /* The highest exponential is from a half to one, even where huge logits lose precision. */
  float exponent = fmaf(highest, kLog2, -*largest) + highest * kMoreOfLog2;
  exponent = exponent > 0 ? 0 : exponent < -1 ? -1 : exponent;
  const Floats scale = all(exp2f(exponent));
  Floats sum = {0};
  for (int64_t at = 0; at < count; at += kLanes) {
    const Floats below = load(logits + at) - highest;
    const Floats here = scale * exponential(below);
    store(logits + at, here);
    sum += taken(before(count, at), here);
  }
  *total = sum_of(sum);
}

/* Writes the sums of `vectors` vectors of values, times weights, to `mixed`. */
static inline __attribute__((always_inline)) void mix_vectors(const float* values, const Seen* seen,
                                                              const float* weights, const int vectors, float* mixed) {
  Floats sums[kMostVectors] = {{0}};
  for (int64_t i = 0; i < seen->count; ++i)
    for (int vector = 0; vector < vectors; ++vector)
      sums[vector] = fused(all(weights[i]), load(values + seen->offsets[i] + vector * kLanes), sums[vector]);
  for (int vector = 0; vector < vectors; ++vector) store(mixed + vector * kLanes, sums[vector]);
}

static void mix(const float* values, const Seen* seen, const float* weights, int64_t size, float* mixed) {
  int64_t at = 0;
  for (; at + 4 * kLanes <= size; at += 4 * kLanes) mix_vectors(values + at, seen, weights, 4, mixed + at);
  for (; at + 2 * kLanes <= size; at += 2 * kLanes) mix_vectors(values + at, seen, weights, 2, mixed + at);
  for (; at + kLanes <= size; at += kLanes) mix_vectors(values + at, seen, weights, 1, mixed + at);
  for (; at < size; ++at) {
    float sum = 0;
    for (int64_t i = 0; i < seen->count; ++i) sum += weights[i] * values[seen->offsets[i] + at];
    mixed[at] = sum;
  }
}

/* Writes each head's sums of values, times exponentials of logits, to `mixed`, [heads, size]; the sums of exponentials
   to `totals`, and the exponents of the power of two that divides them to `largest`, both [heads]. */
static void attend_row(const Keys* keys, const Seen* seen, const float* queries, float* mixed, float* largest,
                       float* totals) {
  const int64_t group = keys->heads / keys->key_heads, size = keys->size;
  float* logits = seen->logits;
  for (int64_t head = 0; head < keys->heads; ++head, queries += size, mixed += size) {
    const int64_t of_head = head / group * size;
    if (!seen->count) {
      memset(mixed, 0, sizeof(float) * size);
      largest[head] = kNothing;
      totals[head] = 0;
      continue;
    }
    for (int64_t i = 0; i < seen->count; ++i)
      logits[i] = product(queries, keys->keys + of_head + seen->offsets[i], size);
    if (keys->bias_heads) {
      const float* biases = keys->biases + (keys->bias_heads == 1 ? 0 : head) * keys->ages;
      for (int64_t i = 0; i < seen->count; ++i) logits[i] += biases[seen->ages[i]];
    }
    exponentiate(logits, seen->count, largest + head, totals + head);
    mix(keys->values + of_head, seen, logits, size, mixed);
  }
}

#endif
