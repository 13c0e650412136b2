/* Summaries of a head's logits for states, from which decisions are computed. It is for heads so small that a certified
   head is not faster. The summaries are those of XLA (exits/decision.py), summed in another order; they are
   batch-invariant: a row gives the same bits in any call. */

#include <math.h>
#include <stdint.h>

#include "exponentials.h"
#include "heads.h"
#include "layouts.h"
#include "measures.h"
#include "memory.h"
#include "products.h"
#include "threads.h"

SAME_IN_PYTHON_Head

enum {
  kRowsOfBlock = 24,
  kFacts = 5,
  kPanelsOfPart = 4, /* Panels whose sums stay in the cache. Constant: a row's bits must not depend on the number of
                        rows, and so not on the parts. */
};

typedef struct {
  int64_t count, threads;
  const Measure* measure; /* NULL for no confidence. */
  const float* states;    /* [entries, width] */
  const int64_t* entries; /* [count] */
  float* facts;           /* [5, count]: largest, second, total, weighted, confidence */
  int32_t* tokens;        /* [count] */
} Asked;

SAME_IN_PYTHON_Asked

typedef struct {
  const Head* head;
  const Asked* asked;
  float* normed;
  Facts* facts; /* [count, parts] */
} Call;

static int64_t parts_of(const Head* head) { return (panels_of(&head->weights) + kPanelsOfPart - 1) / kPanelsOfPart; }

/* Returns the facts of a row's logits, which are padded with -inf to a whole vector. Until the facts are settled, the
   token is -1 if a logit is NaN. */
static Facts facts_of(const float* logits, int64_t count, int32_t first) {
  Facts facts = {.largest = -INFINITY, .second = -INFINITY};
  Floats largest = all(-INFINITY), second = all(-INFINITY);
  Integers is_none = {0};
  for (int64_t at = 0; at < count; at += kLanes) {
    const Floats here = load(logits + at);
    is_none |= here != here;
    second = larger(second, smaller(largest, here));
    largest = larger(largest, here);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (is_none[lane]) return (Facts){.largest = INFINITY, .token = -1};
  facts.largest = most_of(largest);
  int has_seen = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    /* The largest once more, if it is in another lane too. */
    if (largest[lane] == facts.largest && !has_seen)
      has_seen = 1, facts.second = facts.second > second[lane] ? facts.second : second[lane];
    else
      facts.second = facts.second > largest[lane] ? facts.second : largest[lane];
  }
  for (facts.token = 0; logits[facts.token] != facts.largest;) ++facts.token;
  facts.token += first;
  if (facts.largest == -INFINITY) return facts;
  Floats total = {0}, weighted = {0};
  for (int64_t at = 0; at < count; at += kLanes) {
    const Floats below = load(logits + at) - facts.largest;
    const Floats weight = exponential(below);
    total += weight;
    weighted += taken(weight > 0, weight * below);
  }
  facts.total = sum_of(total), facts.weighted = sum_of(weighted);
  return facts;
}

static float exponential_of(float below) { return exponential(all(below))[0]; }

/* Merges the facts of a later part of the vocabulary. */
static void add_facts(Facts* facts, const Facts* other) {
  if (facts->token < 0 || other->token < 0) {
    *facts = (Facts){.largest = INFINITY, .token = -1};
    return;
  }
  const int is_larger = other->largest > facts->largest;
  const float largest = is_larger ? other->largest : facts->largest;
  const float smaller_one = is_larger ? facts->largest : other->largest;
  const float second = facts->second > other->second ? facts->second : other->second;
  if (is_larger) facts->token = other->token;
  facts->second = smaller_one > second ? smaller_one : second;
  if (largest > -INFINITY) {
    const float mine = facts->largest - largest, others = other->largest - largest;
    const float my_scale = exponential_of(mine), other_scale = exponential_of(others);
    facts->weighted = (my_scale > 0 ? my_scale * (facts->weighted + mine * facts->total) : 0) +
                      (other_scale > 0 ? other_scale * (other->weighted + others * other->total) : 0);
    facts->total = my_scale * facts->total + other_scale * other->total;
  }
  facts->largest = largest;
}

static void norm_state(const Head* head, const float* state, float* normed) {
  const int64_t width = head->weights.inputs;
  norm_row(state, head->norm, width, head->epsilon, normed);
  for (int64_t at = 0; at < width; ++at) normed[at] *= head->factor;
}

