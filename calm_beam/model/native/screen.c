/* The certified head in one call: see exits/certified_head.py for the bounds, and for the quantisation of weights.

   Processors are fastest at products of 8-bit integers; XLA reaches at most half of that speed, and has none without
   AVX-512. The few operations on each logit that follow are done while the logits are in the cache.

   The results are batch-invariant for any number of threads, except for the parts that few rows are quantised in:
   integers add up exactly, and floats are added row by row in one order. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "integers.h"
#include "memory.h"
#include "tasks.h"
#include "vectors.h"

#ifdef __FAST_MATH__
#error "the bounds are about IEEE arithmetic: compile without -ffast-math"
#endif

enum {
  kBlocksOfTask = 8,
  kFewRows = 8,        /* Up to this many rows, states with twice the bits cost hardly more. */
  kEntriesAtATime = 4, /* Entries whose float32 logits are computed together. */
};

/* Half the distance from 1 to the next float. */
static const float kUnit = 0x1p-24f;

/* Prefetches memory. */
static inline void ask_for(const void* memory, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += kLine) ask_for_line((const char*)memory + byte);
}

/* Numbers of a state that are computed before its products. */
typedef struct {
  float steps[kMostParts];    /* The value of a unit of its integers. */
  int32_t totals[kMostParts]; /* Their sums. */
  float norm;                 /* Norm of the whole state, rounded up, like all norms; NaN for zeros. */
  float quantised_norm;       /* Without the columns that are kept; multiplies `errors`. */
  float missing_norm;         /* Norm of the quantisation error; multiplies `head_norms`. */
  float kept_norm;            /* Norm of the kept columns; multiplies `kept_norms`. */
} State;

/* Bounds of a block of the vocabulary: the highest upper bound of a logit, and sums over all upper bounds less this. */
typedef struct {
  float* highest;  /* [rows, blocks] */
  float* total;    /* [rows, blocks]: of exp(x) */
  float* weighted; /* [rows, blocks]: of -x exp(x) */
  float* errors;   /* [blocks]: the largest of a block, as the next two */
  float* head_norms;
  float* kept_norms;
} Blocks;

/* The results for a row: see exits/certified_head.py. */
typedef struct {
  float largest, second, others_total, others_weighted, left, total_low, total_high, weighted_low, weighted_high, norm,
      head_norm;
} Facts;

/* Shapes in brackets; the width is rounded up to a multiple of four, strides to whole vectors. */
typedef struct {
  int64_t rows, parts, width, exact_width, vocabulary, padded, kept, candidates;
  int64_t stride, kept_stride;
  int64_t weight_bytes;        /* 4, or 2 for bfloat16 */
  const float* exact_states;   /* [rows, exact width] */
  const int32_t* kept_columns; /* [kept] */
  const uint8_t* packed;       /* [padded / 16, width / 4, 16, 4]: weights, 128 more */
  const float *scales, *errors, *head_norms, *kept_norms; /* [padded] */
  const float* kept_weights;   /* [kept, padded] */
  const char* weights;         /* [vocabulary, exact width] */
  int32_t* tokens;             /* [rows] */
  Facts* facts;                /* [rows] */
  int32_t* chosen;             /* [rows, candidates] */
  State* known;                /* [rows] */
  Multiple* states;            /* [rows, parts, stride] */
  float* kept_states;          /* [rows, kept stride] */
  float* upper;                /* [blocks, rows, 64] */
  Blocks blocks;
} Screen;

/* Returns the norm of numbers, rounded up, given the largest of them: without it, small squares would underflow. The
   numbers are padded with zeros to a whole vector, as in the next function. */
static float norm_of(const float* values, int64_t size, float most) {
  Floats sum = {0};
  for (int64_t column = 0; column < size; column += kLanes) {
    const Floats part = load(values + column) / most;
    sum += part * part;
  }
  return sqrtf(sum_of(sum)) * most * (1 + size * kUnit);
}

static float most_in(const float* values, int64_t size) {
  Floats most = {0};
  for (int64_t column = 0; column < size; column += kLanes) most = larger(magnitude(load(values + column)), most);
  return most_of(most);
}

