/* Layers for one token of every row, of outputs or of prompts, and the cache of skipped layers: functions that Python
   calls, which change arrays in place. The structures are those of native/structures.py.

   T5's layer attends to the generated tokens, and then to the source; Llama's attends to both at once, after rotary
   positions have turned its queries and keys. In a prompt, tokens attend to each other: in T5's encoder to all, in
   Llama's layers to earlier ones.

   XLA starts a dozen steps for a layer, each of which ends with a barrier for all threads, and multiplies few rows
   slowly. Here each thread runs the whole layer for some rows; or, where the weights do not fit in a cache, threads
   share the columns of one product after the other, so that weights are read once. Both are batch-invariant, with the
   same bits: a row gives the same bits in any call. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>

#include "attention.h"
#include "layers.h"
#include "layouts.h"
#include "memory.h"
#include "products.h"
#include "prompts.h"
#include "threads.h"

SAME_IN_PYTHON_Matrix
SAME_IN_PYTHON_Layer
SAME_IN_PYTHON_Sources
SAME_IN_PYTHON_Entries
SAME_IN_PYTHON_Rows
SAME_IN_PYTHON_Skipped

enum {
  kFewestRowsOfBlock = 4, /* Fewer read weights too often. */
  kRowsOfAttention = 4,
};

enum { kGelu, kSilu, kRelu };

typedef struct {
  const Layer* layer;
  const Entries* entries;
  const Rows* rows;
  float *normed, *queries, *mixed, *hidden, *inner; /* [rows, ...] */
  atomic_int* lacks_memory;
} Call;

/* Processes the sums of some columns of a row. */
typedef void (*Put)(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns);

/* Multiplies a range of rows, [rows, stride], by a panel. */
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

static inline int64_t kept_of(const Layer* layer) { return layer->key_heads * layer->size; }

static inline const float* input_of(const Call* call, int64_t row) {
  return call->entries->inputs + call->rows->below[row] * call->layer->width;
}

static inline int64_t prompt_of(const Call* call, int64_t row) {
  return call->rows->lanes[row] / call->entries->prompt_lanes;
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
  copy(row_of(call->entries->keys, call->rows->nodes[row], kept_of(call->layer)) + column, sums, columns);
}

static void put_value(const Call* call, int64_t row, int64_t column, const float* sums, int64_t columns) {
  copy(row_of(call->entries->values, call->rows->nodes[row], kept_of(call->layer)) + column, sums, columns);
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
  sum(row_of(call->entries->outputs, call->rows->lanes[row], width) + column, row_of(call->hidden, row, width) + column,
      sums, columns);
}

/* GELU in its tanh form is x times the logistic function of twice the tanh's argument. */
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

/* Processes sums of the other matrix of a gated layer, whose panel follows. */
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
  const int64_t queries = panels_of(&layer->query), keys = panels_of(&layer->key);
  for (int64_t panel = first; panel < end; ++panel)
    if (panel < queries)
      multiply_panel(call, call->normed, layer->width, from, to, &layer->query, panel, put_query);
    else if (panel < queries + keys)
      multiply_panel(call, call->normed, layer->width, from, to, &layer->key, panel - queries, put_key);
    else
      multiply_panel(call, call->normed, layer->width, from, to, &layer->value, panel - queries - keys, put_value);
}

static void add_bias(float* values, const float* bias, int64_t count) {
  if (bias) sum(values, values, bias, count);
}

/* Norms heads, if there is a scale, and rotates them: number i with number i + size / 2. */
static void turn_heads(const Layer* layer, float* heads, int64_t count, const float* scale, const float* turns) {
  const int64_t half = layer->size / 2;
  for (int64_t head = 0; head < count; ++head, heads += layer->size) {
    if (scale) norm_row(heads, scale, layer->size, layer->epsilon, heads);
    for (int64_t at = 0; at < half; ++at) {
      const float one = heads[at], other = heads[at + half], cosine = turns[at], sine = turns[at + half];
      heads[at] = one * cosine - other * sine;
      heads[at + half] = other * cosine + one * sine;
    }
  }
}

/* Returns the index of a prompt's row among its positions. */
static inline int64_t position_in_prompt(const Call* call, int64_t row) {
  return call->rows->lanes[row] % call->entries->prompt_lanes;
}

static const float* turns_of(const Call* call, int64_t row) {
  const int64_t index =
      call->entries->rows_are == kOfOutput ? prompt_of(call, row) : position_in_prompt(call, row);
  return call->entries->turns + index * call->layer->size;
}

