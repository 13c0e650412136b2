/* Confidence measures (`exits/measures`). */

#ifndef CALM_BEAM_MEASURES_H_
#define CALM_BEAM_MEASURES_H_

#include <stdint.h>

#include "heads.h"

/* The first three are measures of logits. */
enum { kGap = 1, kLargest, kEntropy, kSaturation, kClassifier, kDepth };

typedef struct {
  int64_t kind;
  float log_tokens;           /* The logarithm of the size of the vocabulary. */
  int64_t scores;             /* Of the classifier: one, or two of which the second says "exit". */
  const float *kernel, *bias; /* [scores, width], [scores] */
  const float* by_layer;      /* [layers]: confidences that depend on the layer alone. */
} Measure;

static inline int is_of_logits(const Measure* measure) { return measure->kind <= kEntropy; }

/* Returns the confidence by a measure of logits. */
float confidence_of_logits(const Measure* measure, const Facts* facts);

/* Returns the confidence by a measure of the output and the input of a layer, counted from 1, each of a width. */
float confidence_of_states(const Measure* measure, int64_t layer, const float* output, const float* input,
                           int64_t width);

#endif
