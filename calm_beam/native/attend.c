/* What packed queries have of keys and values, of their paths or of their sources, as one call: see
   model/native_attention.py.

   XLA copies keys and values together first, number by number, which takes several times as long as all that is done
   with them. Here they are read where they stand.

   A query's numbers are the same whatever the other rows of a call and the threads are. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "memory.h"
#include "tasks.h"
#include "vectors.h"

enum {
  kRowsOfTask = 8,
  kMostVectors = 4, /* Of a head, whose sums are kept in registers. */
};

/* The logarithm of e to the base of two, and what the first leaves out of it. */
static const float kLog2 = 1.44269504f, kMoreOfLog2 = 1.92596303e-8f;

/* Of no keys: far below the exponent of any logit. */
static const float kNothing = -1e10f;

/* Shapes in brackets; a position is a node of a store or of a source. */
typedef struct {
  int64_t rows, heads, key_heads, size, most;
  int64_t position_stride, head_stride, place_stride; /* Numbers from one to the next. */
  const float* queries;       /* [rows, heads, size] */
  const float *keys, *values;
  /* Of paths. */
  const int32_t* paths;       /* [rows, most]: nodes by step; NULL for sources */
  const int32_t* steps;       /* [rows]: of the query */
  const float* biases;        /* [bias heads, ages]: by how many steps a key is older */
  int64_t nodes, bias_heads, ages, first, window;
  /* Of sources. */
  const int32_t* of_row;      /* [rows]: the place of each row's source */
  const uint8_t* mask;        /* [places, most] */
  const int32_t* seen_from;   /* [rows]: the first position that is seen */
  int64_t places;
  float* mixed;               /* [rows, heads, size] */
  float *largest, *totals;    /* [rows, heads] */
} Attention;

/* What a row sees: `count` positions, with where their keys stand, and how old they are. */
typedef struct {
  int64_t count;
  int64_t* offsets;
  int32_t* ages;
} Seen;

static void look_along_path(const Attention* a, int64_t row, Seen* seen) {
  const int64_t step = a->steps[row];
  int64_t from = step + 1 - a->window;
  if (from < a->first) from = a->first;
  for (int64_t at = from; at <= step && at < a->most; ++at) {
    int64_t node = a->paths[row * a->most + at];
    if (node >= a->nodes) node = a->nodes - 1;
    seen->offsets[seen->count] = node * a->position_stride;
    seen->ages[seen->count++] = (int32_t)(step - at);
  }
}

static void look_at_source(const Attention* a, int64_t row, Seen* seen) {
  const int64_t place = a->of_row[row];
  /* Rows of padding have none. */
  if (place >= a->places) return;
  for (int64_t at = a->seen_from[row]; at < a->most; ++at)
    if (a->mask[place * a->most + at]) seen->offsets[seen->count++] = place * a->place_stride + at * a->position_stride;
}

static inline Floats load_some(const float* values, int64_t count) {
  Floats some = {0};
  memcpy(&some, values, sizeof(float) * count);
  return some;
}

static inline float product(const float* one, const float* other, int64_t size) {
  Floats sum = {0};
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) sum += load(one + at) * load(other + at);
  if (at < size) sum += load_some(one + at, size - at) * load_some(other + at, size - at);
  return sum_of(sum);
}

/* Returns 2^x for x up to 0; 0 far below, and NaN for NaN. */
static inline Floats power_of_two(Floats x) {
  const Integers is_low = x < -126;
  x = (Floats)((~is_low & (Integers)x) | (is_low & (Integers)all(-126)));
  const Floats count = rounded(x);
  const Floats r = x - count;
  Floats p = r * 1.54035304e-4f + 1.33335581e-3f;
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  p = p * r + 1.f;
  return taken(~is_low, scaled(p, count));
}

/* Makes logits their exponentials, divided by a power of two, and puts it and the sum into `largest` and `total`. */
static void exponentiate(float* logits, int64_t count, float* largest, float* total) {
  Floats most = all(-INFINITY);
  /* What is no number is left out here, and comes out of the exponential. */
  for (int64_t at = 0; at < count; at += kLanes) {
    const Integers is_there = before(count, at);
    const Floats here = load(logits + at);
    most = larger((Floats)((is_there & (Integers)here) | (~is_there & (Integers)most)), most);
  }
  const float highest = most_of(most);
  *largest = ceilf(highest * kLog2);
  /* Of the highest: from a half to one, whatever is lost where logits are enormous. */
  float exponent = fmaf(highest, kLog2, -*largest) + highest * kMoreOfLog2;
  exponent = exponent > 0 ? 0 : exponent < -1 ? -1 : exponent;
  const Floats scale = all(exp2f(exponent));
  Floats sum = {0};
  for (int64_t at = 0; at < count; at += kLanes) {
    const Floats below = load(logits + at) - highest;
    const Floats exponential = scale * power_of_two(below * kLog2 + below * kMoreOfLog2);
    store(logits + at, exponential);
    sum += taken(before(count, at), exponential);
  }
  *total = sum_of(sum);
}

