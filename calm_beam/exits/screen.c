/* What a certified head asks of every entry of the vocabulary, as one call: see native_screening.py, and screening.py for what is bounded.

   Products of 8-bit integers, four at a time, are what processors with AVX-512 VNNI are best at, and XLA makes half as
   much of them at most. What comes after, a few operations on each logit, is done while the logits are still in the cache.

   A row's numbers are the same whatever the other rows of a call and the threads are: integers add up without an error, and
   sums of floats are made row by row in one order. */

#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#ifdef __FAST_MATH__
#error "the bounds are about IEEE arithmetic: compile without -ffast-math"
#endif

enum {
  kLanes = 16,         /* Entries in a vector. */
  kVectors = 4,        /* Vectors in a block. */
  kBlock = kLanes * kVectors,
  kBlocksOfTask = 8,
  kLine = 64,          /* Bytes that memory gives at a time. */
  kRowsAtATime = 6,    /* As many as have their sums in registers, beside a block of weights. */
};

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedFloats __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef int32_t UnalignedIntegers __attribute__((vector_size(4 * kLanes), aligned(4)));

/* Shapes in brackets. `parts` is 1, or 2 where a state is the sum of two. */
typedef struct {
  int64_t rows, parts, width, exact_width, vocabulary, padded, kept, candidates;
  int64_t weight_bytes;       /* 4, or 2 for bfloat16 */
  const int8_t* states;       /* [parts, rows, width] */
  const float* steps;         /* [parts, rows] */
  const float* norms;         /* [rows, 3]: what multiplies errors, head_norms and kept_norms */
  const float* kept_states;   /* [rows, kept] */
  const float* exact_states;  /* [rows, exact width] */
  const uint8_t* packed;      /* [padded / 16, width / 4, 16, 4]: weights, 128 more */
  const float *scales, *errors, *head_norms, *kept_norms; /* [padded] */
  const float* kept_weights;  /* [kept, padded] */
  const char* weights;        /* [vocabulary, exact width] */
  int32_t* chosen;            /* [rows, candidates] */
  float* logits;              /* [rows, candidates] */
  float* left;                /* [rows] */
  float* sums;                /* [rows, 4] */
  float* upper;               /* [rows, padded] */
  float *highest, *reach;     /* [rows, padded / 64]: of each block, the most */
  int32_t* totals;            /* [parts, rows]: sums of the states */
} Screen;

static inline Floats load(const float* values) { return *(const UnalignedFloats*)values; }

static inline Floats all(float value) { return value - (Floats){0}; }

static inline Floats larger(Floats one, Floats other) { return (Floats)_mm512_max_ps((__m512)one, (__m512)other); }

/* Puts the products of `count` states, from `first` on, with a block of weights into `sums`, [rows, 64]. */
static inline __attribute__((always_inline)) void multiply(const Screen* s, const uint8_t* weights, int64_t first,
                                                           const int count, int32_t* sums) {
  const int64_t stride = kLanes * s->width;
  const int8_t* states = s->states + first * s->width;
  __m512i total[kRowsAtATime][kVectors];
  for (int row = 0; row < count; ++row)
    for (int vector = 0; vector < kVectors; ++vector) total[row][vector] = _mm512_setzero_si512();
  for (int64_t column = 0; column < s->width; column += 4) {
    __m512i block[kVectors];
    for (int vector = 0; vector < kVectors; ++vector)
      block[vector] = _mm512_loadu_si512(weights + vector * stride + column * kLanes);
    for (int row = 0; row < count; ++row) {
      int32_t four;
      memcpy(&four, states + row * s->width + column, 4);
      const __m512i state = _mm512_set1_epi32(four);
      for (int vector = 0; vector < kVectors; ++vector)
        total[row][vector] = _mm512_dpbusd_epi32(total[row][vector], block[vector], state);
    }
  }
  for (int row = 0; row < count; ++row)
    for (int vector = 0; vector < kVectors; ++vector)
      _mm512_storeu_si512(sums + (first + row) * kBlock + vector * kLanes, total[row][vector]);
}

static void multiply_all(const Screen* s, int64_t block, int32_t* sums) {
  const uint8_t* weights = s->packed + block * kBlock * s->width;
  const int64_t rows = s->rows * s->parts;
  int64_t first = 0;
  for (; first + kRowsAtATime <= rows; first += kRowsAtATime) multiply(s, weights, first, kRowsAtATime, sums);
  switch (rows - first) {
    case 1: multiply(s, weights, first, 1, sums); break;
    case 2: multiply(s, weights, first, 2, sums); break;
    case 3: multiply(s, weights, first, 3, sums); break;
    case 4: multiply(s, weights, first, 4, sums); break;
    case 5: multiply(s, weights, first, 5, sums); break;
  }
}

