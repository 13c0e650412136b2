/* What packed queries have of keys and values, of their paths or of their sources, as one call: see
   model/native_attention.py.

   XLA copies keys and values together first, number by number, which takes several times as long as all that is done
   with them. Here they are read where they stand.

   A query's numbers are the same whatever the other rows of a call and the threads are. */

#include <stdint.h>

#include "attention.h"
#include "memory.h"
#include "tasks.h"

enum { kRowsOfTask = 8 };

/* Shapes in brackets; a position is a node of a store or of a source. */
typedef struct {
  Keys keys;
  int64_t rows, most;
  int64_t position_stride, place_stride; /* Numbers from one to the next. */
  const float* queries;       /* [rows, heads, size] */
  /* Of paths. */
  const int32_t* paths;       /* [rows, most]: nodes by step; NULL for sources */
  const int32_t* steps;       /* [rows]: of the query */
  int64_t nodes, first, window;
  /* Of sources. */
  const int32_t* of_row;      /* [rows]: the place of each row's source */
  const uint8_t* mask;        /* [places, most] */
  const int32_t* seen_from;   /* [rows]: the first position that is seen */
  int64_t places;
  float* mixed;               /* [rows, heads, size] */
  float *largest, *totals;    /* [rows, heads] */
} Attention;

static void look_along_path(const Attention* a, int64_t row, Seen* seen) {
  const int64_t step = a->steps[row];
  int64_t from = step + 1 - a->window;
  if (from < a->first) from = a->first;
  for (int64_t at = from; at <= step && at < a->most; ++at) {
    int64_t node = a->paths[row * a->most + at];
    if (node >= a->nodes) node = a->nodes - 1;
    seen->offsets[seen->count] = node * a->position_stride;
    seen->ages[seen->count++] = (int32_t)(step - at);
  }
}

static void look_at_source(const Attention* a, int64_t row, Seen* seen) {
  const int64_t place = a->of_row[row];
  /* Rows of padding have none. */
  if (place >= a->places) return;
  for (int64_t at = a->seen_from[row]; at < a->most; ++at)
    if (a->mask[place * a->most + at]) seen->offsets[seen->count++] = place * a->place_stride + at * a->position_stride;
}

static int attend_rows(const void* call, int64_t task) {
  const Attention* a = call;
  int has_memory = 1;
  Seen seen = seen_of(a->most, &has_memory);
  for (int64_t row = task * kRowsOfTask; has_memory && row < (task + 1) * kRowsOfTask && row < a->rows; ++row) {
    seen.count = 0;
    if (a->paths)
      look_along_path(a, row, &seen);
    else
      look_at_source(a, row, &seen);
    const int64_t at = row * a->keys.heads;
    attend_row(&a->keys, &seen, a->queries + at * a->keys.size, a->mixed + at * a->keys.size, a->largest + at,
               a->totals + at);
  }
  forget(&seen);
  return has_memory;
}

static XLA_FFI_Error* attend(const XLA_FFI_CallFrame* frame, Attention* a) {
  XLA_FFI_Buffer** asked = (XLA_FFI_Buffer**)frame->args.args;
  XLA_FFI_Buffer** given = (XLA_FFI_Buffer**)frame->rets.rets;
  a->rows = asked[0]->dims[0], a->keys.heads = asked[0]->dims[1], a->keys.size = asked[0]->dims[2];
  a->queries = asked[0]->data, a->keys.keys = asked[1]->data, a->keys.values = asked[2]->data;
  a->mixed = given[0]->data, a->largest = given[1]->data, a->totals = given[2]->data;
  return run_tasks(frame, a, attend_rows, (a->rows + kRowsOfTask - 1) / kRowsOfTask)
             ? NULL
             : no_memory(frame->api, "no memory for the logits of attention");
}

/* Queries, stores of keys and of values, [nodes, heads of keys * size], paths, steps, biases; the first step that is
   seen, and how many steps are. */
XLA_FFI_Error* calm_beam_attend_to_path(XLA_FFI_CallFrame* frame) {
  if (asks_for_version(frame)) return NULL;
  XLA_FFI_Buffer** asked = (XLA_FFI_Buffer**)frame->args.args;
  const int64_t size = asked[0]->dims[2];
  Attention attention = {
      .keys = {.key_heads = asked[1]->dims[1] / size,
               .head_stride = size,
               .biases = asked[5]->data,
               .bias_heads = asked[5]->dims[0],
               .ages = asked[5]->dims[1]},
      .most = asked[3]->dims[1],
      .position_stride = asked[1]->dims[1],
      .nodes = asked[1]->dims[0],
      .paths = asked[3]->data,
      .steps = asked[4]->data,
      .first = *(const int32_t*)asked[6]->data,
      .window = *(const int32_t*)asked[7]->data,
  };
  return attend(frame, &attention);
}

/* Queries, keys and values, [places, heads of keys, source, size], each row's place, mask; the first position that
   each row sees. */
XLA_FFI_Error* calm_beam_attend_to_source(XLA_FFI_CallFrame* frame) {
  if (asks_for_version(frame)) return NULL;
  XLA_FFI_Buffer** asked = (XLA_FFI_Buffer**)frame->args.args;
  const int64_t *dims = asked[1]->dims, size = dims[3];
  Attention attention = {
      .keys = {.key_heads = dims[1], .head_stride = dims[2] * size},
      .most = dims[2],
      .position_stride = size,
      .place_stride = dims[1] * dims[2] * size,
      .places = dims[0],
      .of_row = asked[3]->data,
      .mask = asked[4]->data,
      .seen_from = asked[5]->data,
  };
  return attend(frame, &attention);
}
