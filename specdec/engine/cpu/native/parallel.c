// The pool of threads. A waiting thread spins for some microseconds, then sleeps: other processes need the cores.
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

// A count that threads wait to see changed.
typedef struct {
    atomic_uint value;
    atomic_int sleepers;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} gate;

#define NEW_GATE {0, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}

// One program runs at a time; `is_busy` is held by its caller.
static struct {
    atomic_int is_busy, arrived;
    int32_t started;  // workers that exist: indices 1 .. started
    atomic_int cores;  // that this process may use; read by a worker that still leaves the program before
    int32_t count;     // threads of the program that runs
    void (*program)(void *argument, sd_thread thread);
    void *argument;
    gate meeting;
    gate work[THREADS_MAX];  // of each worker: raised once for each program of which it is part
} pool;

static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static void set_gate(gate *g) {
    const gate fresh = NEW_GATE;
    g->lock = fresh.lock;
    g->changed = fresh.changed;
    atomic_init(&g->value, 0);
    atomic_init(&g->sleepers, 0);
}

// Also the child's state after a fork: its parent's workers do not exist there.
static void set_pool(void) {
    atomic_init(&pool.is_busy, 0);
    atomic_init(&pool.arrived, 0);
    pool.started = 0;
    set_gate(&pool.meeting);
    for (int32_t i = 0; i < THREADS_MAX; i++) set_gate(&pool.work[i]);
}

static void raise_gate(gate *g) {
    atomic_fetch_add(&g->value, 1);
    if (atomic_load(&g->sleepers) == 0) return;
    pthread_mutex_lock(&g->lock);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
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
static void await_gate(gate *g, unsigned seen, int may_spin) {
    int64_t end = may_spin ? now_nanoseconds() + SPIN_NANOSECONDS : 0;
    do {
        for (int i = 0; i < PAUSES_A_LOOK; i++) {
            if (atomic_load_explicit(&g->value, memory_order_acquire) != seen) return;
            pause_briefly();
        }
    } while (may_spin && now_nanoseconds() < end);
    pthread_mutex_lock(&g->lock);
    atomic_fetch_add(&g->sleepers, 1);
    while (atomic_load(&g->value) == seen) pthread_cond_wait(&g->changed, &g->lock);
    atomic_fetch_sub(&g->sleepers, 1);
    pthread_mutex_unlock(&g->lock);
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

void sd_meet(sd_thread thread) {
    if (thread.count == 1) return;
    unsigned seen = atomic_load(&pool.meeting.value);
    if (atomic_fetch_add(&pool.arrived, 1) + 1 == thread.count) {
        atomic_store(&pool.arrived, 0);
        raise_gate(&pool.meeting);
    } else {
        await_gate(&pool.meeting, seen, thread.count <= pool.cores);
    }
}

static void *work(void *place) {
    gate *mine = place;
    int32_t index = (int32_t)(mine - pool.work);
    for (unsigned seen = 0;; seen++) {
        await_gate(mine, seen, 1);
        set_rounding();
        sd_thread thread = {index, pool.count};
        pool.program(pool.argument, thread);
        sd_meet(thread);
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
        if (pthread_create(&id, NULL, work, &pool.work[pool.started + 1]) != 0) break;
        pthread_detach(id);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    cpu_set_t usable;
    pool.cores = sched_getaffinity(0, sizeof usable, &usable) == 0 ? CPU_COUNT(&usable) : 1;
    return pool.started + 1 < count ? pool.started + 1 : count;
}

static void run_on_pool(void (*program)(void *argument, sd_thread thread), void *argument, int32_t threads) {
    int32_t count = pool.started + 1 < threads ? grow(threads) : threads;
    pool.program = program;
    pool.argument = argument;
    pool.count = count;
    for (int32_t i = 1; i < count; i++) raise_gate(&pool.work[i]);
    sd_thread thread = {0, count};
    program(argument, thread);
    sd_meet(thread);
}

static void prepare(void) {
    set_pool();
    pthread_atfork(NULL, NULL, set_pool);
}

void sd_run(void (*program)(void *argument, sd_thread thread), void *argument, int32_t threads) {
    uint64_t before = set_rounding();
    int32_t wanted = threads < THREADS_MAX ? threads : THREADS_MAX;
    pthread_once(&prepared, prepare);
    if (wanted > 1 && atomic_exchange(&pool.is_busy, 1) == 0) {
        run_on_pool(program, argument, wanted);
        atomic_store(&pool.is_busy, 0);
    } else {
        program(argument, (sd_thread){0, 1});
    }
    restore_rounding(before);
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
