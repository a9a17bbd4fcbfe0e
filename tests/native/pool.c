// The pool of threads alone: every part of a job runs once, and a thread that is held up holds up its own part only.
#include "parallel.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { JOBS = 20000, PARTS_MAX = 64, HELD_JOBS = 200 };

static atomic_int runs[PARTS_MAX], others;
static int plain[PARTS_MAX];  // not atomic: a part's own until the caller reads it

static void count_part(void *argument, sd_thread part) {
    if (part.count != *(int *)argument) atomic_fetch_add(&runs[0], 1000);
    atomic_fetch_add(&runs[part.index], 1);
    plain[part.index]++;
}

// Returns how many parts ran another number of times than once.
static int count_wrong(const sd_team *team, int parts) {
    int wrong = 0;
    for (int i = 0; i < PARTS_MAX; i++) atomic_store(&runs[i], 0);
    memset(plain, 0, sizeof plain);
    sd_share(team, count_part, &parts, parts);
    for (int i = 0; i < parts; i++) wrong += atomic_load(&runs[i]) != 1 || plain[i] != 1;
    return wrong;
}

// The first part ends when all others have: whoever takes it, they must be taken by the other thread.
static void hold_first(void *argument, sd_thread part) {
    (void)argument;
    if (part.index > 0) atomic_fetch_add(&others, 1);
    else while (atomic_load(&others) < part.count - 1) {}
}

int main(void) {
    int wrong = 0;
    for (int32_t threads = 2; threads <= 4; threads++) {
        const sd_team team = sd_gather(threads);
        if (team.threads != threads) wrong++;
        for (int i = 0; i < JOBS; i++) wrong += count_wrong(&team, 2 + i % (PARTS_MAX - 1));
        sd_release(&team);
    }
    const sd_team team = sd_gather(2);
    for (int i = 0; i < HELD_JOBS; i++) {
        atomic_store(&others, 0);
        sd_share(&team, hold_first, NULL, 8);
    }
    sd_release(&team);
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
