/* Tasks of one call, on XLA's threads. */

#ifndef CALM_BEAM_TASKS_H_
#define CALM_BEAM_TASKS_H_

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

/* Runs a task of a call, and returns whether memory sufficed. */
typedef int (*RunTask)(const void* call, int64_t task);

/* Tasks that threads take one after the other until none is left. */
typedef struct {
  const void* call;
  RunTask run;
  int64_t tasks;
  atomic_llong next, done, users;
  atomic_int has_failed;
} Round;

static inline void leave(Round* round) {
  if (atomic_fetch_sub(&round->users, 1) == 1) free(round);
}

static inline void work(Round* round) {
  int64_t task;
  while ((task = atomic_fetch_add(&round->next, 1)) < round->tasks) {
    if (!round->run(round->call, task)) atomic_store(&round->has_failed, 1);
    atomic_fetch_add(&round->done, 1);
  }
}

/* The work of a thread of XLA. It may start after all tasks are done, and then does nothing. */
static void help(void* round) {
  work(round);
  leave(round);
}

static inline int failed(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

/* Runs all tasks, on this thread and on idle threads of XLA, and returns whether memory sufficed. */
static inline int run_tasks(const XLA_FFI_CallFrame* frame, const void* call, RunTask run, int64_t tasks) {
  const XLA_FFI_Api* api = frame->api;
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args asked = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                              &threads};
  if (tasks == 1 || failed(api, api->XLA_FFI_ThreadPool_NumThreads(&asked))) threads = 1;
  if (threads > tasks) threads = tasks;
  Round* round = malloc(sizeof *round);
  if (!round) return 0;
  *round = (Round){.call = call, .run = run, .tasks = tasks};
  atomic_init(&round->users, 1);
  for (int64_t thread = 1; thread < threads; ++thread) {
    atomic_fetch_add(&round->users, 1);
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                             round};
    if (failed(api, api->XLA_FFI_ThreadPool_Schedule(&args))) atomic_fetch_sub(&round->users, 1);
  }
  work(round);
  while (atomic_load(&round->done) < tasks) sched_yield();
  const int has_succeeded = !atomic_load(&round->has_failed);
  leave(round);
  return has_succeeded;
}

/* Returns whether a call is XLA's query for the API version, and answers it: not with the version of the headers, which
   an older XLA would refuse, but with the oldest that has everything used here, which newer ones accept. Built with the
   headers of jaxlib 0.8.1 (0.2) and of 0.10.2 (0.3), it is accepted by both and computes the same. */
static inline int asks_for_version(XLA_FFI_CallFrame* frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)frame->extension_start)->metadata;
  metadata->api_version.major_version = 0;
  metadata->api_version.minor_version = 2;
  return 1;
}

_Static_assert(XLA_FFI_API_MAJOR == 0, "what is said above is of versions 0.2 and 0.3");

static inline XLA_FFI_Error* no_memory(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                    XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return api->XLA_FFI_Error_Create(&args);
}

#endif