/* Puts the upper ends of a block's logits into `upper`, and the highest of each row into `highest`. */
static void bound_block(const Screen* s, int64_t block, const int32_t* sums) {
  for (int64_t row = 0; row < s->rows; ++row) {
    Floats highest = all(-INFINITY), most = {0};
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t entry = block * kBlock + vector * kLanes;
      Floats logits = {0};
      for (int64_t part = 0; part < s->parts; ++part) {
        const int64_t place = part * s->rows + row;
        const Integers products =
            *(const UnalignedIntegers*)(sums + place * kBlock + vector * kLanes) - 128 * s->totals[place];
        logits += __builtin_convertvector(products, Floats) * (s->steps[place] * load(s->scales + entry));
      }
      /* Added up apart: each addition rounds what is there. */
      Floats of_kept = {0};
      for (int64_t column = 0; column < s->kept; ++column)
        of_kept += s->kept_states[row * s->kept + column] * load(s->kept_weights + column * s->padded + entry);
      logits += of_kept;
      const float* norms = s->norms + 3 * row;
      const Floats terms = load(s->errors + entry) * norms[0] + load(s->head_norms + entry) * norms[1] +
                           load(s->kept_norms + entry) * norms[2];
      /* 16 units of rounding, for these few operations. */
      const Floats reach = terms * (1 + 0x1p-20f), ends = logits + reach;
      /* What is no number could be any. */
      const Integers is_number = ends <= all(INFINITY);
      const Floats upper = (Floats)((is_number & (Integers)ends) | (~is_number & (Integers)all(INFINITY)));
      *(UnalignedFloats*)(s->upper + row * s->padded + entry) = upper;
      highest = larger(highest, upper);
      most = larger(most, reach);
    }
    s->highest[row * (s->padded / kBlock) + block] = _mm512_reduce_max_ps((__m512)highest);
    s->reach[row * (s->padded / kBlock) + block] = _mm512_reduce_max_ps((__m512)most);
  }
}

/* A task of the first round: some blocks of the vocabulary. */
static int bound_blocks(const Screen* s, int64_t task) {
  int32_t* sums = malloc(sizeof(int32_t) * s->rows * s->parts * kBlock);
  if (!sums) return 0;
  const int64_t blocks = s->padded / kBlock, last = (task + 1) * kBlocksOfTask;
  for (int64_t block = task * kBlocksOfTask; block < last && block < blocks; ++block) {
    multiply_all(s, block, sums);
    bound_block(s, block, sums);
  }
  free(sums);
  return 1;
}

/* Puts the `count` largest values first, in no order, and their places with them. */
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

/* Returns exp(x) for x in [-87, 80], to some units of the last place. */
static inline Floats exponential(Floats x) {
  const Floats shifter = all(0x1.8p23f);
  const Floats count = (x * 1.44269504f + shifter) - shifter;
  /* ln 2 in two parts, of which the first has few bits. */
  const Floats r = (x - count * 0.693359375f) + count * 2.12194440e-4f;
  /* Taylor's series: |r| is at most ln 2 / 2. */
  Floats p = r * (1.f / 5040) + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.f;
  const Integers exponent = (__builtin_convertvector(count, Integers) + 127) << 23;
  return p * (Floats)exponent;
}

static inline Floats between(Floats x, float low, float high) {
  return (Floats)_mm512_min_ps(_mm512_max_ps((__m512)x, (__m512)all(low)), (__m512)all(high));
}

/* Returns a logit, of which each of 16 sums has added every 16th product. */
static float logit(const Screen* s, int64_t row, int64_t entry) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t column = 0; column < s->exact_width; column += kLanes) {
    const int64_t rest = s->exact_width - column;
    const __mmask16 is_there = rest < kLanes ? (1 << rest) - 1 : 0xffff;
    const int64_t place = entry * s->exact_width + column;
    __m512 weights;
    if (s->weight_bytes == 2) {
      const __m256i halves = _mm256_maskz_loadu_epi16(is_there, (const uint16_t*)s->weights + place);
      weights = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    } else {
      weights = _mm512_maskz_loadu_ps(is_there, (const float*)s->weights + place);
    }
    const __m512 states = _mm512_maskz_loadu_ps(is_there, s->exact_states + row * s->exact_width + column);
    sum = _mm512_fmadd_ps(states, weights, sum);
  }
  return _mm512_reduce_add_ps(sum);
}

