/* Attention of many queries of a prompt over its keys and values, head by head, as products of matrices. */

#ifndef CALM_BEAM_PROMPTS_H_
#define CALM_BEAM_PROMPTS_H_

#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "memory.h"
#include "products.h"

/* The tokens that queries of a prompt see: `count` of them, with the indices of their keys, and their positions. */
typedef struct {
  int64_t count;
  int64_t* offsets;
  int32_t* positions;
} Tokens;

/* Queries of one head, by ascending positions. Each sees the tokens from its position + 1 - window on, up to its own
   position, or all of them. */
typedef struct {
  const float* queries; /* [count, stride] */
  float* mixed;         /* [count, stride] */
  int64_t count, stride;
  const int32_t* positions; /* [count] */
  int64_t window;
  int sees_all;
} Queries;

/* Keys and values of one head in panels: [panels of tokens, size, 64], and [panels of numbers, tokens, 64]. */
static void pack_head(const Keys* keys, const Tokens* tokens, int64_t key_head, float* of_keys, float* of_values) {
  const int64_t size = keys->size, first = key_head * size;
  for (int64_t at = 0; at < tokens->count; ++at) {
    const float *key = keys->keys + tokens->offsets[at] + first, *value = keys->values + tokens->offsets[at] + first;
    float* column = of_keys + at / kPanel * size * kPanel + at % kPanel;
    for (int64_t number = 0; number < size; ++number) column[number * kPanel] = key[number];
    for (int64_t number = 0; number < size; number += kPanel) {
      const int64_t numbers = size - number < kPanel ? size - number : kPanel;
      memcpy(of_values + (number / kPanel * tokens->count + at) * kPanel, value + number, sizeof(float) * numbers);
    }
  }
}

/* Adds biases to the logits of a query, which are by how many positions a token is older, from -ages / 2 on: those that
   are further away count as the last. */
static void add_biases(const Keys* keys, const Tokens* tokens, int64_t head, int32_t position, float* logits) {
  const int32_t most = (int32_t)(keys->ages / 2);
  const float* biases = keys->biases + (keys->bias_heads == 1 ? 0 : head) * keys->ages;
  for (int64_t at = 0; at < tokens->count; ++at) {
    const int32_t age = position - tokens->positions[at];
    logits[at] += biases[most + (age < -most ? -most : age > most ? most : age)];
  }
}

/* Writes each query's values, weighted by the softmax of its logits, to `mixed`. Returns 0 if there is not enough
   memory. */
static int attend_in_head(const Keys* keys, const Tokens* tokens, int64_t head, const Queries* queries) {
  const int64_t size = keys->size, count = tokens->count, panels = (count + kPanel - 1) / kPanel;
  const int64_t stride = (panels + 1) * kPanel, wide = (size + kPanel - 1) / kPanel * kPanel;
  int has_memory = 1;
  const int64_t numbers = panels * kPanel * size + count * wide + kRowsAtATime * stride;
  float* memory = memory_of(sizeof(float) * numbers, &has_memory);
  if (!has_memory) return 0;
  float *of_values = memory + panels * kPanel * size, *logits = of_values + count * wide;
  /* The columns behind the last token are multiplied too. */
  memset(memory, 0, sizeof(float) * panels * kPanel * size);
  pack_head(keys, tokens, head / (keys->heads / keys->key_heads), memory, of_values);
  float sums[kRowsAtATime * kPanel];
  int64_t from = 0, end = queries->sees_all ? count : 0;
  for (int64_t row = 0; row < queries->count; row += kRowsAtATime) {
    const int64_t rows = queries->count - row < kRowsAtATime ? queries->count - row : kRowsAtATime;
    const int32_t* positions = queries->positions + row;
    while (!queries->sees_all && end < count && tokens->positions[end] <= positions[rows - 1]) ++end;
    for (int64_t first = 0; first < end; first += kPanel) {
      const int64_t columns = end - first < kPanel ? end - first : kPanel;
      multiply_some(queries->queries + row * queries->stride, queries->stride, memory + first * size, kFloat32,
                    size, columns, rows, sums);
      for (int64_t each = 0; each < rows; ++each)
        memcpy(logits + each * stride + first, sums + each * kPanel, sizeof(float) * columns);
    }
    float totals[kRowsAtATime];
    for (int64_t each = 0; each < rows; ++each) {
      float *of_row = logits + each * stride, largest;
      int64_t seen = end;
      while (!queries->sees_all && tokens->positions[seen - 1] > positions[each]) --seen;
      while (!queries->sees_all && tokens->positions[from] <= positions[each] - queries->window) ++from;
      if (keys->bias_heads) add_biases(keys, tokens, head, positions[each], of_row);
      exponentiate(of_row + from, seen - from, &largest, &totals[each]);
      memset(of_row, 0, sizeof(float) * from);
      memset(of_row + seen, 0, sizeof(float) * (end - seen));
    }
    for (int64_t first = 0; first < size; first += kPanel) {
      const int64_t columns = size - first < kPanel ? size - first : kPanel;
      multiply_some(logits, stride, of_values + first * count, kFloat32, end, columns, rows, sums);
      for (int64_t each = 0; each < rows; ++each)
        for (int64_t at = 0; at < columns; ++at)
          queries->mixed[(row + each) * queries->stride + first + at] = sums[each * kPanel + at] / totals[each];
    }
  }
  free(memory);
  return 1;
}

#endif
