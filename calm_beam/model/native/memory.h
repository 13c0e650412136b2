/* Memory of a call. */

#ifndef CALM_BEAM_MEMORY_H_
#define CALM_BEAM_MEMORY_H_

#include <stdint.h>
#include <stdlib.h>

enum { kLine = 64 }; /* Bytes that memory gives at a time. */

/* Returns so many bytes, and takes note where there are none. */
static inline void* memory_of(int64_t bytes, int* has_memory) {
  void* memory = aligned_alloc(kLine, (bytes + kLine) / kLine * kLine);
  *has_memory &= memory != NULL;
  return memory;
}

#endif
