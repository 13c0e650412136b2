/* Whole steps of prompts that have one entry each; called by Python. The structures are those of native/structures.py.

   Where the weights of a layer fit in a cache, rows need not wait for each other. A thread runs a layer for a few rows,
   decides their exits, and goes on with the others: no work is wasted, and threads synchronise once a step. A prompt by
   itself takes all its steps in one call. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "heads.h"
#include "layers.h"
#include "layouts.h"
#include "measures.h"
#include "memory.h"
#include "threads.h"

enum { kBlocksOfThread = 2 };

typedef struct {
  int64_t count, threads;
  const Measure* measure;
  const Head* const* heads;     /* [layers]: NULL where no row may exit; the last layer has one. */
  const int32_t *lanes, *nodes; /* [count], as of `Rows` */
  /* From here on, by entry. */
  const float* thresholds;    /* Infinite where no row exits before the last layer. */
  const int32_t* known_exits; /* 0 where the exit is not known. NULL if none is. */
  int32_t *tokens, *exit_layers;
  float *confidences, *max_rejected_confidence;
  uint8_t* is_finite;
  atomic_llong asked; /* Number of rows that heads were asked about. */
} Step;

SAME_IN_PYTHON_Step

/* The output of a prompt by itself. Entry 0 is the prompt's, and node n has the keys and values of step n. */
typedef struct {
  int64_t steps, first_kept_step, length; /* Most tokens, the first step that is attended to, tokens of the prompt. */
  int64_t passed_on;      /* The layer whose state fills skipped layers; 0 for the layer of the exit. */
  const float* embedding; /* [vocabulary, width] */
  const float* turns;     /* [steps, size]: as in `Entries` */
  float* states;          /* [layers + 1, width]: the embedding, of the first step at first, and outputs of layers */
  int32_t *step, *position;
  const int32_t* ends; /* Tokens that end an output. */
  int64_t num_ends;
  float embedding_factor;
} Output;

SAME_IN_PYTHON_Output

/* Python checks this before it calls anything. */
const char calm_beam_layouts[] = CALM_BEAM_LAYOUTS;

typedef struct {
  const Layer* const* layers;
  const Entries* entries; /* Of each layer. */
  int64_t num_layers, block;
  Step* step;
  float* memory;
  atomic_int* lacks_memory;
} Call;

static int32_t known_exit(const Step* step, int32_t lane) { return step->known_exits ? step->known_exits[lane] : 0; }

/* The decision for a row at an exit layer. */
typedef struct {
  int32_t token;
  float confidence;
  int is_finite, leaves;
} Decision;

/* Asks the head of a layer about some rows of a block, given by their indices: the predictions, and the confidences by
   a measure of logits. */
static void ask(const Call* call, int64_t index, const int32_t* lanes, const int32_t* rows, int64_t count,
                float* memory, Decision* decisions) {
  const Measure* measure = call->step->measure;
  int32_t asked[kRowsOfBlock] = {0};
  Facts facts[kRowsOfBlock];
  if (!count) return;
  for (int64_t each = 0; each < count; ++each) asked[each] = lanes[rows[each]];
  ask_head(call->step->heads[index], call->entries[index].outputs, asked, count, memory, facts);
  for (int64_t each = 0; each < count; ++each) {
    Decision* decision = &decisions[rows[each]];
    decision->token = facts[each].token;
    if (is_of_logits(measure)) decision->confidence = confidence_of_logits(measure, &facts[each]);
    decision->is_finite = isfinite(facts[each].largest) && isfinite(decision->confidence);
  }
}

/* Decides which rows exit at a layer, and returns how many rows the head was asked about. */
static int64_t decide(const Call* call, int64_t index, const int32_t* lanes, int64_t count, float* memory,
                      Decision* decisions) {
  const Step* step = call->step;
  const Entries* entries = &call->entries[index];
  const int64_t layer = index + 1, width = call->layers[index]->width;
  const int is_last = layer == call->num_layers, by_logits = is_of_logits(step->measure);
  int32_t rows[kRowsOfBlock];
  int64_t asking = 0;
  for (int32_t row = 0; row < count; ++row) {
    const int64_t at = lanes[row] * width;
    decisions[row] = (Decision){.confidence = -INFINITY};
    if (!by_logits)
      decisions[row].confidence =
          confidence_of_states(step->measure, layer, entries->outputs + at, entries->inputs + at, width);
    else if (!known_exit(step, lanes[row]) && (is_last || isfinite(step->thresholds[lanes[row]])))
      rows[asking++] = row;
  }
  ask(call, index, lanes, rows, asking, memory, decisions);
  int64_t reading = 0;
  for (int32_t row = 0; row < count; ++row) {
    const int32_t lane = lanes[row], known = known_exit(step, lane);
    decisions[row].leaves =
        known ? known == layer : is_last || decisions[row].confidence >= step->thresholds[lane];
    if (!by_logits && decisions[row].leaves && !known) rows[reading++] = row;
  }
  /* Rows that exit still need a token, so run the head on them. */
  ask(call, index, lanes, rows, reading, memory, decisions);
  return asking + reading;
}

