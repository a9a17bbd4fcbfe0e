// The pool of threads: one program on all of them, which meets at barriers.
#ifndef SPECDEC_PARALLEL_H
#define SPECDEC_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

// A thread's place in a program that runs on `count` threads.
typedef struct {
    int32_t index, count;
} sd_thread;

// Runs program(argument, thread) on `threads` threads, the caller the first; returns when all have returned. Another
// caller's program that runs meanwhile leaves this one a single thread: no bit depends on their number.
void sd_run(void (*program)(void *argument, sd_thread thread), void *argument, int32_t threads);
// All threads of the program wait here for the last one.
void sd_meet(sd_thread thread);
// The part [*first, *end) of `count` pieces of work that is a thread's own: contiguous, sizes differ by at most one.
static inline void sd_part(int64_t count, sd_thread thread, int64_t *first, int64_t *end) {
    *first = count * thread.index / thread.count;
    *end = count * (thread.index + 1) / thread.count;
}
// At least `bytes` of memory at a multiple of 64, kept from call to call: `shared` of all threads of a program (asked
// for by the caller before sd_run), `own` of one thread. NULL if there is none. Contents are undefined.
void *sd_shared_scratch(size_t bytes);
void *sd_own_scratch(size_t bytes);

#endif
