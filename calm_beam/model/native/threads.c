#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

/* How often a thread polls for work, or for the end of other threads' work, before it sleeps or yields. */
enum { kLooks = 4000, kMostPhases = 16 };

/* Yields the core to another hardware thread for some cycles. */
static inline void pause_briefly(void) {
#if defined __x86_64__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}

typedef struct {
  const void* call;
  RunInPhase run;
  int phases;
  int64_t ends[kMostPhases]; /* Tasks of a phase and of those before it. */
  int64_t wanted; /* Threads that may still join. */
  atomic_llong next, done, users;
} Work;

/* Held by the call that uses the threads; other calls work alone meanwhile. */
static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER;
/* Protects everything below. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static Work* offered;
static atomic_llong turn;
static int64_t helpers, sleeping;

static void take_part(Work* work) {
  int phase = 0;
  int64_t task;
  while ((task = atomic_fetch_add(&work->next, 1)) < work->ends[work->phases - 1]) {
    while (task >= work->ends[phase]) ++phase;
    const int64_t before = phase ? work->ends[phase - 1] : 0;
    /* Tasks are taken in order, so that a task that others wait for is already running. */
    for (int64_t looks = 0; atomic_load(&work->done) < before; ++looks)
      if (looks < kLooks)
        pause_briefly();
      else
        sched_yield();
    work->run(work->call, phase, task - before);
    atomic_fetch_add(&work->done, 1);
  }
}

static void* help(void* nothing) {
  int64_t seen = 0;
  for (;;) {
    for (int look = 0; look < kLooks && atomic_load(&turn) == seen; ++look) pause_briefly();
    pthread_mutex_lock(&mutex);
    for (; atomic_load(&turn) == seen; --sleeping) {
      ++sleeping;
      pthread_cond_wait(&wake, &mutex);
    }
    seen = atomic_load(&turn);
    Work* work = offered && offered->wanted ? offered : NULL;
    if (work) {
      --work->wanted;
      atomic_fetch_add(&work->users, 1);
    }
    pthread_mutex_unlock(&mutex);
    if (work) {
      take_part(work);
      atomic_fetch_sub(&work->users, 1);
    }
  }
  return nothing;
}

/* A forked process has no other threads. */
static void forget_helpers(void) {
  in_use = mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  offered = NULL;
  helpers = sleeping = 0;
}

static void add_helpers(int64_t count) {
  static int is_told;
  if (!is_told) is_told = !pthread_atfork(NULL, NULL, forget_helpers);
  /* Signals go to the program's own threads. */
  sigset_t every, before;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, &before);
  pthread_t thread;
  while (is_told && helpers < count && !pthread_create(&thread, NULL, help, NULL)) {
    pthread_detach(thread);
    ++helpers;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void run_phases(int64_t threads, const void* call, RunInPhase run, const int64_t* tasks, int phases) {
  Work work = {.call = call, .run = run, .phases = phases};
  int64_t end = 0, most = 0;
  for (int phase = 0; phase < phases; ++phase) {
    work.ends[phase] = end += tasks[phase];
    if (tasks[phase] > most) most = tasks[phase];
  }
  if (!end) return;
  work.wanted = (threads < most ? threads : most) - 1;
  const int is_shared = work.wanted > 0 && !pthread_mutex_trylock(&in_use);
  if (is_shared) {
    pthread_mutex_lock(&mutex);
    if (helpers < work.wanted) add_helpers(work.wanted);
    offered = &work;
    atomic_fetch_add(&turn, 1);
    for (int64_t each = 0; each < work.wanted && each < sleeping; ++each) pthread_cond_signal(&wake);
    pthread_mutex_unlock(&mutex);
  }
  take_part(&work);
  for (int64_t looks = 0; atomic_load(&work.done) < end; ++looks)
    if (looks < kLooks)
      pause_briefly();
    else
      sched_yield();
  if (!is_shared) return;
  pthread_mutex_lock(&mutex);
  offered = NULL;
  pthread_mutex_unlock(&mutex);
  while (atomic_load(&work.users)) pause_briefly();
  pthread_mutex_unlock(&in_use);
}
