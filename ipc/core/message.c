/* SPDX-License-Identifier: Apache-2.0
 *
 * message.c: requests and answers on lanes.sock, the client's side. One request at a time; what the daemon says without
 * being asked (LANE_ENDED) and answers to requests that were given up are taken in on the way.
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "message.h"

int takt_node_fail(struct takt_node *node, int code, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(node->error, sizeof(node->error), format, arguments);
	va_end(arguments);
	return code;
}

static int wait_readable(int fd, short events, uint64_t until_ns)
{
	for (;;) {
		struct pollfd poll_fd = {.fd = fd, .events = events};
		const uint64_t now = takt_clock_ns();
		const uint64_t left = until_ns > now ? until_ns - now : 0;
		const struct timespec timeout = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
		const int ready = ppoll(&poll_fd, 1, &timeout, NULL);

		if (ready > 0)
			return 0;
		if (ready == 0)
			return -ETIMEDOUT;
		if (errno != EINTR)
			return -errno;
	}
}

static int gone(struct takt_node *node)
{
	close(node->fd);
	node->fd = -1;
	return takt_node_fail(node, -ENOTCONN, "the connection to taktd at %s has ended: connect again", node->path);
}

int takt_node_send(struct takt_node *node, uint16_t type, const void *body, size_t body_bytes, uint64_t until_ns)
{
	struct takt_message head = {TAKT_MESSAGE_MAGIC, type, 0, ++node->request_id, 0};
	struct iovec parts[2] = {{&head, sizeof(head)}, {(void *)(uintptr_t)body, body_bytes}};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};

	if (node->fd < 0)
		return takt_node_fail(node, -ENOTCONN, "not connected to taktd: connect again");
	while (sendmsg(node->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
		if (errno == EAGAIN) {
			if (wait_readable(node->fd, POLLOUT, until_ns) < 0)
				return takt_node_fail(node, -ETIMEDOUT, "taktd at %s does not read its requests",
						      node->path);
		} else if (errno != EINTR) {
			return gone(node);
		}
	}
	return 0;
}

static void take_descriptors(struct msghdr *message, struct takt_answer *answer)
{
	answer->fd_count = 0;
	for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR(message, part)) {
		if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
			continue;
		answer->fd_count = (int)((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(answer->fds, CMSG_DATA(part), (size_t)answer->fd_count * sizeof(int));
	}
}

void takt_answer_drop(struct takt_answer *answer)
{
	for (int i = 0; i < answer->fd_count; i++)
		close(answer->fds[i]);
	answer->fd_count = 0;
}

int takt_node_receive(struct takt_node *node, struct takt_answer *answer, uint32_t *request_id)
{
	union {
		char bytes[CMSG_SPACE(TAKT_ANSWER_FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct takt_message head;
	struct iovec parts[2] = {{&head, sizeof(head)}, {answer->body.text, TAKT_MESSAGE_MAX}};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = control.bytes};
	ssize_t got;

	message.msg_controllen = sizeof(control.bytes);
	got = recvmsg(node->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (got <= 0)
		return gone(node);
	take_descriptors(&message, answer);
	if ((size_t)got < sizeof(head) || head.magic != TAKT_MESSAGE_MAGIC || (message.msg_flags & MSG_TRUNC)) {
		takt_answer_drop(answer);
		return takt_node_fail(node, -EPROTO, "what listens at %s is not taktd, or one with a newer protocol",
				      node->path);
	}
	answer->type = head.type;
	answer->code = head.code;
	answer->body_bytes = (size_t)got - sizeof(head);
	answer->body.text[answer->body_bytes] = '\0';
	*request_id = head.request_id;
	return 1;
}

static void lane_ended(struct takt_node *node, const struct takt_answer *answer)
{
	struct takt_lane_id ended;

	if (answer->body_bytes < sizeof(ended))
		return;
	memcpy(&ended, answer->body.text, sizeof(ended));
	for (struct takt_lane *lane = node->lanes; lane; lane = lane->sibling)
		if (lane->lane_id == ended.lane_id) {
			takt_lane_end(lane, 0, answer->body.text + sizeof(ended));
			lane->lane_id = 0; /* it is given back already, and the number may be another lane's next */
		}
}

/* An answer to a request that was given up: what it brought is given back. */
static void stale(struct takt_node *node, struct takt_answer *answer)
{
	struct takt_attached attached;

	takt_answer_drop(answer);
	if (answer->type != TAKT_MSG_ATTACHED || answer->body_bytes < sizeof(attached))
		return;
	memcpy(&attached, answer->body.text, sizeof(attached));
	takt_node_send(node, TAKT_MSG_DETACH, &attached.lane_id, sizeof(attached.lane_id), 0);
}

void takt_node_unasked(struct takt_node *node, struct takt_answer *answer)
{
	if (answer->type == TAKT_MSG_LANE_ENDED)
		lane_ended(node, answer);
	else if (answer->type == TAKT_MSG_WELCOME)
		takt_node_welcomed(node, answer);
	else
		stale(node, answer);
	takt_answer_drop(answer);
}

/* The answer to the request sent last. ERROR answers become its code, with the daemon's text. */
static int receive_answer(struct takt_node *node, uint16_t type, size_t least_bytes, struct takt_answer *answer,
			  uint64_t until_ns)
{
	const uint32_t expected = node->request_id;
	uint32_t request_id = 0;

	for (;;) {
		int got = takt_node_receive(node, answer, &request_id);

		if (got < 0)
			return got;
		if (got == 0) {
			if (wait_readable(node->fd, POLLIN, until_ns) < 0)
				return takt_node_fail(node, -ETIMEDOUT, "taktd at %s does not answer", node->path);
			continue;
		}
		if (answer->type != TAKT_MSG_LANE_ENDED && request_id == expected)
			break;
		takt_node_unasked(node, answer);
	}
	if (answer->type == TAKT_MSG_ERROR) {
		takt_answer_drop(answer);
		return takt_node_fail(node, answer->code < 0 ? answer->code : -EPROTO, "%s", answer->body.text);
	}
	if (answer->type != type || answer->body_bytes < least_bytes) {
		takt_answer_drop(answer);
		return takt_node_fail(node, -EPROTO,
				      "taktd at %s answered with message %u of %zu bytes where %u was expected",
				      node->path, answer->type, answer->body_bytes, type);
	}
	return 0;
}

void takt_node_drain(struct takt_node *node)
{
	struct takt_answer *answer;
	uint32_t request_id;

	/* Another thread in the middle of a request will take it in itself. */
	if (pthread_mutex_trylock(&node->lock) != 0)
		return;
	answer = node->fd >= 0 ? malloc(sizeof(*answer)) : NULL;
	while (answer && node->fd >= 0 && takt_node_receive(node, answer, &request_id) > 0)
		takt_node_unasked(node, answer);
	free(answer);
	pthread_mutex_unlock(&node->lock);
}

int takt_node_request(struct takt_node *node, uint16_t type, const void *body, size_t body_bytes, uint16_t answer_type,
		      size_t least_bytes, struct takt_answer *answer)
{
	const uint64_t until_ns = takt_clock_ns() + TAKT_CONTROL_TIMEOUT_NS;
	const int result = takt_node_send(node, type, body, body_bytes, until_ns);

	return result < 0 ? result : receive_answer(node, answer_type, least_bytes, answer, until_ns);
}
