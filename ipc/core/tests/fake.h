/* SPDX-License-Identifier: Apache-2.0
 *
 * fake.h: a daemon in a thread of the test, and the little that the C tests need to say what failed.
 */
#ifndef TAKT_TESTS_FAKE_H
#define TAKT_TESTS_FAKE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lib.h"

#define MS 1000000u

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)
#define CHECK_TEXT(text, part)                                                                                         \
	do {                                                                                                           \
		if (!strstr(text, part)) {                                                                             \
			fprintf(stderr, "%s:%d: \"%s\" lacks \"%s\"\n", __FILE__, __LINE__, text, part);               \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

/* What the fake does with a job. */
enum fake_mode {
	FAKE_ECHO, /* answers with the inputs, at once */
	FAKE_HOLD, /* answers nothing until the mode changes, but cancels */
	FAKE_END   /* ends the lane */
};

struct fake {
	char path[108];
	uint32_t mode;					/* enum fake_mode; atomic */
	uint32_t booting;				/* so many ATTACH are answered with EAGAIN; atomic */
	uint32_t dynamic;				/* the lane is a model's with dynamic shapes */
	uint32_t slot_count;				/* of the next lane */
	int32_t welcome;				/* version to answer with; 0: the right one */
	void (*spoil)(struct fake *fake, uint8_t *map); /* makes the memory of the next lane wrong */
	uint64_t spoil_at;				/* for spoil */
	uint8_t spoil_with;				/* for spoil */
	uint32_t detached;				/* DETACH messages seen; atomic */
	/* private */
	pthread_t thread;
	int listener, connection, stop_pipe[2], wake_fd;
	uint8_t *map;
	uint64_t size;
	struct takt_layout layout;
	struct takt_rings rings;
	struct takt_submission held[TAKT_SLOTS_MAX];
	uint32_t held_count;
	uint32_t lane_kind;
};

/* Starts listening on a path of its own below $TMPDIR; the fields set before are kept. */
void fake_start(struct fake *fake);
/* Ends the thread, hangs up, removes the socket. */
void fake_stop(struct fake *fake);
void fake_set_mode(struct fake *fake, enum fake_mode mode);
/* A node connected to it, and its lane. */
takt_node *fake_connect(struct fake *fake);
takt_lane *fake_attach(takt_node *node, uint32_t wait_mode);
/* Writes x = {value, ...}, reads y. */
void fill(takt_lane *lane, float value);
float answer(takt_lane *lane);

#endif