/* Quantises a state, and writes the quantisation error to `missing`, [stride]. */
static void quantise(const Screen* s, int64_t row, float* missing) {
  State* known = s->known + row;
  const int64_t size = s->exact_width;
  memset(missing, 0, sizeof(float) * s->stride);
  memcpy(missing, s->exact_states + row * size, sizeof(float) * size);
  known->norm = norm_of(missing, size, most_in(missing, size));
  float* kept = s->kept_states + row * s->kept_stride;
  memset(kept, 0, sizeof(float) * s->kept_stride);
  for (int64_t column = 0; column < s->kept; ++column) {
    kept[column] = missing[s->kept_columns[column]];
    missing[s->kept_columns[column]] = 0;
  }
  const float most = most_in(missing, size), most_kept = most_in(kept, s->kept);
  known->quantised_norm = norm_of(missing, size, most);
  /* The rounding of the sum of their products. */
  known->kept_norm = most_kept == 0 ? 0 : norm_of(kept, s->kept, most_kept) * ((2 * s->kept + 8) * kUnit);
  const float largest = largest_multiple(s->width);
  float step = most / largest;
  for (int64_t part = 0; part < s->parts; ++part) {
    Multiple* multiples = s->states + (row * s->parts + part) * s->stride;
    const Floats divisor = all(step > 0 ? step : 1);
    Floats total = {0};
    for (int64_t column = 0; column < size; column += kLanes) {
      const Floats state = load(missing + column);
      const Floats multiple = larger(smaller(rounded(state / divisor), all(largest)), all(-largest));
      store_multiples(multiples + column, multiple);
      store(missing + column, state - multiple * step);
      total += multiple;
    }
    known->totals[part] = (int32_t)sum_of(total);
    known->steps[part] = step;
    /* The error is at most half a step. */
    step /= 2 * largest;
  }
  known->missing_norm = norm_of(missing, size, most) + 8 * kUnit * sqrtf(size) * most;
  known->missing_norm += 8 * kUnit * (known->quantised_norm + known->missing_norm);
  /* 16 units of rounding, for the few operations on what they multiply. */
  known->quantised_norm *= 1 + 16 * kUnit;
  known->missing_norm *= 1 + 16 * kUnit;
  known->kept_norm *= 1 + 16 * kUnit;
}

/* Writes the products of some rows with a block to `sums`, [rows, parts, 64], and prefetches the next block. */
static void multiply_rows(const Screen* s, int64_t block, int64_t first, int64_t last, int32_t* sums) {
  const int64_t bytes = kBlock * s->width, done = first * s->parts / kRowsAtATime;
  const uint8_t *weights = s->packed + block * bytes, *next = weights + bytes + done * kAhead * s->width;
  const Multiple* states = s->states + first * s->parts * s->stride;
  int64_t rows = (last - first) * s->parts;
  for (; rows >= kRowsAtATime; rows -= kRowsAtATime) {
    multiply(weights, states, s->width, s->stride, kRowsAtATime, next < weights + 2 * bytes ? next : weights, sums);
    states += kRowsAtATime * s->stride;
    sums += kRowsAtATime * kBlock;
    next += kAhead * s->width;
  }
  switch (rows) {
    case 1: multiply(weights, states, s->width, s->stride, 1, weights, sums); break;
    case 2: multiply(weights, states, s->width, s->stride, 2, weights, sums); break;
    case 3: multiply(weights, states, s->width, s->stride, 3, weights, sums); break;
    case 4: multiply(weights, states, s->width, s->stride, 4, weights, sums); break;
    case 5: multiply(weights, states, s->width, s->stride, 5, weights, sums); break;
  }
}

/* Adds exp(x) to `total` and -x exp(x) to `weighted`, each with an error of some units of the last place. Numbers below
   -83, and NaN, are replaced by -83, which is a negligible share of a distribution. */
static inline void add_terms(Floats x, Floats* total, Floats* weighted) {
  x = larger(x, all(-83));
  const Floats in_twos = x * 1.44269504f;
  const Floats count = rounded(in_twos);
  /* 2^r to 4 units, where |r| is at most a half: no polynomial of this degree is closer. */
  const Floats r = in_twos - count;
  Floats p = fused(r, all(1.32764725e-3f), all(9.67554096e-3f));
  p = fused(p, r, all(5.55071309e-2f));
  p = fused(p, r, all(2.40221202e-1f));
  p = fused(p, r, all(6.93146944e-1f));
  p = fused(p, r, all(1.00000012f));
  const Floats weight = scaled(p, count);
  *total += weight;
  *weighted = fused(-x, weight, *weighted);
}

