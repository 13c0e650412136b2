/* Heads: what native code is given of one, and what one makes of states. */

#ifndef CALM_BEAM_HEADS_H_
#define CALM_BEAM_HEADS_H_

#include <stdint.h>

#include "products.h"

/* With the norm before it. */
typedef struct {
  Matrix weights;
  const float* norm;
  float epsilon, factor; /* By which what is normed is multiplied. */
} Head;

/* What decisions are made of in the logits of a state, as of `Summary`. */
typedef struct {
  float largest, second, total, weighted; /* NaN where it is not known. */
  int32_t token;
} Facts;

/* Puts the facts of the logits of some states, [entries, width], into `facts`, on this thread, with memory for `count`
   times the width. */
void ask_head(const Head* head, const float* states, const int32_t* entries, int64_t count, float* memory,
              Facts* facts);

#endif
