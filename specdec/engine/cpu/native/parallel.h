// The pool of threads: it runs a caller's jobs one after the other, each cut into parts that free threads take.
#ifndef SPECDEC_PARALLEL_H
#define SPECDEC_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

// The place of a part in its job: one of `count` that share the work. Whichever thread is free takes the next part, so
// one that the system has put aside holds the others up by the part that it has taken, and by nothing else.
typedef struct {
    int32_t index, count;
} sd_thread;

typedef void (*sd_job)(void *argument, sd_thread part);

// The caller's hold of the pool, from sd_gather to sd_release, on one thread. `threads` is 1 without the pool: another
// caller has it. No bit depends on their number.
typedef struct {
    int32_t threads;
    uint64_t rounding;  // the caller's mode, set again at the end
} sd_team;

sd_team sd_gather(int32_t threads);
// Runs a job in `parts` parts, or in a single one where there is one thread; the caller takes parts too. Returns when
// all have ended.
void sd_share(const sd_team *team, sd_job job, void *argument, int64_t parts);
void sd_release(const sd_team *team);
// One job, in as many parts as threads.
void sd_run(sd_job job, void *argument, int32_t threads);

// What is a part's own of `count` pieces of work, [*first, *end): contiguous, sizes differ by at most one.
static inline void sd_part(int64_t count, sd_thread part, int64_t *first, int64_t *end) {
    *first = count * part.index / part.count;
    *end = count * (part.index + 1) / part.count;
}
// At least `bytes` of memory at a multiple of 64, kept from call to call: `shared` of all parts of the caller's jobs
// (asked for by the caller), `own` of one thread. NULL if there is none. Contents are undefined.
void *sd_shared_scratch(size_t bytes);
void *sd_own_scratch(size_t bytes);

#endif