/* Writes the upper bounds of a block's logits for some rows to `ends`, [rows, 64], and the highest of each to `most`. */
static inline __attribute__((always_inline)) void bound_rows(const Screen* s, int64_t block, int64_t first,
                                                             int64_t last, const int parts, const int has_kept,
                                                             const int32_t* sums, float* ends, float* most) {
  for (int64_t row = first; row < last; ++row, sums += parts * kBlock, ends += kBlock) {
    const State known = s->known[row];
    Floats highest = all(-INFINITY);
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t entry = block * kBlock + vector * kLanes;
      Floats end = load(s->errors + entry) * known.quantised_norm + load(s->head_norms + entry) * known.missing_norm;
      if (has_kept) {
        /* Added up separately: each addition rounds the sum. */
        Floats of_kept = {0};
        for (int64_t column = 0; column < s->kept; ++column)
          of_kept += s->kept_states[row * s->kept_stride + column] * load(s->kept_weights + column * s->padded + entry);
        end += load(s->kept_norms + entry) * known.kept_norm;
        end += of_kept;
      }
      for (int part = 0; part < parts; ++part) {
        /* Subtract the offset of 128 that weights have. */
        const Integers product = *(const UnalignedIntegers*)(sums + part * kBlock + vector * kLanes) -
                                 128 * known.totals[part];
        end += __builtin_convertvector(product, Floats) * (known.steps[part] * load(s->scales + entry));
      }
      /* NaN has no upper bound. */
      end = smaller(end, all(INFINITY));
      store(ends + vector * kLanes, end);
      highest = larger(highest, end);
    }
    *most++ = most_of(highest);
  }
}

/* Writes a block's upper bounds for some rows to `upper`, and their sums to `blocks`. */
static void add_up_rows(const Screen* s, int64_t block, int64_t first, int64_t last, const float* ends,
                        const float* most) {
  const int64_t blocks = s->padded / kBlock;
  /* The bounds of many rows would evict weights from the cache, and the next round reads few of them. */
  const int is_far = s->rows > kFewRows;
  for (int64_t row = first; row < last; ++row, ends += kBlock, ++most) {
    float* upper = s->upper + (block * s->rows + row) * kBlock;
    Floats total = {0}, weighted = {0};
    for (int vector = 0; vector < kVectors; ++vector) {
      const Floats end = load(ends + vector * kLanes);
      if (is_far)
        store_far(upper + vector * kLanes, end);
      else
        store(upper + vector * kLanes, end);
      add_terms(end - *most, &total, &weighted);
    }
    s->blocks.highest[row * blocks + block] = *most;
    s->blocks.total[row * blocks + block] = sum_of(total);
    s->blocks.weighted[row * blocks + block] = sum_of(weighted);
  }
}

/* Bounds a block's logits, for as many rows at a time as stay in the cache. */
static void bound_block(const Screen* s, int64_t block) {
  enum { kGroup = 4 * kRowsAtATime };
  int32_t sums[kGroup * kMostParts * kBlock];
  float ends[kGroup * kBlock], most[kGroup];
  for (int64_t first = 0; first < s->rows; first += kGroup) {
    const int64_t last = first + kGroup < s->rows ? first + kGroup : s->rows;
    multiply_rows(s, block, first, last, sums);
    if (s->parts == 1 && !s->kept)
      bound_rows(s, block, first, last, 1, 0, sums, ends, most);
    else
      bound_rows(s, block, first, last, s->parts, 1, sums, ends, most);
    add_up_rows(s, block, first, last, ends, most);
  }
}

static float most_of_block(const float* values, int64_t block) {
  Floats most = load(values + block * kBlock);
  for (int vector = 1; vector < kVectors; ++vector)
    most = larger(most, load(values + block * kBlock + vector * kLanes));
  return most_of(most);
}

/* A task of the first round: some blocks of the vocabulary. */
static int bound_blocks(const void* call, int64_t task) {
  const Screen* s = call;
  const int64_t blocks = s->padded / kBlock, last = (task + 1) * kBlocksOfTask;
  for (int64_t block = task * kBlocksOfTask; block < last && block < blocks; ++block) {
    s->blocks.errors[block] = most_of_block(s->errors, block);
    s->blocks.head_norms[block] = most_of_block(s->head_norms, block);
    s->blocks.kept_norms[block] = most_of_block(s->kept_norms, block);
    bound_block(s, block);
  }
  finish_far_stores();
  return 1;
}

