/* A decoder layer of T5 for one token of every row, what it keeps of states that skipped it, and what its head says:
   calls of Python's, which change arrays in place. See decoding/native_engine.py, whose structures mirror these.

   XLA starts a dozen steps for a layer, whose ends all threads wait for, and is far from the rate of products for so few
   rows. Here threads take rows through the whole layer; or, where weights are larger than what a cache holds, they share
   the columns of one product after the other, so that weights are read once. A row's numbers are the same either way. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>

#include "attention.h"
#include "memory.h"
#include "products.h"
#include "threads.h"

enum {
  kRowsOfBlock = 48,       /* That one thread takes through products together. */
  kFewestRowsOfBlock = 12, /* Fewer read weights too often. */
  kRowsOfAttention = 4,
  kPanelsOfHead = 4,
  kCached = 1 << 20, /* Bytes of weights that a thread has at hand. */
};

enum { kGelu, kSilu, kRelu };

typedef struct {
  Matrix query, key, value, out, cross_query, cross_out, gate, wide, narrow; /* Without a gate, its weights are NULL. */
  const float *norm, *cross_norm, *mlp_norm; /* Scales. */
  const float* biases;                       /* [bias heads, ages] */
  int64_t bias_heads, ages, heads, size, width, activation;
  float epsilon;
} Layer;

/* The sources of one padded width, at one layer. */
typedef struct {
  const float *keys, *values; /* [places, heads, most, size] */
  const uint8_t* mask;        /* [places, most] */
  int64_t most;
} Sources;

/* Rows of a layer, with where each of them stands. */
typedef struct {
  int64_t count, threads;
  const float* inputs;        /* [entries, width] */
  float* outputs;             /* [entries, width] */
  float *keys, *values;       /* [nodes, heads * size] */
  const int32_t* paths;       /* [entries, most steps] */
  int64_t most_steps;
  const Sources* sources;
  const int32_t *below, *lanes, *nodes, *steps, *source_of_row, *places;
} Rows;

typedef struct {
  const Layer* layer;
  const Rows* rows;
  float *normed, *queries, *mixed, *hidden, *inner; /* A row each. */
  int is_by_columns;
  int64_t block;
  atomic_int* lacks_memory;
} Call;

/* What becomes of the sums of some columns of a row. */
typedef void (*Put)(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns);

/* Multiplies rows from one to another, [rows, stride], with a panel. */
static inline __attribute__((always_inline)) void multiply_panel(const Call* call, const float* rows, int64_t stride,
                                                                 int64_t from, int64_t to, const Matrix* matrix,
                                                                 int64_t panel, const Put put) {
  float sums[kRowsAtATime * kPanel];
  const int64_t columns = columns_of(matrix, panel);
  for (int64_t row = from; row < to; row += kRowsAtATime) {
    const int64_t count = to - row < kRowsAtATime ? to - row : kRowsAtATime;
    multiply_rows(rows + row * stride, stride, matrix, panel, count, sums);
    for (int64_t each = 0; each < count; ++each) put(call, row + each, panel * kPanel, sums + each * kPanel, columns);
  }
}

static inline int64_t inner_of(const Layer* layer) { return layer->heads * layer->size; }

static inline const float* input_of(const Call* call, int64_t row) {
  return call->rows->inputs + call->rows->below[row] * call->layer->width;
}

static inline float* row_of(float* rows, int64_t row, int64_t width) { return rows + row * width; }

static inline void copy(float* to, const float* from, int64_t count) {
  for (int64_t at = 0; at < count; ++at) to[at] = from[at];
}

static inline void sum(float* to, const float* one, const float* other, int64_t count) {
  for (int64_t at = 0; at < count; ++at) to[at] = one[at] + other[at];
}

static void put_query(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  copy(row_of(call->queries, row, inner_of(call->layer)) + column, sums, columns);
}

static void put_key(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  copy(row_of(call->rows->keys, call->rows->nodes[row], inner_of(call->layer)) + column, sums, columns);
}

static void put_value(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  copy(row_of(call->rows->values, call->rows->nodes[row], inner_of(call->layer)) + column, sums, columns);
}

static void put_attended(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  sum(row_of(call->hidden, row, call->layer->width) + column, input_of(call, row) + column, sums, columns);
}

