/* Memory of a call. */

#ifndef CALM_BEAM_MEMORY_H_
#define CALM_BEAM_MEMORY_H_

#include <stdint.h>
#include <stdlib.h>

enum { kLine = 64 }; /* Bytes of a cache line. */

/* Returns memory of a size in bytes, and records a failure. */
static inline void* memory_of(int64_t bytes, int* has_memory) {
  void* memory = aligned_alloc(kLine, (bytes + kLine) / kLine * kLine);
  *has_memory &= memory != NULL;
  return memory;
}

#endif
