/* Heads, and the facts of their logits. */

#ifndef CALM_BEAM_HEADS_H_
#define CALM_BEAM_HEADS_H_

#include <stdint.h>

#include "products.h"

/* With the norm before it. */
typedef struct {
  Matrix weights;
  const float* norm;
  float epsilon, factor; /* The factor multiplies normed states. */
} Head;

/* The summary of a state's logits that decisions need, as in `Summary`. */
typedef struct {
  float largest, second, total, weighted; /* NaN where it is not known. */
  int32_t token;
} Facts;

/* Writes the facts of the logits of some states, [entries, width], to `facts`, on this thread, with memory for `count`
   times the width. */
void ask_head(const Head* head, const float* states, const int32_t* entries, int64_t count, float* memory,
              Facts* facts);

#endif