static void add_attended(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  float* hidden = row_of(call->hidden, row, call->layer->width) + column;
  sum(hidden, hidden, sums, columns);
}

static void put_output(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  const int64_t width = call->layer->width;
  sum(row_of(call->rows->outputs, call->rows->lanes[row], width) + column, row_of(call->hidden, row, width) + column,
      sums, columns);
}

/* GELU in its tanh form is x times the logistic function of twice what the tanh is of. */
static inline Floats activated(Floats x, int64_t activation) {
  if (activation == kRelu) return (Floats)(((Integers)(x > 0) | (Integers)(x != x)) & (Integers)x);
  if (activation == kSilu) return x * logistic(x);
  return x * logistic(x * (1.595769122f + 0.071354816f * x * x));
}

static void put_activated(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  float here[kPanel];
  for (int at = 0; at < kPanel; at += kLanes) store(here + at, activated(load(sums + at), call->layer->activation));
  copy(row_of(call->inner, row, call->layer->wide.columns) + column, here, columns);
}

/* Of the other matrix of a gated layer, whose panel follows. */
static void put_gated(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  float* inner = row_of(call->inner, row, call->layer->wide.columns) + column;
  for (int64_t at = 0; at < columns; ++at) inner[at] *= sums[at];
}

static void norm_inputs(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  for (int64_t row = from; row < to; ++row)
    norm_row(input_of(call, row), layer->norm, layer->width, layer->epsilon,
             row_of(call->normed, row, layer->width));
}

static void norm_hidden(const Call* call, const float* scale, int64_t from, int64_t to) {
  const Layer* layer = call->layer;
  for (int64_t row = from; row < to; ++row)
    norm_row(row_of(call->hidden, row, layer->width), scale, layer->width, layer->epsilon,
             row_of(call->normed, row, layer->width));
}

static void norm_for_source(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  norm_hidden(call, call->layer->cross_norm, from, to);
}

static void norm_for_mlp(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  norm_hidden(call, call->layer->mlp_norm, from, to);
}

static void project(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  const int64_t panels = panels_of(&layer->query);
  for (int64_t panel = first; panel < end; ++panel)
    if (panel < panels)
      multiply_panel(call, call->normed, layer->width, from, to, &layer->query, panel, put_query);
    else if (panel < 2 * panels)
      multiply_panel(call, call->normed, layer->width, from, to, &layer->key, panel - panels, put_key);
    else
      multiply_panel(call, call->normed, layer->width, from, to, &layer->value, panel - 2 * panels, put_value);
}

static void project_for_source(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  for (int64_t panel = first; panel < end; ++panel)
    multiply_panel(call, call->normed, layer->width, from, to, &layer->cross_query, panel, put_query);
}

static void add_path(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  for (int64_t panel = first; panel < end; ++panel)
    multiply_panel(call, call->mixed, inner_of(call->layer), from, to, &call->layer->out, panel, put_attended);
}

static void add_source(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  for (int64_t panel = first; panel < end; ++panel)
    multiply_panel(call, call->mixed, inner_of(call->layer), from, to, &call->layer->cross_out, panel, add_attended);
}

static void widen(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  for (int64_t panel = first; panel < end; ++panel) {
    const Matrix* activated = layer->gate.weights ? &layer->gate : &layer->wide;
    multiply_panel(call, call->normed, layer->width, from, to, activated, panel, put_activated);
    if (layer->gate.weights)
      multiply_panel(call, call->normed, layer->width, from, to, &layer->wide, panel, put_gated);
  }
}

static void narrow(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  for (int64_t panel = first; panel < end; ++panel)
    multiply_panel(call, call->inner, layer->wide.columns, from, to, &layer->narrow, panel, put_output);
}

static void attend_of_row(const Call* call, const Keys* keys, const Seen* seen, int64_t row) {
  float largest[keys->heads], totals[keys->heads];
  float* mixed = row_of(call->mixed, row, inner_of(call->layer));
  attend_row(keys, seen, row_of(call->queries, row, inner_of(call->layer)), mixed, largest, totals);
  for (int64_t head = 0; head < keys->heads; ++head, mixed += keys->size)
    for (int64_t at = 0; at < keys->size; ++at) mixed[at] /= totals[head];
}