/* Moves the `count` largest values to the front, unordered, and their indices with them. */
static void put_largest_first(float* values, int32_t* places, int64_t size, int64_t count) {
  int64_t low = 0, high = size - 1;
  while (low < high) {
    const float pivot = values[low + (high - low) / 2];
    int64_t left = low, right = high;
    while (left <= right) {
      while (values[left] > pivot) ++left;
      while (values[right] < pivot) --right;
      if (left <= right) {
        const float value = values[left];
        const int32_t place = places[left];
        values[left] = values[right], places[left++] = places[right];
        values[right] = value, places[right--] = place;
      }
    }
    if (count - 1 <= right)
      high = right;
    else if (count - 1 >= left)
      low = left;
    else
      return;
  }
}

/* Returns the last weights of a row as a vector, padded with zeros. */
static inline Floats some_weights(const Screen* s, int64_t place, int64_t left) {
  const char* weights = s->weights + place * s->weight_bytes;
  if (s->weight_bytes == 2) {
    UnalignedHalves halves = {0};
    memcpy(&halves, weights, 2 * (left < kLanes ? left : kLanes));
    return of_bfloat16(halves);
  }
  Floats floats = {0};
  memcpy(&floats, weights, 4 * (left < kLanes ? left : kLanes));
  return floats;
}

/* Writes the logits of some entries to `logits`. For each, 16 sums add every 16th product. */
static void logits_of(const Screen* s, const float* state, const int64_t* entries, float* logits) {
  enum { kSums = 16, kParts = kSums / kLanes };
  Floats sums[kEntriesAtATime][kParts] = {{{0}}};
  const int64_t width = s->exact_width, whole = width / kSums * kSums;
  for (int64_t column = 0; column < whole; column += kSums)
    for (int part = 0; part < kParts; ++part)
      for (int i = 0; i < kEntriesAtATime; ++i) {
        const int64_t from = column + part * kLanes;
        sums[i][part] = fused(load(state + from), some_weights(s, entries[i] * width + from, kLanes), sums[i][part]);
      }
  for (int i = 0; i < kEntriesAtATime; ++i) {
    int part = 0;
    for (int64_t column = whole; column < width; column += kLanes, ++part)
      sums[i][part] += load(state + column) * some_weights(s, entries[i] * width + column, width - column);
    for (part = 1; part < kParts; ++part) sums[i][0] += sums[i][part];
    logits[i] = sum_of(sums[i][0]);
  }
}

/* Returns the `count`th largest value, found bit by bit without branches that depend on the values. These are padded
   with -inf to a whole vector. */
static float reached_by(const float* values, int64_t size, int64_t count) {
  int32_t enough = INT32_MIN;
  for (int bit = 31; bit >= 0; --bit) {
    const int32_t more = (int32_t)((uint32_t)enough + (1u << bit));
    Integers reached = {0};
    for (int64_t i = 0; i < size; i += kLanes) reached += in_order((Integers)load(values + i)) >= more;
    if (-sum_of(__builtin_convertvector(reached, Floats)) >= count) enough = more;
  }
  return ((Floats)in_order(enough - (Integers){0}))[0];
}

static int64_t looked_through(const Screen* s) {
  const int64_t blocks = s->padded / kBlock;
  return s->candidates < blocks ? s->candidates : blocks;
}

/* Writes the indices of a row's highest blocks to `of_blocks`, and returns the lowest of their maxima. */
static float choose_blocks(const Screen* s, int64_t row, float* values, int32_t* of_blocks) {
  const int64_t blocks = s->padded / kBlock, count = looked_through(s);
  memcpy(values, s->blocks.highest + row * blocks, sizeof(float) * blocks);
  store(values + blocks, all(-INFINITY));
  const float enough = count < blocks ? reached_by(values, blocks, count) : -INFINITY;
  int64_t found = 0;
  for (int64_t block = 0; block < blocks; block += kLanes)
    found += gather_reaching(load(values + block), enough, (int32_t)block, values + found, of_blocks + found);
  /* Padding after the blocks comes last, if at all. */
  found = found < blocks ? found : blocks;
  if (found > count) put_largest_first(values, of_blocks, found, count);
  return enough;
}

