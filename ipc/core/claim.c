/* SPDX-License-Identifier: Apache-2.0
 *
 * claim.c: a client's connection when its daemon was killed and started again. Lanes go on meanwhile, so infer() notices
 * nothing; the new daemon must learn whose they are, to free them when their client goes.
 *
 * There is no thread for it: a client's real-time process gets none from us. After a job (never between submitting and
 * waiting) and at most every TEND_EVERY_NS the connection is looked at with one system call; if it has ended, each look
 * takes one step that can't wait: connect and greet, or hear the greeting and claim the lanes. The answers to the claims
 * are of no use: a lane that can't be claimed ends by itself.
 */
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client.h"
#include "message.h"

#define TEND_EVERY_NS  250000000u
#define PAUSE_FIRST_NS 50000000u
#define PAUSE_MAX_NS   2000000000u
#define HEAR_NS	       20000000u /* from a greeting until its answer is looked for */

static int greet(struct takt_node *node)
{
	struct takt_hello hello = {TAKT_WIRE_VERSION, TAKT_WIRE_VERSION, {0}};

	strncpy(hello.client, program_invocation_short_name, sizeof(hello.client) - 1);
	return takt_node_send(node, TAKT_MSG_HELLO, &hello, sizeof(hello), 0);
}

int takt_node_reconnect(struct takt_node *node)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd;

	if (node->fd >= 0 || node->owner != getpid())
		return 0;
	memcpy(address.sun_path, node->path, sizeof(address.sun_path));
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0) {
		const int result = -errno;

		close(fd);
		return result;
	}
	node->fd = fd;
	return greet(node);
}

void takt_node_welcomed(struct takt_node *node, const struct takt_answer *answer)
{
	struct takt_welcome welcome;

	if (answer->body_bytes < sizeof(welcome))
		return;
	memcpy(&welcome, answer->body.text, sizeof(welcome));
	node->daemon_pid = welcome.pid;
	for (struct takt_lane *lane = node->lanes; lane; lane = lane->sibling) {
		const struct takt_claim claim = {lane->lane_id, lane->token};

		if (!lane->ended && lane->token)
			takt_node_send(node, TAKT_MSG_CLAIM, &claim, sizeof(claim), 0);
		else
			lane->lane_id = 0; /* of a daemon that is no more; this one may give the number to another lane */
	}
}

/* Returns when to look again. */
static uint64_t look(struct takt_node *node)
{
	struct takt_answer answer;
	uint32_t request_id;

	if (node->fd < 0) {
		if (takt_node_reconnect(node) == 0)
			return HEAR_NS;
		node->tend_pause_ns = node->tend_pause_ns * 2 < PAUSE_MAX_NS ? node->tend_pause_ns * 2 : PAUSE_MAX_NS;
		return node->tend_pause_ns;
	}
	while (node->fd >= 0 && takt_node_receive(node, &answer, &request_id) > 0)
		takt_node_unasked(node, &answer);
	node->tend_pause_ns = PAUSE_FIRST_NS;
	return node->fd < 0 ? PAUSE_FIRST_NS : TEND_EVERY_NS;
}

void takt_node_tend(struct takt_node *node, uint64_t now_ns)
{
	if (now_ns < takt_load_u64(&node->tend_due_ns) || pthread_mutex_trylock(&node->lock) != 0)
		return;
	takt_store_u64(&node->tend_due_ns, now_ns + (node->owner == getpid() ? look(node) : PAUSE_MAX_NS));
	pthread_mutex_unlock(&node->lock);
}