static Keys keys_of(const Layer* layer) {
  return (Keys){.heads = layer->heads, .key_heads = layer->heads, .size = layer->size};
}

static void attend_to_path(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  const Rows* rows = call->rows;
  int has_memory = 1;
  Seen seen = seen_of(rows->most_steps, &has_memory);
  Keys keys = keys_of(layer);
  keys.keys = rows->keys, keys.values = rows->values, keys.head_stride = layer->size;
  keys.biases = layer->biases, keys.bias_heads = layer->bias_heads, keys.ages = layer->ages;
  for (int64_t row = from; has_memory && row < to; ++row) {
    const int64_t step = rows->steps[row];
    const int32_t* path = rows->paths + rows->lanes[row] * rows->most_steps;
    for (int64_t at = 0; at <= step; ++at) {
      seen.offsets[at] = path[at] * inner_of(layer);
      seen.ages[at] = (int32_t)(step - at);
    }
    seen.count = step + 1;
    attend_of_row(call, &keys, &seen, row);
  }
  forget(&seen);
  if (!has_memory) atomic_store(call->lacks_memory, 1);
}

static void attend_to_source(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  const Rows* rows = call->rows;
  int has_memory = 1;
  int64_t most = 0;
  for (int64_t row = from; row < to; ++row)
    if (rows->sources[rows->source_of_row[row]].most > most) most = rows->sources[rows->source_of_row[row]].most;
  Seen seen = seen_of(most, &has_memory);
  Keys keys = keys_of(layer);
  for (int64_t row = from; has_memory && row < to; ++row) {
    const Sources* sources = rows->sources + rows->source_of_row[row];
    const int64_t place = rows->places[row];
    const uint8_t* mask = sources->mask + place * sources->most;
    keys.keys = sources->keys, keys.values = sources->values, keys.head_stride = sources->most * layer->size;
    seen.count = 0;
    for (int64_t at = 0; at < sources->most; ++at)
      if (mask[at]) seen.offsets[seen.count++] = place * layer->heads * keys.head_stride + at * layer->size;
    attend_of_row(call, &keys, &seen, row);
  }
  forget(&seen);
  if (!has_memory) atomic_store(call->lacks_memory, 1);
}

static const struct {
  void (*run)(const Call*, int64_t, int64_t, int64_t, int64_t);
  enum { kByRow, kProjection, kNarrow, kInner, kWide } columns; /* Whose panels threads may share. */
} kPhases[] = {
    {norm_inputs, kByRow},     {project, kProjection},        {attend_to_path, kByRow},   {add_path, kNarrow},
    {norm_for_source, kByRow}, {project_for_source, kInner},  {attend_to_source, kByRow}, {add_source, kNarrow},
    {norm_for_mlp, kByRow},    {widen, kWide},                {narrow, kNarrow},
};

enum { kNumPhases = sizeof kPhases / sizeof kPhases[0] };

static int64_t panels_of_phase(const Layer* layer, int phase) {
  switch (kPhases[phase].columns) {
    case kProjection: return 3 * panels_of(&layer->query);
    case kNarrow: return panels_of(&layer->out);
    case kInner: return panels_of(&layer->cross_query);
    case kWide: return panels_of(&layer->wide);
    default: return 1;
  }
}

static void run_block(const void* context, int phase_of_one, int64_t block) {
  const Call* call = context;
  const int64_t from = block * call->block, end = from + call->block, count = call->rows->count;
  for (int phase = 0; phase < kNumPhases; ++phase)
    kPhases[phase].run(call, from, end < count ? end : count, 0, panels_of_phase(call->layer, phase));
}

/* A task is a panel for all rows, or a few rows. */
static void run_columns(const void* context, int phase, int64_t task) {
  const Call* call = context;
  const int64_t count = call->rows->count;
  if (kPhases[phase].columns == kByRow) {
    const int64_t from = task * kRowsOfAttention, end = from + kRowsOfAttention;
    kPhases[phase].run(call, from, end < count ? end : count, 0, 1);
  } else {
    kPhases[phase].run(call, 0, count, task, task + 1);
  }
}