/* Writes a row's candidates to `chosen`, removes their upper bounds, and returns an upper bound of all other entries.
   The blocks that were searched for them come first in `of_blocks`.

   As many blocks are searched as there are candidates: enough of their entries, and none of another block, reach the
   lowest of their maxima. */
static float choose(const Screen* s, int64_t row, float* values, int32_t* places, int32_t* of_blocks) {
  const int64_t count = s->candidates;
  const float enough = choose_blocks(s, row, values, of_blocks);
  for (int64_t i = 0; i < looked_through(s); ++i)
    ask_for(s->upper + (of_blocks[i] * s->rows + row) * kBlock, sizeof(float) * kBlock);
  int64_t found = 0;
  for (int64_t i = 0; i < looked_through(s); ++i) {
    const float* upper = s->upper + (of_blocks[i] * s->rows + row) * kBlock;
    for (int vector = 0; vector < kVectors; ++vector) {
      found += gather_reaching(load(upper + vector * kLanes), enough, of_blocks[i] * kBlock + vector * kLanes,
                               values + found, places + found);
    }
  }
  put_largest_first(values, places, found, count);
  float left = enough;
  for (int64_t i = count; i < found; ++i) left = values[i] > left ? values[i] : left;
  for (int64_t i = 0; i < count; ++i) {
    s->chosen[row * count + i] = places[i];
    s->upper[(places[i] / kBlock * s->rows + row) * kBlock + places[i] % kBlock] = -INFINITY;
  }
  return left;
}

/* Writes the largest width of each block's intervals to `twice`, and the lowest ratio of exp(x) at their two ends to
   `least`. */
static void bound_widths(const Screen* s, int64_t row, float* twice, float* least) {
  const int64_t blocks = s->padded / kBlock;
  const State* known = s->known + row;
  for (int64_t block = 0; block < blocks; block += kLanes) {
    const Floats reach = load(s->blocks.errors + block) * known->quantised_norm +
                         load(s->blocks.head_norms + block) * known->missing_norm +
                         load(s->blocks.kept_norms + block) * known->kept_norm;
    Floats ratio = {0}, unused = {0};
    add_terms(-2 * (1 + 32 * kUnit) * reach, &ratio, &unused);
    store(twice + block, 2 * (1 + 32 * kUnit) * reach);
    store(least + block, ratio);
  }
}

/* Prefetches the weights of every `step`th candidate of a row from `first` on, which are far apart in memory. */
static void ask_for_candidates(const Screen* s, int64_t row, int64_t first, int64_t step) {
  const int64_t bytes = s->exact_width * s->weight_bytes;
  for (int64_t i = first; i < s->candidates; i += step) {
    const int64_t entry = s->chosen[row * s->candidates + i];
    if (entry < s->vocabulary) ask_for(s->weights + entry * bytes, bytes);
  }
}

/* Writes the bounds of the sums over all entries that are not candidates, relative to `left`, to the row's facts. */
static void add_up_rest(const Screen* s, int64_t row, float left, const int32_t* of_blocks, float* scratch) {
  const int64_t blocks = s->padded / kBlock;
  float *highest = s->blocks.highest + row * blocks, *totals = s->blocks.total + row * blocks;
  float *weighteds = s->blocks.weighted + row * blocks, *twices = scratch, *leasts = scratch + blocks + kLanes;
  Floats low_total = {0}, high_total = {0}, low_weighted = {0}, high_weighted = {0};
  bound_widths(s, row, twices, leasts);
  /* Searched blocks, entry by entry, since their sums include candidates. */
  for (int64_t i = 0; i < looked_through(s); ++i) {
    const int64_t block = of_blocks[i];
    ask_for_candidates(s, row, i, looked_through(s));
    Floats total = {0}, weighted = {0};
    for (int vector = 0; vector < kVectors; ++vector)
      add_terms(load(s->upper + (block * s->rows + row) * kBlock + vector * kLanes) - left, &total, &weighted);
    low_total += leasts[block] * total;
    high_total += total;
    low_weighted += leasts[block] * weighted;
    high_weighted += weighted + twices[block] * total;
    highest[block] = left;
    totals[block] = weighteds[block] = 0;
  }
  for (int64_t block = 0; block < blocks; block += kLanes) {
    const Integers is_there = before(blocks, block);
    const Floats total = taken(is_there, load(totals + block)), weighted = taken(is_there, load(weighteds + block));
    const Floats twice = taken(is_there, load(twices + block)), least = taken(is_there, load(leasts + block));
    const Floats below = taken(is_there, load(highest + block) - left);
    Floats weight = {0}, unused = {0};
    add_terms(below, &weight, &unused);
    low_total += least * weight * total;
    high_total += weight * total;
    low_weighted += least * weight * (weighted - below * total);
    high_weighted += weight * (weighted + (twice - below) * total);
  }
  Facts* facts = s->facts + row;
  facts->total_low = sum_of(low_total);
  facts->total_high = sum_of(high_total);
  facts->weighted_low = sum_of(low_weighted);
  facts->weighted_high = sum_of(high_weighted);
}

