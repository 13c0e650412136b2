/* Decoder layers: their structures, which are those of native/structures.py, and a function that runs one. */

#ifndef CALM_BEAM_LAYERS_H_
#define CALM_BEAM_LAYERS_H_

#include <stdatomic.h>
#include <stdint.h>

#include "products.h"

enum { kRowsOfBlock = 48 }; /* Most rows that one thread multiplies together. */

/* Missing weights are NULL; without a cross query, a layer attends to path and source at once. */
typedef struct {
  Matrix query, key, value, out, cross_query, cross_out, gate, wide, narrow;
  const float *norm, *cross_norm, *mlp_norm;          /* Scales. */
  const float *query_norm, *key_norm;                 /* Of every head. */
  const float *query_bias, *key_bias, *value_bias;
  const float* biases;                                /* [bias heads, ages]: added to logits */
  int64_t bias_heads, ages, heads, key_heads, size, width, activation;
  int64_t first, window;                              /* The first step that is seen, and how many positions are. */
  float epsilon, query_scale;
} Layer;

/* The sources of one padded width, at one layer. */
typedef struct {
  const float *keys, *values; /* [places, most, heads of keys * size] */
  const uint8_t* mask;        /* [places, most] */
  int64_t most;
} Sources;

/* What a row is: the newest token of an output, or a token of a prompt, which attends to the prompt's tokens up to its
   own, or to all of them. */
enum { kOfOutput, kOfPrompt, kOfEncoder };

/* The arrays that a layer reads and writes. A prompt has `prompt_lanes` adjacent entries: its branches, or its
   positions. */
typedef struct {
  const float* inputs;        /* [entries, width] */
  float* outputs;             /* [entries, width]; those of prompts may be the inputs */
  float *keys, *values;       /* [nodes, heads of keys * size] */
  const int32_t* paths;       /* [entries, most steps]; of prompts [prompts, prompt_lanes], -1 where no token is */
  int64_t most_steps, prompt_lanes, rows_are;
  const Sources* sources;
  const float* turns;         /* [prompts, size], or by position: cosines, then sines; NULL if nothing is turned */
  const int32_t *steps, *positions, *source_of, *places; /* [prompts] */
} Entries;

/* Rows that run layers: the entries of their inputs and outputs, and the nodes of their keys and values. */
typedef struct {
  const int32_t *below, *lanes, *nodes; /* [count] */
  int64_t count, threads;
} Rows;

/* States that skipped layers, and their nodes in each layer. */
typedef struct {
  int64_t num_layers, count, capacity, threads;
  const float* states;  /* [states, width] */
  const int64_t* which; /* [count] */
  const int32_t* nodes; /* [layers, count]: `capacity` where the layer was not skipped */
  const int32_t* lanes; /* [count]: an entry of the prompt of each */
} Skipped;

/* Returns how many weights a layer has. */
int64_t weights_of(const Layer* layer);

/* Returns how many numbers a layer needs memory for per row. */
int64_t numbers_of(const Layer* layer);

/* Returns how many rows a thread takes at a time, so that `threads` threads have equally many. */
int64_t block_of(int64_t count, int64_t threads);

/* Runs a layer for rows on this thread, with memory for their numbers. */
void take_through(const Layer* layer, const Entries* entries, const Rows* rows, float* memory,
                  atomic_int* lacks_memory);

/* Computes keys and values of skipped layers from states; called by Python too. */
void calm_beam_keep_skipped(const Layer* const* layers, const Entries* entries, const Skipped* skipped);

#endif