/* Writes the facts of a part of the vocabulary for normed rows, [rows, width], to every `stride`th of `facts`. */
static void ask_part(const Head* head, int64_t part, const float* normed, int64_t rows, Facts* facts, int64_t stride) {
  const Matrix* weights = &head->weights;
  const int64_t panels = panels_of(weights), first = part * kPanelsOfPart;
  const int64_t end = first + kPanelsOfPart < panels ? first + kPanelsOfPart : panels;
  float sums[kRowsAtATime * kPanel], logits[kRowsAtATime][kPanelsOfPart * kPanel];
  for (int64_t row = 0; row < rows; row += kRowsAtATime) {
    const int64_t count = rows - row < kRowsAtATime ? rows - row : kRowsAtATime;
    int64_t columns = 0;
    for (int64_t panel = first; panel < end; ++panel) {
      multiply_rows(normed + row * weights->inputs, weights->inputs, weights, panel, count, sums);
      for (int64_t each = 0; each < count; ++each) {
        float* here = logits[each] + (panel - first) * kPanel;
        for (int at = 0; at < kPanel; ++at) here[at] = sums[each * kPanel + at];
        for (int64_t at = columns_of(weights, panel); at < kPanel; ++at) here[at] = -INFINITY;
      }
      columns += kPanel;
    }
    for (int64_t each = 0; each < count; ++each)
      facts[(row + each) * stride] = facts_of(logits[each], columns, (int32_t)(first * kPanel));
  }
}

/* Settles facts: their final values where a logit is NaN, or the largest is infinite. */
static Facts settled(const Facts* facts) {
  if (facts->token < 0) return (Facts){NAN, facts->second, NAN, NAN, 0};
  Facts known = *facts;
  if (!isfinite(known.largest)) known.total = known.weighted = NAN;
  return known;
}

void ask_head(const Head* head, const float* states, const int32_t* entries, int64_t count, float* memory,
              Facts* facts) {
  const int64_t width = head->weights.inputs;
  Facts of_part[kRowsOfBlock];
  for (int64_t row = 0; row < count; ++row) norm_state(head, states + entries[row] * width, memory + row * width);
  for (int64_t from = 0; from < count; from += kRowsOfBlock) {
    const int64_t rows = count - from < kRowsOfBlock ? count - from : kRowsOfBlock;
    ask_part(head, 0, memory + from * width, rows, facts + from, 1);
    for (int64_t part = 1; part < parts_of(head); ++part) {
      ask_part(head, part, memory + from * width, rows, of_part, 1);
      for (int64_t row = 0; row < rows; ++row) add_facts(facts + from + row, of_part + row);
    }
  }
  for (int64_t row = 0; row < count; ++row) facts[row] = settled(facts + row);
}

static void tell(const Call* call, int64_t row) {
  const Asked* asked = call->asked;
  const int64_t parts = parts_of(call->head);
  Facts facts = call->facts[row * parts];
  for (int64_t part = 1; part < parts; ++part) add_facts(&facts, &call->facts[row * parts + part]);
  facts = settled(&facts);
  asked->tokens[row] = facts.token;
  const float told[] = {facts.largest, facts.second, facts.total, facts.weighted,
                        asked->measure ? confidence_of_logits(asked->measure, &facts) : 0};
  for (int fact = 0; fact < kFacts; ++fact) asked->facts[fact * asked->count + row] = told[fact];
}

static void run(const void* context, int phase, int64_t task) {
  const Call* call = context;
  const Asked* asked = call->asked;
  const int64_t count = asked->count, blocks = (count + kRowsOfBlock - 1) / kRowsOfBlock;
  const int64_t width = call->head->weights.inputs, parts = parts_of(call->head);
  const int64_t from = task % blocks * kRowsOfBlock;
  const int64_t to = from + kRowsOfBlock < count ? from + kRowsOfBlock : count;
  if (phase == 0)
    for (int64_t row = from; row < to; ++row)
      norm_state(call->head, asked->states + asked->entries[row] * width, call->normed + row * width);
  else if (phase == 1)
    ask_part(call->head, task / blocks, call->normed + from * width, to - from,
             call->facts + from * parts + task / blocks, parts);
  else
    for (int64_t row = from; row < to; ++row) tell(call, row);
}

/* Returns 0 if there is not enough memory. */
int calm_beam_summarise(const Head* head, const Asked* asked) {
  int has_memory = 1;
  Call call = {.head = head, .asked = asked};
  call.normed = memory_of(sizeof(float) * asked->count * head->weights.inputs, &has_memory);
  call.facts = memory_of(sizeof(Facts) * asked->count * parts_of(head), &has_memory);
  if (has_memory) {
    const int64_t blocks = (asked->count + kRowsOfBlock - 1) / kRowsOfBlock;
    const int64_t of_row = head->weights.inputs * panels_of(&head->weights) * kPanel;
    const int64_t threads = busy_threads(asked->threads, asked->count * of_row);
    run_phases(threads, &call, run, (int64_t[]){blocks, blocks * parts_of(head), blocks}, 3);
  }
  free(call.normed), free(call.facts);
  return has_memory;
}