/* Writes the logits of a row's candidates to `logits`, NaN for padding; there is room for a few more. */
static void compute_logits(const Screen* s, const int32_t* chosen, const float* state, float* logits) {
  for (int64_t first = 0; first < s->candidates; first += kEntriesAtATime) {
    int64_t entries[kEntriesAtATime];
    for (int i = 0; i < kEntriesAtATime; ++i) {
      const int64_t place = first + i < s->candidates ? first + i : first;
      /* Padding is chosen only after an overflow. */
      entries[i] = chosen[place] < s->vocabulary ? chosen[place] : 0;
    }
    logits_of(s, state, entries, logits + first);
    for (int i = 0; i < kEntriesAtATime && first + i < s->candidates; ++i)
      if (chosen[first + i] >= s->vocabulary) logits[first + i] = NAN;
  }
}

/* Writes the summary of the logits of a row's candidates to its facts. */
static void compare_candidates(const Screen* s, int64_t row, const int32_t* chosen, const float* logits) {
  const int64_t count = s->candidates;
  Facts* facts = s->facts + row;
  float largest = -INFINITY, second = -INFINITY, norm = 0;
  int32_t token = INT32_MAX;
  int is_finite = 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t entry = chosen[i];
    is_finite &= isfinite(logits[i]) != 0;
    const float norms = s->errors[entry] + s->head_norms[entry] + s->kept_norms[entry];
    norm = norms > norm ? norms : norm;
    if (logits[i] > largest || (logits[i] == largest && chosen[i] < token)) {
      second = largest;
      largest = logits[i];
      token = chosen[i];
    } else {
      second = logits[i] > second ? logits[i] : second;
    }
  }
  Floats total = {0}, weighted = {0};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Integers is_other = before(count, i) & (*(const UnalignedIntegers*)(chosen + i) != token);
    Floats terms = {0}, weights = {0};
    add_terms(load(logits + i) - largest, &terms, &weights);
    total += taken(is_other, terms);
    weighted += taken(is_other, weights);
  }
  s->tokens[row] = token < s->vocabulary ? token : 0;
  facts->largest = is_finite ? largest : NAN;
  facts->second = second;
  facts->others_total = sum_of(total);
  facts->others_weighted = sum_of(weighted);
  facts->norm = s->known[row].norm;
  facts->head_norm = norm;
}

/* A task of the second round: a row's candidates, and the sums over all other entries. */
static int finish_row(const void* call, int64_t row) {
  const Screen* s = call;
  const int64_t blocks = s->padded / kBlock;
  const int64_t room = looked_through(s) * kBlock + 2 * (blocks + kLanes);
  int has_memory = 1;
  float* values = memory_of(sizeof(float) * room, &has_memory);
  int32_t* places = memory_of(sizeof(int32_t) * room, &has_memory);
  int32_t* of_blocks = memory_of(sizeof(int32_t) * (blocks + kLanes), &has_memory);
  float* state = memory_of(sizeof(float) * s->stride, &has_memory);
  if (has_memory) {
    memset(state, 0, sizeof(float) * s->stride);
    memcpy(state, s->exact_states + row * s->exact_width, sizeof(float) * s->exact_width);
    s->facts[row].left = choose(s, row, values, places, of_blocks);
    add_up_rest(s, row, s->facts[row].left, of_blocks, values);
    compute_logits(s, places, state, values);
    compare_candidates(s, row, places, values);
  }
  free(values), free(places), free(of_blocks), free(state);
  return has_memory;
}

