// The pool of threads. A waiting thread spins for some microseconds, then sleeps: other processes need the cores.
//
// The caller publishes a job and takes parts of it like the workers; it waits for the parts that others have taken, not
// for the workers themselves. A worker takes a part by a word that holds the job's number too, so one that comes late
// finds nothing to take, whatever job runs by then.
#define _GNU_SOURCE
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { THREADS_MAX = 64, SPIN_NANOSECONDS = 40000, PAUSES_A_LOOK = 8, ALIGNMENT = 64 };

// Where one thread sleeps.
typedef struct {
    _Alignas(ALIGNMENT) atomic_int is_asleep;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} bed;

#define NEW_BED {0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}

// One caller at a time has it, who holds `is_busy`. What is read often lies apart from what is written often.
static struct {
    atomic_int is_busy;
    int32_t started;   // workers that exist: indices 1 .. started
    atomic_int cores;  // that this process may use
    // The job. A worker reads it before it takes a part, which it cannot if the job is another by then.
    _Alignas(ALIGNMENT) atomic_uint number;
    atomic_int threads, parts;
    _Atomic(sd_job) job;
    _Atomic(void *) argument;
    _Alignas(ALIGNMENT) _Atomic uint64_t open;  // the job's number << 32 | parts that nobody has taken
    _Alignas(ALIGNMENT) atomic_uint left;       // parts that have not ended
    bed caller, worker[THREADS_MAX];
} pool;

static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static void set_bed(bed *b) {
    const bed fresh = NEW_BED;
    b->lock = fresh.lock;
    b->changed = fresh.changed;
    atomic_init(&b->is_asleep, 0);
}

// Also the child's state after a fork: its parent's workers do not exist there.
static void set_pool(void) {
    atomic_init(&pool.is_busy, 0);
    pool.started = 0;
    atomic_init(&pool.parts, 0);
    atomic_init(&pool.open, 0);
    atomic_init(&pool.left, 0);
    set_bed(&pool.caller);
    for (int32_t i = 0; i < THREADS_MAX; i++) set_bed(&pool.worker[i]);
}

