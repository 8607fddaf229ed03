/* SPDX-License-Identifier: Apache-2.0
 *
 * client.c: round trips through a lane from C, in a closed loop.
 *
 *     client NAME spin|block|hybrid SECONDS CORE PRIORITY
 *
 * Finds the daemon as every client does ($TAKTD_SOCKET, ...). Prints one line, nanoseconds: count p50 p90 p99 p99.9 max
 * and the number of jobs that were not answered in time. A negative core or a priority of 0 asks for nothing.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "takt.h"

#define SAMPLES_MAX (4u << 20)
#define WARM 200u
#define S_NS 1000000000ll

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static uint32_t mode_named(const char *name)
{
    return !strcmp(name, "spin") ? TAKT_WAIT_SPIN : !strcmp(name, "block") ? TAKT_WAIT_BLOCK : TAKT_WAIT_HYBRID;
}

static size_t measure(takt_lane *lane, uint64_t end_ns, uint64_t *samples, uint64_t *bad)
{
    size_t count = 0;
    uint64_t round;

    for (round = 0; count < SAMPLES_MAX; round++) {
        const uint64_t begun = takt_now();
        struct takt_reply reply;
        uint64_t ended;

        if (takt_infer(lane, 0, S_NS, &reply) < 0) {
            fprintf(stderr, "%s\n", takt_lane_error(lane));
            return 0;
        }
        ended = takt_now();
        if (round >= WARM) {
            if (reply.status == TAKT_OK)
                samples[count++] = ended - begun;
            *bad += reply.status != TAKT_OK || (reply.flags & TAKT_LATE);
        }
        if (ended >= end_ns)
            break;
    }
    return count;
}

int main(int argc, char **argv)
{
    static uint64_t samples[SAMPLES_MAX];
    takt_node *node;
    takt_lane *lane;
    uint64_t bad = 0;
    size_t n;
    int error;

    if (argc != 6) {
        fprintf(stderr, "usage: %s NAME spin|block|hybrid SECONDS CORE PRIORITY\n", argv[0]);
        return 2;
    }
    if (takt_connect(&node, NULL, 5 * S_NS) < 0 ||
        takt_attach(node, argv[1], TAKT_KIND_ANY, mode_named(argv[2]), 5 * S_NS, &lane) < 0) {
        fprintf(stderr, "%s\n", takt_error(node));
        takt_close(node);
        return 1;
    }
    error = takt_realtime(atoi(argv[5]), atoi(argv[4]));
    if (error)
        fprintf(stderr, "no real-time rights: %s\n", strerror(-error));
    n = measure(lane, takt_now() + (uint64_t)(atof(argv[3]) * 1e9), samples, &bad);
    takt_detach(lane);
    takt_close(node);
    if (!n)
        return 1;
    qsort(samples, n, sizeof(samples[0]), compare);
    printf("%zu %llu %llu %llu %llu %llu %llu\n", n, (unsigned long long)samples[n / 2],
           (unsigned long long)samples[n * 9 / 10], (unsigned long long)samples[n * 99 / 100],
           (unsigned long long)samples[n * 999 / 1000], (unsigned long long)samples[n - 1], (unsigned long long)bad);
    return 0;
}