/* Writes the outputs of rows that exit, moves the others to the front, and returns their number. */
static int64_t let_out(const Step* step, int64_t index, const Decision* decisions, int32_t* lanes, int32_t* nodes,
                       int64_t count) {
  int64_t staying = 0;
  for (int64_t row = 0; row < count; ++row) {
    const Decision decided = decisions[row];
    const int32_t lane = lanes[row];
    if (decided.leaves) {
      step->tokens[lane] = decided.token;
      step->exit_layers[lane] = (int32_t)index + 1;
      step->confidences[lane] = decided.confidence;
      step->is_finite[lane] = decided.is_finite;
    } else {
      step->max_rejected_confidence[lane] = fmaxf(step->max_rejected_confidence[lane], decided.confidence);
      lanes[staying] = lane;
      nodes[staying++] = nodes[row];
    }
  }
  return staying;
}

/* Runs layers for a few rows until all have exited. */
static void run_block(const void* context, int phase, int64_t block) {
  const Call* call = context;
  const int64_t from = block * call->block, left = call->step->count - from;
  float* memory = call->memory + from * numbers_of(call->layers[0]);
  int32_t lanes[kRowsOfBlock], nodes[kRowsOfBlock];
  Decision decisions[kRowsOfBlock];
  int64_t count = left < call->block ? left : call->block, asked = 0;
  memcpy(lanes, call->step->lanes + from, sizeof(int32_t) * count);
  memcpy(nodes, call->step->nodes + from, sizeof(int32_t) * count);
  for (int64_t index = 0; index < call->num_layers && count; ++index) {
    const Rows rows = {.below = lanes, .lanes = lanes, .nodes = nodes, .count = count};
    take_through(call->layers[index], call->entries + index, &rows, memory, call->lacks_memory);
    if (!call->step->heads[index]) continue;
    asked += decide(call, index, lanes, count, memory, decisions);
    count = let_out(call->step, index, decisions, lanes, nodes, count);
  }
  atomic_fetch_add(&call->step->asked, asked);
}

/* All layers have one size. Returns 0 if there is not enough memory. */
int calm_beam_run_step(const Layer* const* layers, const Entries* entries, int64_t num_layers, Step* step) {
  if (!step->count) return 1;
  atomic_int lacks_memory = 0;
  int has_memory = 1;
  float* memory = memory_of(sizeof(float) * step->count * numbers_of(layers[0]), &has_memory);
  if (!has_memory) return 0;
  const int64_t threads = busy_threads(step->threads, step->count * weights_of(layers[0]));
  /* Rows exit at different layers: a thread that is done early takes more rows. */
  const int64_t block = block_of(step->count, kBlocksOfThread * threads);
  const Call call = {layers, entries, num_layers, block, step, memory, &lacks_memory};
  const int64_t blocks = (step->count + block - 1) / block;
  run_phases(threads, &call, run_block, &blocks, 1);
  free(memory);
  return !lacks_memory;
}

static int is_end(const Output* output, int32_t token) {
  for (int64_t each = 0; each < output->num_ends; ++each)
    if (output->ends[each] == token) return 1;
  return 0;
}

/* Fills the keys and values of layers above an exit. */
static void fill_skipped(const Layer* const* layers, const Entries* entries, int64_t num_layers, const Step* step,
                         const Output* output) {
  const int64_t exit = *step->exit_layers, which = output->passed_on ? output->passed_on : exit;
  int32_t nodes[num_layers];
  for (int64_t index = 0; index < num_layers; ++index) nodes[index] = *output->step;
  const Skipped skipped = {.num_layers = num_layers - exit, .count = 1, .capacity = output->steps,
                           .threads = step->threads, .states = output->states, .which = &which, .nodes = nodes,
                           .lanes = step->lanes};
  if (skipped.num_layers) calm_beam_keep_skipped(layers + exit, entries + exit, &skipped);
}

/* Decodes a prompt by itself; `step` has one row, and arrays for every step. Returns the output's length, or 0 if there
   is not enough memory. */
int64_t calm_beam_decode(const Layer* const* layers, Entries* entries, int64_t num_layers, Step* step,
                         const Output* output) {
  const int64_t width = layers[0]->width;
  int32_t node = 0;
  step->nodes = &node;
  for (; node < output->steps; ++node) {
    *output->step = node, *output->position = (int32_t)output->length - 1 + node;
    for (int64_t index = 0; output->turns && index < num_layers; ++index)
      entries[index].turns = output->turns + node * layers[index]->size;
    if (!calm_beam_run_step(layers, entries, num_layers, step)) return 0;
    const int64_t token = *step->tokens;
    if (is_end(output, (int32_t)token)) return node + 1;
    if (node >= output->first_kept_step) fill_skipped(layers, entries, num_layers, step, output);
    for (int64_t at = 0; at < width; ++at)
      output->states[at] = output->embedding[token * width + at] * output->embedding_factor;
    ++step->thresholds, ++step->tokens, ++step->exit_layers, ++step->confidences;
    ++step->max_rejected_confidence, ++step->is_finite;
  }
  return output->steps;
}