/* Puts the sums of `vectors` vectors of values, times weights, into `mixed`. */
static inline __attribute__((always_inline)) void mix_vectors(const float* values, const Seen* seen,
                                                              const float* weights, const int vectors, float* mixed) {
  Floats sums[kMostVectors] = {{0}};
  for (int64_t i = 0; i < seen->count; ++i)
    for (int vector = 0; vector < vectors; ++vector)
      sums[vector] += weights[i] * load(values + seen->offsets[i] + vector * kLanes);
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

static void attend_row(const Attention* a, int64_t row, Seen* seen, float* logits) {
  const int64_t group = a->heads / a->key_heads;
  for (int64_t head = 0; head < a->heads; ++head) {
    const int64_t at = row * a->heads + head, of_head = head / group * a->head_stride;
    if (!seen->count) {
      memset(a->mixed + at * a->size, 0, sizeof(float) * a->size);
      a->largest[at] = kNothing;
      a->totals[at] = 0;
      continue;
    }
    for (int64_t i = 0; i < seen->count; ++i)
      logits[i] = product(a->queries + at * a->size, a->keys + of_head + seen->offsets[i], a->size);
    if (a->bias_heads) {
      const float* biases = a->biases + (a->bias_heads == 1 ? 0 : head) * a->ages;
      for (int64_t i = 0; i < seen->count; ++i) logits[i] += biases[seen->ages[i]];
    }
    exponentiate(logits, seen->count, a->largest + at, a->totals + at);
    mix(a->values + of_head, seen, logits, a->size, a->mixed + at * a->size);
  }
}

static int attend_rows(const void* call, int64_t task) {
  const Attention* a = call;
  int has_memory = 1;
  Seen seen = {0};
  seen.offsets = memory_of(sizeof(int64_t) * a->most, &has_memory);
  seen.ages = memory_of(sizeof(int32_t) * a->most, &has_memory);
  /* Read by whole vectors. */
  float* logits = memory_of(sizeof(float) * (a->most + kLanes), &has_memory);
  for (int64_t row = task * kRowsOfTask; has_memory && row < (task + 1) * kRowsOfTask && row < a->rows; ++row) {
    seen.count = 0;
    if (a->paths)
      look_along_path(a, row, &seen);
    else
      look_at_source(a, row, &seen);
    attend_row(a, row, &seen, logits);
  }
  free(seen.offsets), free(seen.ages), free(logits);
  return has_memory;
}

static XLA_FFI_Error* attend(const XLA_FFI_CallFrame* frame, Attention* a) {
  XLA_FFI_Buffer** asked = (XLA_FFI_Buffer**)frame->args.args;
  XLA_FFI_Buffer** given = (XLA_FFI_Buffer**)frame->rets.rets;
  a->rows = asked[0]->dims[0], a->heads = asked[0]->dims[1], a->size = asked[0]->dims[2];
  a->queries = asked[0]->data, a->keys = asked[1]->data, a->values = asked[2]->data;
  a->mixed = given[0]->data, a->largest = given[1]->data, a->totals = given[2]->data;
  return run_tasks(frame, a, attend_rows, (a->rows + kRowsOfTask - 1) / kRowsOfTask)
             ? NULL
             : no_memory(frame->api, "no memory for the logits of attention");
}

/* Queries, stores of keys and of values, [nodes, heads of keys * size], paths, steps, biases; the first step that is
   seen, and how many steps are. */
XLA_FFI_Error* calm_beam_attend_to_path(XLA_FFI_CallFrame* frame) {
  if (asks_for_version(frame)) return NULL;
  XLA_FFI_Buffer** asked = (XLA_FFI_Buffer**)frame->args.args;
  const int64_t size = asked[0]->dims[2];
  Attention attention = {
      .most = asked[3]->dims[1],
      .key_heads = asked[1]->dims[1] / size,
      .position_stride = asked[1]->dims[1],
      .head_stride = size,
      .nodes = asked[1]->dims[0],
      .paths = asked[3]->data,
      .steps = asked[4]->data,
      .biases = asked[5]->data,
      .bias_heads = asked[5]->dims[0],
      .ages = asked[5]->dims[1],
      .first = *(const int32_t*)asked[6]->data,
      .window = *(const int32_t*)asked[7]->data,
  };
  return attend(frame, &attention);
}

/* Queries, keys and values, [places, heads of keys, source, size], each row's place, mask; the first position that
   each row sees. */
XLA_FFI_Error* calm_beam_attend_to_source(XLA_FFI_CallFrame* frame) {
  if (asks_for_version(frame)) return NULL;
  XLA_FFI_Buffer** asked = (XLA_FFI_Buffer**)frame->args.args;
  const int64_t *dims = asked[1]->dims, size = dims[3];
  Attention attention = {
      .most = dims[2],
      .key_heads = dims[1],
      .position_stride = size,
      .head_stride = dims[2] * size,
      .place_stride = dims[1] * dims[2] * size,
      .places = dims[0],
      .of_row = asked[3]->data,
      .mask = asked[4]->data,
      .seen_from = asked[5]->data,
  };
  return attend(frame, &attention);
}