static void turn_kept(const Call* call, int64_t row) {
  const Layer* layer = call->layer;
  float* keys = row_of(call->entries->keys, call->rows->nodes[row], kept_of(layer));
  add_bias(keys, layer->key_bias, kept_of(layer));
  add_bias(row_of(call->entries->values, call->rows->nodes[row], kept_of(layer)), layer->value_bias, kept_of(layer));
  turn_heads(layer, keys, layer->key_heads, layer->key_norm, turns_of(call, row));
}

static void turn(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  for (int64_t row = from; call->entries->turns && row < to; ++row) {
    float* queries = row_of(call->queries, row, inner_of(layer));
    add_bias(queries, layer->query_bias, inner_of(layer));
    turn_heads(layer, queries, layer->heads, layer->query_norm, turns_of(call, row));
    for (int64_t at = 0; at < inner_of(layer); ++at) queries[at] *= layer->query_scale;
    turn_kept(call, row);
  }
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

static Keys keys_of(const Layer* layer, const float* keys, const float* values) {
  return (Keys){
      .heads = layer->heads, .key_heads = layer->key_heads, .size = layer->size, .keys = keys, .values = values};
}

static Keys keys_of_paths(const Call* call) {
  Keys keys = keys_of(call->layer, call->entries->keys, call->entries->values);
  keys.biases = call->layer->biases, keys.bias_heads = call->layer->bias_heads, keys.ages = call->layer->ages;
  return keys;
}

static void look_along_path(const Call* call, int64_t row, Seen* seen) {
  const Layer* layer = call->layer;
  const Entries* entries = call->entries;
  const int64_t step = entries->steps[prompt_of(call, row)];
  const int32_t* path = entries->paths + call->rows->lanes[row] * entries->most_steps;
  int64_t from = step + 1 - layer->window;
  if (from < layer->first) from = layer->first;
  seen->count = 0;
  for (int64_t at = from; at <= step; ++at) {
    seen->offsets[seen->count] = path[at] * kept_of(layer);
    seen->ages[seen->count++] = (int32_t)(step - at);
  }
}

/* Also returns keys and values of a row's source. */
static Keys look_at_source(const Call* call, int64_t row, Seen* seen) {
  const Layer* layer = call->layer;
  const int64_t prompt = prompt_of(call, row);
  const Sources* sources = call->entries->sources + call->entries->source_of[prompt];
  const int64_t place = call->entries->places[prompt];
  const uint8_t* mask = sources->mask + place * sources->most;
  int64_t from = call->entries->positions[prompt] + 1 - layer->window;
  if (from < 0) from = 0;
  seen->count = 0;
  for (int64_t at = from; at < sources->most; ++at)
    if (mask[at]) seen->offsets[seen->count++] = (place * sources->most + at) * kept_of(layer);
  return keys_of(layer, sources->keys, sources->values);
}

static int64_t longest_of(const Call* call, int64_t from, int64_t to) {
  int64_t longest = call->entries->most_steps;
  for (int64_t row = from; row < to; ++row) {
    const int64_t most = call->entries->sources[call->entries->source_of[prompt_of(call, row)]].most;
    if (most > longest) longest = most;
  }
  return longest;
}

static void divide(float* mixed, const float* totals, const Layer* layer) {
  for (int64_t head = 0; head < layer->heads; ++head, mixed += layer->size)
    for (int64_t at = 0; at < layer->size; ++at) mixed[at] /= totals[head];
}

enum { kToPath, kToSource, kToBoth };

static inline __attribute__((always_inline)) void attend_rows(const Call* call, int64_t from, int64_t to,
                                                              const int what) {
  const Layer* layer = call->layer;
  int has_memory = 1;
  Seen seen = seen_of(longest_of(call, from, to), &has_memory);
  float* facts = memory_of(sizeof(float) * (4 * layer->heads + inner_of(layer)), &has_memory);
  float *largest = facts, *totals = largest + layer->heads, *other_largest = totals + layer->heads;
  float *other_totals = other_largest + layer->heads, *others = other_totals + layer->heads;
  for (int64_t row = from; has_memory && row < to; ++row) {
    const float* queries = row_of(call->queries, row, inner_of(layer));
    float* mixed = row_of(call->mixed, row, inner_of(layer));
    if (what != kToSource) {
      const Keys keys = keys_of_paths(call);
      look_along_path(call, row, &seen);
      attend_row(&keys, &seen, queries, mixed, largest, totals);
    }
    if (what == kToSource) {
      const Keys keys = look_at_source(call, row, &seen);
      attend_row(&keys, &seen, queries, mixed, largest, totals);
    }
    if (what == kToBoth) {
      const Keys keys = look_at_source(call, row, &seen);
      attend_row(&keys, &seen, queries, others, other_largest, other_totals);
      for (int64_t head = 0; head < layer->heads; ++head) {
        const float most = fmaxf(largest[head], other_largest[head]);
        const float one = exp2f(largest[head] - most), other = exp2f(other_largest[head] - most);
        for (int64_t at = head * layer->size; at < (head + 1) * layer->size; ++at)
          mixed[at] = one * mixed[at] + other * others[at];
        totals[head] = one * totals[head] + other * other_totals[head];
      }
    }
    divide(mixed, totals, layer);
  }
  forget(&seen);
  free(facts);
  if (!has_memory) atomic_store(call->lacks_memory, 1);
}

static void attend_to_path(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  attend_rows(call, from, to, kToPath);
}

static void attend_to_source(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  attend_rows(call, from, to, kToSource);
}

static void attend_to_both(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  attend_rows(call, from, to, kToBoth);
}

/* Returns the number of prompts that rows are of, which are in order. */
static int64_t num_prompts(const Call* call) {
  return call->rows->count ? prompt_of(call, call->rows->count - 1) - prompt_of(call, 0) + 1 : 0;
}

/* Attends to the tokens of prompts, for the rows of each head of each prompt. */
static void attend_in_prompt(const Call* call, int64_t from, int64_t to, int64_t first, int64_t end) {
  const Layer* layer = call->layer;
  const Entries* entries = call->entries;
  const int64_t most = entries->prompt_lanes, head = first % layer->heads;
  const int64_t prompt = prompt_of(call, 0) + first / layer->heads, is_encoder = entries->rows_are == kOfEncoder;
  int has_memory = 1;
  Tokens tokens = {.offsets = memory_of(sizeof(int64_t) * most, &has_memory),
                   .positions = memory_of(sizeof(int32_t) * most, &has_memory)};
  int32_t* positions = memory_of(sizeof(int32_t) * most, &has_memory);
  Queries queries = {.positions = positions, .stride = inner_of(layer), .window = layer->window,
                     .sees_all = (int)is_encoder};
  for (int64_t row = from; has_memory && row < to; ++row) {
    if (prompt_of(call, row) != prompt) continue;
    if (!queries.count) {
      queries.queries = row_of(call->queries, row, queries.stride) + head * layer->size;
      queries.mixed = row_of(call->mixed, row, queries.stride) + head * layer->size;
    }
    positions[queries.count++] = (int32_t)position_in_prompt(call, row);
  }
  if (has_memory && queries.count) {
    const int32_t* nodes = entries->paths + prompt * most;
    const int64_t last = is_encoder ? most - 1 : positions[queries.count - 1];
    const int64_t oldest = is_encoder ? 0 : positions[0] + 1 - layer->window;
    for (int64_t at = oldest < 0 ? 0 : oldest; at <= last; ++at) {
      if (nodes[at] < 0) continue;
      tokens.offsets[tokens.count] = nodes[at] * kept_of(layer);
      tokens.positions[tokens.count++] = (int32_t)at;
    }
    const Keys keys = keys_of_paths(call);
    has_memory = attend_in_head(&keys, &tokens, head, &queries);
  }
  free(tokens.offsets), free(tokens.positions), free(positions);
  if (!has_memory) atomic_store(call->lacks_memory, 1);
}

typedef struct {
  void (*run)(const Call*, int64_t, int64_t, int64_t, int64_t);
  /* Product whose panels threads share; or they share rows, or heads of prompts. */
  enum { kByRow, kByHead, kProjection, kNarrow, kInner, kWide } columns;
} Phase;

static const Phase kApart[] = {
    {norm_inputs, kByRow},     {project, kProjection},        {attend_to_path, kByRow},   {add_path, kNarrow},
    {norm_for_source, kByRow}, {project_for_source, kInner},  {attend_to_source, kByRow}, {add_source, kNarrow},
    {norm_for_mlp, kByRow},    {widen, kWide},                {narrow, kNarrow},
};
static const Phase kTogether[] = {
    {norm_inputs, kByRow}, {project, kProjection},  {turn, kByRow},  {attend_to_both, kByRow},
    {add_path, kNarrow},   {norm_for_mlp, kByRow},  {widen, kWide},  {narrow, kNarrow},
};
static const Phase kInPrompt[] = {
    {norm_inputs, kByRow}, {project, kProjection},  {turn, kByRow},  {attend_in_prompt, kByHead},
    {add_path, kNarrow},   {norm_for_mlp, kByRow},  {widen, kWide},  {narrow, kNarrow},
};

enum { kMostPhases = sizeof kApart / sizeof *kApart };

typedef struct {
  const Phase* each;
  int count;
} Phases;

static Phases phases_of(const Layer* layer, const Entries* entries) {
  if (entries->rows_are != kOfOutput) return (Phases){kInPrompt, sizeof kInPrompt / sizeof *kInPrompt};
  if (layer->cross_query.weights) return (Phases){kApart, kMostPhases};
  return (Phases){kTogether, sizeof kTogether / sizeof *kTogether};
}

static int64_t panels_of_phase(const Layer* layer, const Phase* phase) {
  switch (phase->columns) {
    case kProjection: return panels_of(&layer->query) + panels_of(&layer->key) + panels_of(&layer->value);
    case kNarrow: return panels_of(&layer->out);
    case kInner: return panels_of(&layer->cross_query);
    case kWide: return panels_of(&layer->wide);
    default: return 1;
  }
}

int64_t weights_of(const Layer* layer) {
  int64_t weights = 0;
  for (const Matrix* matrix = &layer->query; matrix <= &layer->narrow; ++matrix)
    if (matrix->weights) weights += matrix->inputs * panels_of(matrix) * kPanel;
  return weights;
}

int64_t numbers_of(const Layer* layer) { return 2 * layer->width + 2 * inner_of(layer) + layer->wide.columns; }

static Call call_of(const Layer* layer, const Entries* entries, const Rows* rows, float* memory,
                    atomic_int* lacks_memory) {
  Call call = {.layer = layer, .entries = entries, .rows = rows, .normed = memory, .lacks_memory = lacks_memory};
  call.hidden = call.normed + rows->count * layer->width;
  call.queries = call.hidden + rows->count * layer->width;
  call.mixed = call.queries + rows->count * inner_of(layer);
  call.inner = call.mixed + rows->count * inner_of(layer);
  return call;
}

void take_through(const Layer* layer, const Entries* entries, const Rows* rows, float* memory,
                  atomic_int* lacks_memory) {
  const Call call = call_of(layer, entries, rows, memory, lacks_memory);
  const Phases phases = phases_of(layer, entries);
  for (const Phase* phase = phases.each; phase < phases.each + phases.count; ++phase)
    phase->run(&call, 0, rows->count, 0, panels_of_phase(layer, phase));
}

typedef struct {
  const Layer* const* layers;
  const Entries* entries; /* Of each layer. */
  int64_t num_layers, block;
  const Rows* rows;
  float* memory;
  atomic_int* lacks_memory;
} Calls;

/* Returns the rows of a later layer, whose inputs are the outputs of the layer below. */
static Rows above(const Rows* rows) {
  Rows same = *rows;
  same.below = rows->lanes;
  return same;
}

/* Runs all layers for a few rows. */
static void run_block(const void* context, int phase_of_one, int64_t block) {
  const Calls* calls = context;
  const int64_t from = block * calls->block, left = calls->rows->count - from;
  Rows rows = *calls->rows;
  rows.below += from, rows.lanes += from, rows.nodes += from;
  rows.count = left < calls->block ? left : calls->block;
  float* memory = calls->memory + from * numbers_of(calls->layers[0]);
  for (int64_t index = 0; index < calls->num_layers; ++index) {
    take_through(calls->layers[index], calls->entries + index, &rows, memory, calls->lacks_memory);
    rows = above(&rows);
  }
}

static int64_t rows_of_task(const Call* call, const Phase* phase) {
  return phase->columns == kByRow ? kRowsOfAttention : phase->columns == kByHead ? call->rows->count : kRowsOfBlock;
}

static int64_t columns_of_phase(const Call* call, const Phase* phase) {
  return phase->columns == kByHead ? num_prompts(call) * call->layer->heads : panels_of_phase(call->layer, phase);
}

/* A task is a panel for a block of rows, a few rows, or a head of a prompt. */
static void run_columns(const void* context, int index, int64_t task) {
  const Call* call = context;
  const Phase* phase = phases_of(call->layer, call->entries).each + index;
  const int64_t columns = columns_of_phase(call, phase), rows = rows_of_task(call, phase);
  const int64_t from = task / columns * rows, end = from + rows, first = task % columns;
  phase->run(call, from, end < call->rows->count ? end : call->rows->count, first, first + 1);
}

int64_t block_of(int64_t count, int64_t threads) {
  const int64_t rounds = (count + threads * kRowsOfBlock - 1) / (threads * kRowsOfBlock);
  const int64_t block = (count + threads * rounds - 1) / (threads * rounds);
  return block < kFewestRowsOfBlock ? kFewestRowsOfBlock : block;
}

/* Runs a layer for all rows; threads share its products. */
static void share_columns(const Call* call, int64_t threads) {
  const Layer* layer = call->layer;
  int64_t tasks[kMostPhases];
  const Phases phases = phases_of(layer, call->entries);
  for (int index = 0; index < phases.count; ++index) {
    const Phase* phase = phases.each + index;
    const int64_t rows = rows_of_task(call, phase);
    tasks[index] = (call->rows->count + rows - 1) / rows * columns_of_phase(call, phase);
  }
  run_phases(threads, call, run_columns, tasks, phases.count);
}

/* Runs some layers of one size for rows, one after the other; no two rows of outputs may share a path, unless there is
   one layer. Returns 0 if there is not enough memory. */
int calm_beam_run_layers(const Layer* const* layers, const Entries* entries, int64_t num_layers, const Rows* rows) {
  if (!rows->count) return 1;
  const int64_t weights = weights_of(layers[0]);
  atomic_int lacks_memory = 0;
  int has_memory = 1;
  float* memory = memory_of(sizeof(float) * rows->count * numbers_of(layers[0]), &has_memory);
  if (!has_memory) return 0;
  /* In a prompt, rows need each other's keys. */
  const int is_prompt = entries->rows_are != kOfOutput;
  const int shares_columns =
      is_prompt || (weights > CACHED_WEIGHTS && block_of(rows->count, rows->threads) < kRowsOfBlock / 2);
  const int64_t together = shares_columns ? 1 : num_layers;
  const int64_t threads = busy_threads(rows->threads, together * rows->count * weights);
  if (shares_columns) {
    Rows here = *rows;
    for (int64_t index = 0; index < num_layers; ++index) {
      const Call call = call_of(layers[index], entries + index, &here, memory, &lacks_memory);
      share_columns(&call, threads);
      here = above(rows);
    }
  } else {
    const Calls calls = {.layers = layers, .entries = entries, .num_layers = num_layers,
                         .block = block_of(rows->count, threads), .rows = rows, .memory = memory,
                         .lacks_memory = &lacks_memory};
    const int64_t blocks = (rows->count + calls.block - 1) / calls.block;
    run_phases(threads, &calls, run_block, &blocks, 1);
  }
  free(memory);
  return !lacks_memory;
}

typedef struct {
  const Layer* const* layers;
  const Entries* entries; /* Of each layer. */
  const Skipped* skipped;
} Keeping;

static void keep_block(const void* context, int phase, int64_t task) {
  const Keeping* keeping = context;
  const Skipped* skipped = keeping->skipped;
  const int64_t blocks = (skipped->count + kRowsOfBlock - 1) / kRowsOfBlock;
  const int64_t index = task / blocks, from = task % blocks * kRowsOfBlock;
  const Layer* layer = keeping->layers[index];
  const int32_t* nodes = skipped->nodes + index * skipped->count;
  int32_t kept[kRowsAtATime], lanes[kRowsAtATime];
  int64_t count = 0, row = from;
  float normed[kRowsAtATime * layer->width];
  const Rows rows = {.nodes = kept, .lanes = lanes};
  const Call call = {.layer = layer, .entries = keeping->entries + index, .rows = &rows, .normed = normed};
  const int64_t queries = panels_of(&layer->query), end = queries + panels_of(&layer->key) + panels_of(&layer->value);
  while (row < from + kRowsOfBlock && row < skipped->count) {
    for (count = 0; count < kRowsAtATime && row < from + kRowsOfBlock && row < skipped->count; ++row) {
      if (nodes[row] >= skipped->capacity) continue;
      norm_row(skipped->states + skipped->which[row] * layer->width, layer->norm, layer->width, layer->epsilon,
               normed + count * layer->width);
      lanes[count] = skipped->lanes[row];
      kept[count++] = nodes[row];
    }
    if (count) project(&call, 0, count, queries, end);
    for (int64_t each = 0; each < count && call.entries->turns; ++each) turn_kept(&call, each);
  }
}

void calm_beam_keep_skipped(const Layer* const* layers, const Entries* entries, const Skipped* skipped) {
  const int64_t blocks = (skipped->count + kRowsOfBlock - 1) / kRowsOfBlock * skipped->num_layers;
  const Layer* layer = layers[0];
  const Keeping keeping = {layers, entries, skipped};
  const int64_t of_row = 2 * layer->width * kept_of(layer);
  const int64_t threads = busy_threads(skipped->threads, skipped->num_layers * skipped->count * of_row);
  run_phases(threads, &keeping, keep_block, &blocks, 1);
}
