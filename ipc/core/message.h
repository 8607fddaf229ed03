/* SPDX-License-Identifier: Apache-2.0
 *
 * message.h: the messages on lanes.sock, as docs/wire.md describes them. Private to the core.
 *
 * Every message is one SOCK_SEQPACKET datagram: this header, then a body by type. Text at the end of a body is UTF-8
 * without a NUL.
 */
#ifndef TAKT_MESSAGE_H
#define TAKT_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "client.h"

#define TAKT_MESSAGE_MAGIC 0x31544b54u /* "TKT1" */
#define TAKT_MESSAGE_MAX   8192u       /* bytes, header included */

enum takt_message_type {
	TAKT_MSG_HELLO = 1,
	TAKT_MSG_WELCOME = 2,
	TAKT_MSG_ATTACH = 3,
	TAKT_MSG_ATTACHED = 4,
	TAKT_MSG_DETACH = 5,
	TAKT_MSG_DETACHED = 6,
	TAKT_MSG_LIST = 7,
	TAKT_MSG_LISTING = 8,
	TAKT_MSG_ERROR = 9,
	TAKT_MSG_LANE_ENDED = 10,
	TAKT_MSG_CLAIM = 11,
	TAKT_MSG_CLAIMED = 12
};

struct takt_message {
	uint32_t magic;
	uint16_t type;
	uint16_t reserved;
	uint32_t request_id; /* of the request that is answered; 0 in LANE_ENDED */
	int32_t code;	     /* ERROR: negative errno; else 0 */
};
_Static_assert(sizeof(struct takt_message) == 16, "message header");
_Static_assert(offsetof(struct takt_message, type) == 4, "message header");
_Static_assert(offsetof(struct takt_message, request_id) == 8, "message header");
_Static_assert(offsetof(struct takt_message, code) == 12, "message header");

struct takt_hello {
	uint32_t min_version;
	uint32_t max_version;
	char client[64];
};
_Static_assert(sizeof(struct takt_hello) == 72, "hello");

struct takt_welcome {
	uint32_t version;
	uint32_t pid;
	char node[64];
};
_Static_assert(sizeof(struct takt_welcome) == 72, "welcome");

struct takt_attach_request {
	uint32_t kind;
	uint32_t wait_mode;
	char name[64];
};
_Static_assert(sizeof(struct takt_attach_request) == 72, "attach");

struct takt_attached {
	uint64_t lane_id;
	uint64_t total_size;
	uint64_t memfd_bytes;
	uint64_t token; /* secret: with it the lane can be claimed after the daemon was started again */
};
_Static_assert(sizeof(struct takt_attached) == 32, "attached");

/* Behind takt_attached, where the client library shall answer when the deadline passes without a completion. */
struct takt_local_answer {
	uint32_t path; /* TAKT_PATH_HOLD or TAKT_PATH_CONSTANT; then a takt_constant for each output follows */
	uint32_t reserved;
};
_Static_assert(sizeof(struct takt_local_answer) == 8, "local answer");

struct takt_constant { /* then the values, padded to 8 bytes */
	uint32_t bytes; /* of one element, for all of them, or of the whole tensor */
	uint32_t reserved;
};
_Static_assert(sizeof(struct takt_constant) == 8, "constant");

struct takt_claim {
	uint64_t lane_id;
	uint64_t token;
};
_Static_assert(sizeof(struct takt_claim) == 16, "claim");

struct takt_lane_id { /* DETACH, DETACHED, CLAIMED, and the start of LANE_ENDED */
	uint64_t lane_id;
};
_Static_assert(sizeof(struct takt_lane_id) == 8, "lane id");

struct takt_list_request {
	uint32_t kind;
	uint32_t offset;
};
_Static_assert(sizeof(struct takt_list_request) == 8, "list");

struct takt_listing {
	uint32_t total;
	uint32_t next_offset; /* 0: that was all */
};
_Static_assert(sizeof(struct takt_listing) == 8, "listing");

/* ---- message.c ---- */

/* Descriptors taken from one message: more than the two expected, so that none is leaked. */
#define TAKT_ANSWER_FDS_MAX 4

/* A message that has arrived; its text ends with a NUL. */
struct takt_answer {
	uint16_t type;
	int32_t code;
	size_t body_bytes;
	int fds[TAKT_ANSWER_FDS_MAX];
	int fd_count;
	union {
		char text[TAKT_MESSAGE_MAX + 1];
		uint64_t align;
	} body;
};

/* Sets node->error and returns code. */
int takt_node_fail(struct takt_node *node, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* One message, without waiting. 1: there is one, 0: none, or an error; the connection is closed when it has ended. */
int takt_node_receive(struct takt_node *node, struct takt_answer *answer, uint32_t *request_id);
/* What nobody waits for: the end of a lane, the greeting of a daemon that was started again, late answers. */
void takt_node_unasked(struct takt_node *node, struct takt_answer *answer);
/* claim.c: a daemon that was started again greets. */
void takt_node_welcomed(struct takt_node *node, const struct takt_answer *answer);
/* Sends without expecting an answer. */
int takt_node_send(struct takt_node *node, uint16_t type, const void *body, size_t body_bytes, uint64_t until_ns);
/* Sends and waits, at most TAKT_CONTROL_TIMEOUT_NS, for the answer of this type with at least `least_bytes` of body. An
 * ERROR answer becomes its code, with the daemon's text in node->error. */
int takt_node_request(struct takt_node *node, uint16_t type, const void *body, size_t body_bytes, uint16_t answer_type,
		      size_t least_bytes, struct takt_answer *answer);
/* Closes the descriptors that came with it. */
void takt_answer_drop(struct takt_answer *answer);

#endif
