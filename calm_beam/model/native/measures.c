#include "measures.h"

#include <math.h>

#include "layouts.h"
#include "products.h"

SAME_IN_PYTHON_Measure

float confidence_of_logits(const Measure* measure, const Facts* facts) {
  if (measure->kind == kGap) return -expm1f(facts->second - facts->largest) / facts->total;
  if (measure->kind == kLargest) return 1 / facts->total;
  /* Rounding may exceed either end by a few units in the last place. */
  const float entropy = logf(facts->total) - facts->weighted / facts->total;
  const float confidence = 1 - entropy / measure->log_tokens;
  return confidence < 0 ? 0 : confidence > 1 ? 1 : confidence;
}

/* Computes confidences of rows from the facts of their logits, [facts, count], as `calm_beam_summarise` returns them;
   called by Python. */
void calm_beam_measure_facts(const Measure* measure, const float* facts, int64_t count, float* confidences) {
  for (int64_t row = 0; row < count; ++row) {
    const Facts of_row = {facts[row], facts[count + row], facts[2 * count + row], facts[3 * count + row], 0};
    confidences[row] = confidence_of_logits(measure, &of_row);
  }
}

/* The classifier's probability of "exit": of two scores, the softmax is the logistic function of their difference. */
static float probability_of_exit(const Measure* measure, const float* state, int64_t width) {
  float score = 0;
  for (int64_t at = 0; at < measure->scores; ++at)
    score = product(state, measure->kernel + at * width, width) + measure->bias[at] - score;
  return 1 / (1 + expf(-score));
}

float confidence_of_states(const Measure* measure, int64_t layer, const float* output, const float* input,
                           int64_t width) {
  if (measure->kind == kDepth) return measure->by_layer[layer - 1];
  if (measure->kind == kClassifier) return probability_of_exit(measure, output, width);
  /* Layer 1 has no layer below to compare with. */
  if (layer == 1) return 0;
  return product(output, input, width) /
         (sqrtf(product(output, output, width)) * sqrtf(product(input, input, width)));
}

/* Rows at some layers, one after the other, whose states are [layers + 1, entries, width]. */
typedef struct {
  int64_t first_layer, num_layers, count, entries, width; /* The first layer is counted from 1. */
  const float* states;
  const int32_t *below, *lanes; /* [count]: entries of the first layer's inputs, and of all outputs. */
  float* confidences;           /* [layers, count] */
} Measured;

SAME_IN_PYTHON_Measured

/* Computes confidences of rows by a measure of states; called by Python. */
void calm_beam_measure(const Measure* measure, const Measured* rows) {
  const int64_t of_layer = rows->entries * rows->width;
  for (int64_t index = 0; index < rows->num_layers; ++index) {
    const int64_t layer = rows->first_layer + index;
    const float* outputs = rows->states + layer * of_layer;
    const int32_t* below = index ? rows->lanes : rows->below;
    for (int64_t row = 0; row < rows->count; ++row)
      rows->confidences[index * rows->count + row] =
          confidence_of_states(measure, layer, outputs + rows->lanes[row] * rows->width,
                               outputs - of_layer + below[row] * rows->width, rows->width);
  }
}
