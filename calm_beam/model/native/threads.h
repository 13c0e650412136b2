/* A thread pool for calls that do not come from XLA. */

#ifndef CALM_BEAM_THREADS_H_
#define CALM_BEAM_THREADS_H_

#include <stdint.h>

/* Runs a task of a phase of a call. */
typedef void (*RunInPhase)(const void* call, int phase, int64_t task);

/* Runs the tasks of each phase, on this thread and on idle ones, on at most `threads`. All tasks of later phases see
   the results of a phase. */
void run_phases(int64_t threads, const void* call, RunInPhase run, const int64_t* tasks, int phases);

/* Returns how many of `threads` threads are worth waking for a number of multiplications and additions. */
static inline int64_t busy_threads(int64_t threads, int64_t multiply_adds) {
  const int64_t busy = 1 + multiply_adds / (1 << 20);
  return busy < threads ? busy : threads;
}

#endif
