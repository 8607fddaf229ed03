/* SPDX-License-Identifier: Apache-2.0
 *
 * pingpong.c: what two processes can do at best on this machine: a word in shared memory, answered by another process.
 *
 *     pingpong spin|futex SECONDS CLIENT_CORE SERVER_CORE PRIORITY
 *
 * Measures for SECONDS and prints one line, nanoseconds: count p50 p90 p99 p99.9 max. A negative core or a priority of
 * 0 asks for nothing. `spin` polls the word on both sides (and needs two different cores); `futex` sleeps on it on both
 * sides. The server takes its core before the client starts: with SCHED_FIFO a client that polls on the server's core
 * would keep it from ever moving away. An alarm ends both whatever happens.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SAMPLES_MAX (4u << 20)
#define WARM 1000u

struct shared {
    _Alignas(64) uint32_t request;
    _Alignas(64) uint32_t reply;
    _Alignas(64) uint32_t ready;
};

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void take_rights(long core, long priority)
{
    if (core >= 0) {
        cpu_set_t cores;

        CPU_ZERO(&cores);
        CPU_SET((size_t)core, &cores);
        if (sched_setaffinity(0, sizeof(cores), &cores) < 0)
            fprintf(stderr, "core %ld: %s\n", core, strerror(errno));
    }
    if (priority > 0) {
        const struct sched_param param = {.sched_priority = (int)priority};

        if (sched_setscheduler(0, SCHED_FIFO, &param) < 0)
            fprintf(stderr, "SCHED_FIFO %ld: %s\n", priority, strerror(errno));
    }
}

static void await(uint32_t *word, uint32_t old, int block)
{
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == old) {
        if (block)
            syscall(SYS_futex, word, FUTEX_WAIT, old, NULL, NULL, 0);
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
    }
}

static void publish(uint32_t *word, uint32_t value, int block)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    if (block)
        syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    static uint64_t samples[SAMPLES_MAX];
    struct shared *shared;
    uint64_t end;
    size_t count = 0;
    uint32_t round;
    pid_t server;
    int block;

    if (argc != 6 || (strcmp(argv[1], "spin") && strcmp(argv[1], "futex"))) {
        fprintf(stderr, "usage: %s spin|futex SECONDS CLIENT_CORE SERVER_CORE PRIORITY\n", argv[0]);
        return 2;
    }
    block = !strcmp(argv[1], "futex");
    if (!block && atol(argv[3]) == atol(argv[4])) {
        fprintf(stderr, "spin needs two different cores\n");
        return 2;
    }
    alarm((unsigned)atof(argv[2]) + 10);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    server = fork();
    if (server < 0)
        return 1;
    if (!server) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm((unsigned)atof(argv[2]) + 10);
        take_rights(atol(argv[4]), atol(argv[5]) ? atol(argv[5]) + 10 : 0);
        publish(&shared->ready, 1, 1);
        for (round = 0;; round++) {
            await(&shared->request, round, block);
            publish(&shared->reply, round + 1, block);
        }
    }
    await(&shared->ready, 0, 1);
    take_rights(atol(argv[3]), atol(argv[5]));
    end = now_ns() + (uint64_t)(atof(argv[2]) * 1e9);
    for (round = 0; count < SAMPLES_MAX; round++) {
        const uint64_t begun = now_ns();
        uint64_t ended;

        publish(&shared->request, round + 1, block);
        await(&shared->reply, round, block);
        ended = now_ns();
        if (round >= WARM)
            samples[count++] = ended - begun;
        if (ended >= end)
            break;
    }
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    if (!count)
        return 1;
    qsort(samples, count, sizeof(samples[0]), compare);
    printf("%zu %llu %llu %llu %llu %llu\n", count, (unsigned long long)samples[count / 2],
           (unsigned long long)samples[count * 9 / 10], (unsigned long long)samples[count * 99 / 100],
           (unsigned long long)samples[count * 999 / 1000], (unsigned long long)samples[count - 1]);
    return 0;
}