/* A task of the second round: a row's candidates, and the sums over all other entries. */
static int finish_row(const Screen* s, int64_t row) {
  const int64_t blocks = s->padded / kBlock, count = s->candidates;
  const float* highest = s->highest + row * blocks;
  float* upper = s->upper + row * s->padded;
  float* values = malloc(sizeof(float) * (s->padded + kLanes));
  int32_t* places = malloc(sizeof(int32_t) * (s->padded + kLanes));
  if (!values || !places) {
    free(values), free(places);
    return 0;
  }
  /* As many blocks as candidates: the lowest of their highest entries is reached by enough entries to choose from, and
     by none of another block. */
  const int64_t looked_through = count < blocks ? count : blocks;
  int32_t* of_blocks = s->chosen + row * count;
  for (int64_t block = 0; block < blocks; ++block) values[block] = highest[block], places[block] = (int32_t)block;
  put_largest_first(values, places, blocks, looked_through);
  float enough = count < blocks ? INFINITY : -INFINITY;
  for (int64_t i = 0; i < looked_through; ++i) {
    enough = values[i] < enough ? values[i] : enough;
    of_blocks[i] = places[i];
  }
  int64_t found = 0;
  for (int64_t i = 0; i < looked_through; ++i) {
    const int64_t block = of_blocks[i];
    for (int64_t entry = block * kBlock; entry < (block + 1) * kBlock; entry += kLanes) {
      const __m512 ends = _mm512_loadu_ps(upper + entry);
      const __mmask16 reaches = _mm512_cmp_ps_mask(ends, _mm512_set1_ps(enough), _CMP_GE_OQ);
      const __m512i of_lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i entries = _mm512_add_epi32(of_lanes, _mm512_set1_epi32((int32_t)entry));
      /* In registers: stores that compress take a hundred cycles on some processors. */
      _mm512_storeu_ps(values + found, _mm512_maskz_compress_ps(reaches, ends));
      _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(reaches, entries));
      found += __builtin_popcount(reaches);
    }
  }
  put_largest_first(values, places, found, count);
  float left = enough;
  for (int64_t i = count; i < found; ++i) left = values[i] > left ? values[i] : left;
  for (int64_t i = 0; i < count; ++i) {
    s->chosen[row * count + i] = places[i];
    upper[places[i]] = -INFINITY;
  }
  /* How much less the weights of a block's entries may be: from here on in place of the values. */
  float* factors = values;
  for (int64_t block = 0; block < blocks; block += kLanes) {
    const __mmask16 is_there = blocks - block < kLanes ? (1 << (blocks - block)) - 1 : 0xffff;
    const Floats reach = (Floats)_mm512_maskz_loadu_ps(is_there, s->reach + row * blocks + block);
    *(UnalignedFloats*)(factors + block) = exponential(between(-2 * reach, -87, 0));
  }
  const int64_t lines = (s->exact_width * s->weight_bytes + kLine - 1) / kLine;
  Floats low_total = {0}, high_total = {0}, low_weighted = {0}, high_weighted = {0};
  int64_t line = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    Floats total = {0}, weighted = {0};
    for (int vector = 0; vector < kVectors; ++vector, ++line) {
      /* The weights of the candidates are far apart, and asked for in the meantime. */
      if (line < count * lines && places[line / lines] < s->vocabulary)
        __builtin_prefetch(s->weights + places[line / lines] * s->exact_width * s->weight_bytes + line % lines * kLine);
      const Floats below = between(load(upper + block * kBlock + vector * kLanes) - left, -87, 80);
      const Floats weight = exponential(below);
      total += weight;
      weighted -= below * weight;
    }
    const float reach = s->reach[row * blocks + block], least = factors[block];
    low_total += total * least;
    high_total += total;
    low_weighted += weighted * least;
    high_weighted += weighted + total * (2 * reach);
  }
  s->left[row] = left;
  s->sums[4 * row] = _mm512_reduce_add_ps((__m512)low_total);
  s->sums[4 * row + 1] = _mm512_reduce_add_ps((__m512)high_total);
  s->sums[4 * row + 2] = _mm512_reduce_add_ps((__m512)low_weighted);
  s->sums[4 * row + 3] = _mm512_reduce_add_ps((__m512)high_weighted);
  for (int64_t i = 0; i < count; ++i)
    /* Padding is chosen only where the numbers have overflown. */
    s->logits[row * count + i] = places[i] < s->vocabulary ? logit(s, row, places[i]) : NAN;
  free(values), free(places);
  return 1;
}