/* Returns the number of rows up to the last that is not all 0. Later rows are padding, or states of 0, which cannot be
   certified, since all their logits are equal. For these rows, `chosen` is not written. */
static int64_t rows_before_padding(const Screen* s) {
  int64_t numbers = s->rows * s->exact_width;
  while (numbers && s->exact_states[numbers - 1] == 0) --numbers;
  return (numbers + s->exact_width - 1) / s->exact_width;
}

/* The function that XLA calls, with arrays in the order of `Screen`. */
XLA_FFI_Error* calm_beam_screen(XLA_FFI_CallFrame* frame) {
  if (asks_for_version(frame)) return NULL;
  XLA_FFI_Buffer** asked = (XLA_FFI_Buffer**)frame->args.args;
  XLA_FFI_Buffer** given = (XLA_FFI_Buffer**)frame->rets.rets;
  Screen screen = {
      .rows = asked[0]->dims[0],
      .exact_width = asked[0]->dims[1],
      .width = 4 * asked[2]->dims[1],
      .vocabulary = asked[8]->dims[0],
      .padded = asked[3]->dims[0],
      .kept = asked[1]->dims[0],
      .candidates = given[2]->dims[1],
      .weight_bytes = asked[8]->dtype == XLA_FFI_DataType_BF16 ? 2 : 4,
      .exact_states = asked[0]->data,
      .kept_columns = asked[1]->data,
      .packed = asked[2]->data,
      .scales = asked[3]->data,
      .errors = asked[4]->data,
      .head_norms = asked[5]->data,
      .kept_norms = asked[6]->data,
      .kept_weights = asked[7]->data,
      .weights = asked[8]->data,
      .tokens = given[0]->data,
      .facts = given[1]->data,
      .chosen = given[2]->data,
  };
  const int64_t all_rows = screen.rows;
  screen.rows = rows_before_padding(&screen);
  for (int64_t row = screen.rows; row < all_rows; ++row) {
    screen.tokens[row] = 0;
    screen.facts[row] = (Facts){.largest = NAN};
  }
  if (!screen.rows) return NULL;
  screen.stride = (screen.exact_width + kLanes - 1) / kLanes * kLanes;
  screen.kept_stride = (screen.kept + kLanes - 1) / kLanes * kLanes;
  screen.parts = screen.rows <= kFewRows ? kMostParts : 1;
  const int64_t blocks = screen.padded / kBlock;
  int has_succeeded = 1;
  float* missing = memory_of(sizeof(float) * screen.stride, &has_succeeded);
  screen.known = memory_of(sizeof(State) * screen.rows, &has_succeeded);
  screen.states = memory_of(sizeof(Multiple) * screen.parts * screen.rows * screen.stride, &has_succeeded);
  screen.kept_states = memory_of(sizeof(float) * screen.rows * screen.kept_stride, &has_succeeded);
  screen.upper = memory_of(sizeof(float) * screen.rows * screen.padded, &has_succeeded);
  /* Padded, since they are read by whole vectors. */
  float* by_row = memory_of(sizeof(float) * (3 * screen.rows * blocks + kLanes), &has_succeeded);
  float* by_block = memory_of(sizeof(float) * (3 * blocks + kLanes), &has_succeeded);
  if (has_succeeded) {
    screen.blocks = (Blocks){
        .highest = by_row,
        .total = by_row + screen.rows * blocks,
        .weighted = by_row + 2 * screen.rows * blocks,
        .errors = by_block,
        .head_norms = by_block + blocks,
        .kept_norms = by_block + 2 * blocks,
    };
    for (int64_t row = 0; row < screen.rows; ++row) quantise(&screen, row, missing);
    has_succeeded = run_tasks(frame, &screen, bound_blocks, (blocks + kBlocksOfTask - 1) / kBlocksOfTask) &&
                    run_tasks(frame, &screen, finish_row, screen.rows);
  }
  free(missing), free(screen.known), free(screen.states), free(screen.kept_states), free(screen.upper);
  free(by_row), free(by_block);
  return has_succeeded ? NULL : no_memory(frame->api, "no memory for the logits of a head");
}
