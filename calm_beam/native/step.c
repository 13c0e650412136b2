/* Whole steps of prompts that have one lane each, decided by what heads make of their states: a call of Python's, whose
   structures are those of native/calls.py.

   Where the weights of a layer are at hand, rows need not wait for each other. A thread takes a few of them through a
   layer, asks the head who may leave, and goes on with those who stay: nothing is run in vain, and threads meet once a
   step. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "heads.h"
#include "layers.h"
#include "memory.h"
#include "threads.h"

enum { kBlocksOfThread = 2 };

typedef struct {
  int64_t count, threads, measure;
  float log_tokens;
  const Head* const* heads;     /* [layers]: NULL of those that may not be left at; the last may be. */
  const int32_t *lanes, *nodes; /* [count], as of `Rows` */
  /* From here on, by lane. */
  const float* thresholds;    /* Infinite where the head is asked after the last layer only. */
  const int32_t* known_exits; /* 0 where the exit is not known. NULL if none is. */
  int32_t *tokens, *exit_layers;
  float *confidences, *runner_ups;
  uint8_t* is_finite;
  atomic_llong asked; /* How many times a head was asked about a row. */
} Step;

typedef struct {
  const Layer* const* layers;
  const Entries* entries; /* Of each layer. */
  int64_t num_layers, block;
  Step* step;
  float* memory;
  atomic_int* lacks_memory;
} Call;

static int32_t known_exit(const Step* step, int32_t lane) { return step->known_exits ? step->known_exits[lane] : 0; }

/* Returns whether the head is asked about a row at a layer that may be left at. */
static int asks(const Step* step, int32_t lane, int is_last) {
  return !known_exit(step, lane) && (is_last || isfinite(step->thresholds[lane]));
}

/* Lets rows out at a layer, and returns how many stay, which come first then. Adds to `asked` how many rows the head was
   asked about. */
static int64_t let_out(const Call* call, int64_t index, int32_t* lanes, int32_t* nodes, int64_t count, float* memory,
                       int64_t* asked) {
  const Step* step = call->step;
  const int is_last = index + 1 == call->num_layers;
  int32_t asking[kRowsOfBlock];
  Facts of_asking[kRowsOfBlock];
  const Facts* next = of_asking;
  int64_t num_asking = 0, staying = 0;
  for (int64_t row = 0; row < count; ++row)
    if (asks(step, lanes[row], is_last)) asking[num_asking++] = lanes[row];
  if (num_asking)
    ask_head(step->heads[index], call->entries[index].outputs, asking, num_asking, memory, of_asking);
  for (int64_t row = 0; row < count; ++row) {
    const int32_t lane = lanes[row], known = known_exit(step, lane);
    Facts facts = {.largest = NAN};
    float confidence = -INFINITY;
    if (asks(step, lane, is_last)) {
      facts = *next++;
      confidence = confidence_of(&facts, step->measure, step->log_tokens);
    }
    if (known ? known == index + 1 : is_last || confidence >= step->thresholds[lane]) {
      step->tokens[lane] = facts.token;
      step->exit_layers[lane] = (int32_t)index + 1;
      step->confidences[lane] = confidence;
      step->is_finite[lane] = isfinite(facts.largest) && isfinite(confidence);
    } else {
      step->runner_ups[lane] = fmaxf(step->runner_ups[lane], confidence);
      lanes[staying] = lane;
      nodes[staying++] = nodes[row];
    }
  }
  *asked += num_asking;
  return staying;
}

/* Takes a few rows through layers until the last of them has left. */
static void run_block(const void* context, int phase, int64_t block) {
  const Call* call = context;
  const int64_t from = block * call->block, left = call->step->count - from;
  float* memory = call->memory + from * numbers_of(call->layers[0]);
  int32_t lanes[kRowsOfBlock], nodes[kRowsOfBlock];
  int64_t count = left < call->block ? left : call->block, asked = 0;
  memcpy(lanes, call->step->lanes + from, sizeof(int32_t) * count);
  memcpy(nodes, call->step->nodes + from, sizeof(int32_t) * count);
  for (int64_t index = 0; index < call->num_layers && count; ++index) {
    const Rows rows = {.below = lanes, .lanes = lanes, .nodes = nodes, .count = count};
    take_through(call->layers[index], call->entries + index, &rows, memory, call->lacks_memory);
    if (call->step->heads[index]) count = let_out(call, index, lanes, nodes, count, memory, &asked);
  }
  atomic_fetch_add(&call->step->asked, asked);
}

/* Returns 0 if there is no memory for it. */
int calm_beam_run_step(const Layer* const* layers, const Entries* entries, int64_t num_layers, Step* step) {
  atomic_int lacks_memory = 0;
  int has_memory = 1;
  float* memory = memory_of(sizeof(float) * step->count * numbers_of(layers[0]), &has_memory);
  if (!has_memory) return 0;
  const int64_t threads = busy_threads(step->threads, step->count * weights_of(layers[0]));
  /* Rows leave where they like: a thread that is done early takes more of them. */
  int64_t block = (step->count + kBlocksOfThread * threads - 1) / (kBlocksOfThread * threads);
  if (block < kFewestRowsOfBlock) block = kFewestRowsOfBlock;
  if (block > kRowsOfBlock) block = kRowsOfBlock;
  const Call call = {layers, entries, num_layers, block, step, memory, &lacks_memory};
  const int64_t blocks = (step->count + block - 1) / block;
  run_phases(threads, &call, run_block, &blocks, 1);
  free(memory);
  return !lacks_memory;
}