/* Tasks that threads take one after the other until none is left. */
typedef struct {
  const Screen* screen;
  int (*run)(const Screen*, int64_t);
  int64_t tasks;
  atomic_llong next, done, users;
  atomic_int has_failed;
} Round;

static void leave(Round* round) {
  if (atomic_fetch_sub(&round->users, 1) == 1) free(round);
}

static void work(Round* round) {
  int64_t task;
  while ((task = atomic_fetch_add(&round->next, 1)) < round->tasks) {
    if (!round->run(round->screen, task)) atomic_store(&round->has_failed, 1);
    atomic_fetch_add(&round->done, 1);
  }
}

/* What a thread of XLA's is asked for. It may come when all is done: then it only leaves. */
static void help(void* round) {
  work(round);
  leave(round);
}

static int failed(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

/* Runs all tasks, on this thread and on those of XLA that have time, and returns whether memory sufficed. */
static int run_tasks(const XLA_FFI_CallFrame* frame, const Screen* screen, int (*run)(const Screen*, int64_t),
                     int64_t tasks) {
  const XLA_FFI_Api* api = frame->api;
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args asked = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                              &threads};
  if (failed(api, api->XLA_FFI_ThreadPool_NumThreads(&asked))) threads = 1;
  if (threads > tasks) threads = tasks;
  Round* round = malloc(sizeof *round);
  if (!round) return 0;
  *round = (Round){.screen = screen, .run = run, .tasks = tasks};
  atomic_init(&round->users, 1);
  for (int64_t thread = 1; thread < threads; ++thread) {
    atomic_fetch_add(&round->users, 1);
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                             round};
    if (failed(api, api->XLA_FFI_ThreadPool_Schedule(&args))) atomic_fetch_sub(&round->users, 1);
  }
  work(round);
  while (atomic_load(&round->done) < tasks) sched_yield();
  const int has_succeeded = !atomic_load(&round->has_failed);
  leave(round);
  return has_succeeded;
}

static XLA_FFI_Error* no_memory(const XLA_FFI_Api* api) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, "no memory for the logits of a head",
                                    XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return api->XLA_FFI_Error_Create(&args);
}

/* The call, of arrays in the order of `Screen`. */
XLA_FFI_Error* calm_beam_screen(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return NULL;
  }
  XLA_FFI_Buffer** taken = (XLA_FFI_Buffer**)frame->args.args;
  XLA_FFI_Buffer** given = (XLA_FFI_Buffer**)frame->rets.rets;
  Screen screen = {
      .rows = taken[0]->dims[1],
      .parts = taken[0]->dims[0],
      .width = taken[0]->dims[2],
      .exact_width = taken[4]->dims[1],
      .vocabulary = taken[11]->dims[0],
      .padded = taken[6]->dims[0],
      .kept = taken[3]->dims[1],
      .candidates = given[0]->dims[1],
      .weight_bytes = taken[11]->dtype == XLA_FFI_DataType_BF16 ? 2 : 4,
      .states = taken[0]->data,
      .steps = taken[1]->data,
      .norms = taken[2]->data,
      .kept_states = taken[3]->data,
      .exact_states = taken[4]->data,
      .packed = taken[5]->data,
      .scales = taken[6]->data,
      .errors = taken[7]->data,
      .head_norms = taken[8]->data,
      .kept_norms = taken[9]->data,
      .kept_weights = taken[10]->data,
      .weights = taken[11]->data,
      .chosen = given[0]->data,
      .logits = given[1]->data,
      .left = given[2]->data,
      .sums = given[3]->data,
  };
  const int64_t blocks = screen.padded / kBlock;
  screen.upper = malloc(sizeof(float) * screen.rows * screen.padded);
  screen.highest = malloc(sizeof(float) * screen.rows * blocks);
  screen.reach = malloc(sizeof(float) * screen.rows * blocks);
  screen.totals = malloc(sizeof(int32_t) * screen.parts * screen.rows);
  int has_succeeded = screen.upper && screen.highest && screen.reach && screen.totals;
  if (has_succeeded) {
    for (int64_t place = 0; place < screen.parts * screen.rows; ++place) {
      screen.totals[place] = 0;
      for (int64_t column = 0; column < screen.width; ++column)
        screen.totals[place] += screen.states[place * screen.width + column];
    }
    has_succeeded = run_tasks(frame, &screen, bound_blocks, (blocks + kBlocksOfTask - 1) / kBlocksOfTask) &&
                    run_tasks(frame, &screen, finish_row, screen.rows);
  }
  free(screen.upper), free(screen.highest), free(screen.reach), free(screen.totals);
  return has_succeeded ? NULL : no_memory(frame->api);
}
