/* Products of rows of numbers with each other and with matrices. They are batch-invariant: a row gives the same bits in
   any call. */

#ifndef CALM_BEAM_PRODUCTS_H_
#define CALM_BEAM_PRODUCTS_H_

#include <stdint.h>

#include "vectors.h"

enum { kPanel = 64 }; /* Columns whose weights are adjacent. */

/* How weights are stored: as floats, or in two bytes if that changes none of them. Few rows wait for memory, and
   products are the same, bit for bit. */
enum { kFloat32, kBfloat16, kFloat16 };

/* Weights of `columns` columns: [panels, inputs, 64], padded with zeros. */
typedef struct {
  const void* weights;
  int64_t inputs, columns, stored;
} Matrix;

static inline int64_t panels_of(const Matrix* matrix) { return (matrix->columns + kPanel - 1) / kPanel; }

/* Returns how many columns of a panel are not padding. */
static inline int64_t columns_of(const Matrix* matrix, int64_t panel) {
  const int64_t left = matrix->columns - panel * kPanel;
  return left < kPanel ? left : kPanel;
}

static inline Floats weights_from(const void* panel, int64_t at, const int stored) {
  if (stored == kFloat32) return load((const float*)panel + at);
  const UnalignedHalves halves = *(const UnalignedHalves*)((const uint16_t*)panel + at);
  return stored == kFloat16 ? of_float16(halves) : of_bfloat16(halves);
}

/* The sums of `count` rows in `vectors` vectors stay in registers. */
static inline __attribute__((always_inline)) void multiply_tile(const float* rows, int64_t stride, const void* panel,
                                                                const int stored, int64_t inputs, int64_t columns,
                                                                const int count, const int vectors, float* sums) {
  for (int first = 0; first < columns; first += vectors * kLanes) {
    Floats total[kRowsAtATime][kVectorsOfRow];
    for (int row = 0; row < count; ++row)
      for (int vector = 0; vector < vectors; ++vector) total[row][vector] = (Floats){0};
    for (int64_t input = 0; input < inputs; ++input) {
      Floats weights[kVectorsOfRow];
      for (int vector = 0; vector < vectors; ++vector)
        weights[vector] = weights_from(panel, input * kPanel + first + vector * kLanes, stored);
      for (int row = 0; row < count; ++row) {
        const Floats value = all(rows[row * stride + input]);
        for (int vector = 0; vector < vectors; ++vector)
          total[row][vector] = fused(value, weights[vector], total[row][vector]);
      }
    }
    for (int row = 0; row < count; ++row)
      for (int vector = 0; vector < vectors; ++vector)
        store(sums + row * kPanel + first + vector * kLanes, total[row][vector]);
  }
}

/* Writes the products of kRowsAtATime rows or fewer, [count, stride], with the first columns of a panel to `sums`,
   [count, 64]; other sums may be written too, or not. */
static inline void multiply_some(const float* rows, int64_t stride, const void* panel, const int stored, int64_t inputs,
                                 int64_t columns, int64_t count, float* sums) {
  switch (count) {
    /* One row reads all weights in order: it waits for memory, and for each sum before the next. */
    case 1: multiply_tile(rows, stride, panel, stored, inputs, columns, 1, kVectorsOfRow, sums); break;
    case 2: multiply_tile(rows, stride, panel, stored, inputs, columns, 2, kVectorsOfTwoRows, sums); break;
    case 3: multiply_tile(rows, stride, panel, stored, inputs, columns, 3, kTileVectors, sums); break;
    case 4: multiply_tile(rows, stride, panel, stored, inputs, columns, 4, kTileVectors, sums); break;
    case 5: multiply_tile(rows, stride, panel, stored, inputs, columns, 5, kTileVectors, sums); break;
    default: multiply_tile(rows, stride, panel, stored, inputs, columns, kRowsAtATime, kTileVectors, sums);
  }
}

/* Writes the products of kRowsAtATime rows or fewer, [count, stride], with a panel to `sums`, [count, 64]. */
static inline void multiply_rows(const float* rows, int64_t stride, const Matrix* matrix, int64_t panel, int64_t count,
                                 float* sums) {
  const int64_t inputs = matrix->inputs, bytes = matrix->stored == kFloat32 ? 4 : 2;
  const void* weights = (const char*)matrix->weights + panel * inputs * kPanel * bytes;
  switch (matrix->stored) {
    case kFloat32: multiply_some(rows, stride, weights, kFloat32, inputs, kPanel, count, sums); break;
    case kBfloat16: multiply_some(rows, stride, weights, kBfloat16, inputs, kPanel, count, sums); break;
    default: multiply_some(rows, stride, weights, kFloat16, inputs, kPanel, count, sums);
  }
}

static inline float product(const float* one, const float* other, int64_t size) {
  Floats sum = {0};
  int64_t at = 0;
  for (; at + kLanes <= size; at += kLanes) sum = fused(load(one + at), load(other + at), sum);
  if (at < size) sum = fused(load_some(one + at, size - at), load_some(other + at, size - at), sum);
  return sum_of(sum);
}

/* Writes a row divided by its root mean square, times a scale, to `normed`. */
static inline void norm_row(const float* row, const float* scale, int64_t width, float epsilon, float* normed) {
  const float factor = 1 / sqrtf(product(row, row, width) / (float)width + epsilon);
  for (int64_t at = 0; at < width; ++at) normed[at] = row[at] * factor * scale[at];
}

#endif
