/* Threads of our own, for calls that do not come from XLA. */

#ifndef CALM_BEAM_THREADS_H_
#define CALM_BEAM_THREADS_H_

#include <stdint.h>

/* Does a task of a phase of a call. */
typedef void (*RunInPhase)(const void* call, int phase, int64_t task);

/* Does so many tasks of each phase, on this thread and on others that have time, `threads` at the most. What a phase
   does, all tasks of the next ones see. */
void run_phases(int64_t threads, const void* call, RunInPhase run, const int64_t* tasks, int phases);

/* Returns how many of `threads` threads so many multiplications and additions keep busy for longer than it takes to
   wake one. */
static inline int64_t busy_threads(int64_t threads, int64_t multiply_adds) {
  const int64_t busy = 1 + multiply_adds / (1 << 20);
  return busy < threads ? busy : threads;
}

#endif