// After a change of what the thread waits for.
static void wake(bed *b) {
    if (!atomic_load(&b->is_asleep)) return;
    pthread_mutex_lock(&b->lock);
    pthread_cond_signal(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static int64_t now_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Waits until the value differs from `seen`; `may_spin`: before it sleeps.
static void await_change(bed *b, atomic_uint *value, unsigned seen, int may_spin) {
    int64_t end = may_spin ? now_nanoseconds() + SPIN_NANOSECONDS : 0;
    do {
        for (int i = 0; i < PAUSES_A_LOOK; i++) {
            if (atomic_load_explicit(value, memory_order_acquire) != seen) return;
            pause_briefly();
        }
    } while (may_spin && now_nanoseconds() < end);
    pthread_mutex_lock(&b->lock);
    atomic_store(&b->is_asleep, 1);
    while (atomic_load(value) == seen) pthread_cond_wait(&b->changed, &b->lock);
    atomic_store(&b->is_asleep, 0);
    pthread_mutex_unlock(&b->lock);
}

// To round to nearest, with denormals; returns what was set before.
static uint64_t set_rounding(void) {
#if defined(__x86_64__)
    uint64_t before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return before;
#else
    return 0;
#endif
}

static void restore_rounding(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

// Whether waiting threads may spin: each has a core.
static int may_spin(void) { return atomic_load(&pool.threads) <= atomic_load(&pool.cores); }

// Takes parts of the job at hand until there are none, and runs them. A part that was taken, and does not yet count as
// ended, keeps the job at hand: what was read of it before is then its own.
static void take_parts(int32_t index) {
    uint64_t open = atomic_load_explicit(&pool.open, memory_order_acquire);
    const uint64_t number = open >> 32;
    const int32_t parts = atomic_load_explicit(&pool.parts, memory_order_relaxed);
    const sd_job job = atomic_load_explicit(&pool.job, memory_order_relaxed);
    void *argument = atomic_load_explicit(&pool.argument, memory_order_relaxed);
    if (index >= atomic_load_explicit(&pool.threads, memory_order_relaxed)) return;
    unsigned ended = 0;
    while (open >> 32 == number && (uint32_t)open > 0) {
        if (!atomic_compare_exchange_weak(&pool.open, &open, open - 1)) continue;
        job(argument, (sd_thread){parts - (int32_t)(uint32_t)open, parts});
        ended++;
        open = atomic_load_explicit(&pool.open, memory_order_relaxed);
    }
    if (ended > 0 && atomic_fetch_sub(&pool.left, ended) == ended) wake(&pool.caller);
}

static void *work(void *place) {
    bed *mine = place;
    set_rounding();
    for (;;) {
        unsigned seen = atomic_load(&pool.number);
        take_parts((int32_t)(mine - pool.worker));
        await_change(mine, &pool.number, seen, may_spin());
    }
    return NULL;
}

// Makes workers until there are `count` threads with the caller; returns how many there are, at most `count`.
static int32_t grow(int32_t count) {
    sigset_t all, before;
    sigfillset(&all);
    // Signals are for the process's own threads: one that a worker takes would not interrupt a wait of these.
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started + 1 < count) {
        pthread_t id;
        if (pthread_create(&id, NULL, work, &pool.worker[pool.started + 1]) != 0) break;
        pthread_detach(id);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    cpu_set_t usable;
    pool.cores = sched_getaffinity(0, sizeof usable, &usable) == 0 ? CPU_COUNT(&usable) : 1;
    return pool.started + 1 < count ? pool.started + 1 : count;
}

static void prepare(void) {
    set_pool();
    pthread_atfork(NULL, NULL, set_pool);
}

sd_team sd_gather(int32_t threads) {
    sd_team team = {threads < THREADS_MAX ? threads : THREADS_MAX, set_rounding()};
    pthread_once(&prepared, prepare);
    if (team.threads > 1 && atomic_exchange(&pool.is_busy, 1) != 0) team.threads = 1;
    if (team.threads > 1 && pool.started + 1 < team.threads) {
        team.threads = grow(team.threads);
        if (team.threads == 1) atomic_store(&pool.is_busy, 0);
    }
    return team;
}

void sd_release(const sd_team *team) {
    if (team->threads > 1) atomic_store(&pool.is_busy, 0);
    restore_rounding(team->rounding);
}

void sd_share(const sd_team *team, sd_job job, void *argument, int64_t parts) {
    if (team->threads <= 1 || parts <= 1) {
        job(argument, (sd_thread){0, 1});
        return;
    }
    const unsigned number = atomic_load_explicit(&pool.number, memory_order_relaxed) + 1;
    const int32_t count = (int32_t)(parts < INT32_MAX ? parts : INT32_MAX);
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    atomic_store_explicit(&pool.argument, argument, memory_order_relaxed);
    atomic_store_explicit(&pool.threads, team->threads, memory_order_relaxed);
    atomic_store_explicit(&pool.parts, count, memory_order_relaxed);
    atomic_store_explicit(&pool.left, (unsigned)count, memory_order_relaxed);
    atomic_store_explicit(&pool.open, (uint64_t)number << 32 | (uint32_t)count, memory_order_release);
    atomic_store(&pool.number, number);
    for (int32_t i = 1; i < team->threads && i < count; i++) wake(&pool.worker[i]);
    take_parts(0);
    for (unsigned left; (left = atomic_load_explicit(&pool.left, memory_order_acquire)) != 0;)
        await_change(&pool.caller, &pool.left, left, may_spin());
}

void sd_run(sd_job job, void *argument, int32_t threads) {
    const sd_team team = sd_gather(threads);
    sd_share(&team, job, argument, team.threads);
    sd_release(&team);
}

// Memory of one thread, freed at its end.
typedef struct {
    void *start;
    size_t bytes;
} scratch;

static _Thread_local scratch own, shared;
static pthread_once_t keyed = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int has_key;

static void free_scratch(void *unused) {
    (void)unused;
    free(own.start);
    free(shared.start);
    own = shared = (scratch){NULL, 0};
}

static void make_key(void) { has_key = pthread_key_create(&key, free_scratch) == 0; }

static void *enlarged(scratch *kept, size_t bytes) {
    if (kept->bytes >= bytes) return kept->start;
    pthread_once(&keyed, make_key);
    if (!has_key || pthread_setspecific(key, &own) != 0 || bytes > SIZE_MAX - ALIGNMENT) return NULL;
    free(kept->start);
    size_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    kept->start = aligned_alloc(ALIGNMENT, whole);
    kept->bytes = kept->start == NULL ? 0 : whole;
    return kept->start;
}

// `shared` belongs to the caller of sd_run: two callers never share one.
void *sd_shared_scratch(size_t bytes) { return enlarged(&shared, bytes); }
void *sd_own_scratch(size_t bytes) { return enlarged(&own, bytes); }