static int64_t bytes_of(const Layer* layer) {
  const Matrix* matrices = &layer->query;
  int64_t bytes = 0;
  for (const Matrix* matrix = matrices; matrix <= &layer->narrow; ++matrix)
    if (matrix->weights) bytes += sizeof(float) * matrix->inputs * panels_of(matrix) * kPanel;
  return bytes;
}

/* Returns how many rows a thread takes at a time, so that all have as many. */
static int64_t block_of(int64_t count, int64_t threads) {
  const int64_t rounds = (count + threads * kRowsOfBlock - 1) / (threads * kRowsOfBlock);
  const int64_t block = (count + threads * rounds - 1) / (threads * rounds);
  return block < kFewestRowsOfBlock ? kFewestRowsOfBlock : block;
}

/* Returns 0 if there is no memory for it. */
int calm_beam_run_layer(const Layer* layer, const Rows* rows) {
  const int64_t inner = inner_of(layer);
  const int64_t numbers = 2 * layer->width + 2 * inner + layer->wide.columns;
  atomic_int lacks_memory = 0;
  int has_memory = 1;
  float* memory = memory_of(sizeof(float) * rows->count * numbers, &has_memory);
  if (!has_memory) return 0;
  Call call = {.layer = layer, .rows = rows, .normed = memory, .lacks_memory = &lacks_memory};
  call.hidden = call.normed + rows->count * layer->width;
  call.queries = call.hidden + rows->count * layer->width;
  call.mixed = call.queries + rows->count * inner;
  call.inner = call.mixed + rows->count * inner;
  call.block = block_of(rows->count, rows->threads);
  if (bytes_of(layer) > kCached && call.block < kRowsOfBlock / 2) {
    int64_t tasks[kNumPhases];
    for (int phase = 0; phase < kNumPhases; ++phase)
      tasks[phase] = kPhases[phase].columns == kByRow ? (rows->count + kRowsOfAttention - 1) / kRowsOfAttention
                                                      : panels_of_phase(layer, phase);
    run_phases(rows->threads, &call, run_columns, tasks, kNumPhases);
  } else {
    const int64_t blocks = (rows->count + call.block - 1) / call.block;
    run_phases(rows->threads, &call, run_block, &blocks, 1);
  }
  free(memory);
  return !lacks_memory;
}

/* States that skipped layers, and the nodes that each of these gives them. */
typedef struct {
  const Layer* const* layers;
  float *const *keys, *const *values; /* Of each layer. */
  int64_t num_layers, count, capacity, threads;
  const float* states;                /* [entries, width] */
  const int64_t* entries;             /* [count] */
  const int32_t* nodes;               /* [layers, count]: `capacity` where the layer was not skipped */
} Skipped;

static void keep_block(const void* context, int phase, int64_t task) {
  const Skipped* skipped = context;
  const int64_t blocks = (skipped->count + kRowsOfBlock - 1) / kRowsOfBlock;
  const int64_t index = task / blocks, from = task % blocks * kRowsOfBlock;
  const Layer* layer = skipped->layers[index];
  const int32_t* nodes = skipped->nodes + index * skipped->count;
  int32_t kept[kRowsOfBlock];
  int64_t count = 0;
  float normed[kRowsAtATime * layer->width];
  const Rows rows = {.keys = skipped->keys[index], .values = skipped->values[index], .nodes = kept};
  Call call = {.layer = layer, .rows = &rows, .normed = normed};
  for (int64_t row = from; row < from + kRowsOfBlock && row < skipped->count; ++row) {
    const int is_last = row + 1 == from + kRowsOfBlock || row + 1 == skipped->count;
    if (nodes[row] < skipped->capacity) {
      norm_row(skipped->states + skipped->entries[row] * layer->width, layer->norm, layer->width, layer->epsilon,
               normed + count * layer->width);
      kept[count++] = nodes[row];
    }
    if (count == kRowsAtATime || (is_last && count)) {
      const int64_t panels = panels_of(&layer->query);
      project(&call, 0, count, panels, 3 * panels);
      count = 0;
    }
  }
}

/* Gives skipped layers their keys and values of states. */
void calm_beam_keep_skipped(const Skipped* skipped) {
  const int64_t blocks = (skipped->count + kRowsOfBlock - 1) / kRowsOfBlock * skipped->num_layers;
  run_phases(skipped->threads, skipped, keep_block, &blocks, 1);
}
