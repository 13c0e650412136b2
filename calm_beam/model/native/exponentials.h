/* Exponentials of vectors of numbers, exact to a unit in the last place or two. */

#ifndef CALM_BEAM_EXPONENTIALS_H_
#define CALM_BEAM_EXPONENTIALS_H_

#include <stdint.h>

#include "vectors.h"

/* The logarithm of e to base two, and the rounding error of this number. */
static const float kLog2 = 1.44269504f, kMoreOfLog2 = 1.92596303e-8f;

/* Returns 2^x for x up to 0; 0 far below, and NaN for NaN. */
static inline Floats power_of_two(Floats x) {
  const Integers is_low = x < -126;
  x = either(is_low, all(-126), x);
  const Floats count = rounded(x);
  const Floats r = x - count;
  Floats p = fused(r, all(1.54035304e-4f), all(1.33335581e-3f));
  p = fused(p, r, all(9.61812911e-3f));
  p = fused(p, r, all(5.55041087e-2f));
  p = fused(p, r, all(2.40226507e-1f));
  p = fused(p, r, all(6.93147181e-1f));
  p = fused(p, r, all(1));
  return taken(~is_low, scaled(p, count));
}

/* Returns e^x for x up to 0, as above. */
static inline Floats exponential(Floats x) { return power_of_two(fused(x, all(kLog2), x * kMoreOfLog2)); }

/* Returns 1 / (1 + e^-x). */
static inline Floats logistic(Floats x) {
  const Integers is_negative = x < 0;
  const Floats small = exponential(-magnitude(x));
  const Floats above = 1.f / (1.f + small);
  return either(is_negative, small * above, above);
}

#endif
