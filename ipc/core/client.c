/* SPDX-License-Identifier: Apache-2.0
 *
 * client.c: the client's connection to lanes.sock: finding the daemon, listing, attaching, detaching.
 * What happens on an attached lane is lane.c's and wait.c's; nothing here is on the real-time path.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client.h"
#include "message.h"

#define RETRY_FIRST_NS 5000000u /* pause before asking a booting daemon again; doubles up to RETRY_MAX_NS */
#define RETRY_MAX_NS   100000000u

static void append(char *text, size_t size, const char *format, ...)
{
	const size_t used = strlen(text);
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(text + used, size - used, format, arguments);
	va_end(arguments);
}

/* ---- connecting ---------------------------------------------------------------------------------------------- */

static int try_path(struct takt_node *node, const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd, result = 0;

	if (strlen(path) >= sizeof(address.sun_path))
		return -ENAMETOOLONG;
	snprintf(node->path, sizeof(node->path), "%s", path);
	memcpy(address.sun_path, path, strlen(path));
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	/* On a unix socket this waits only while the daemon's queue of connections is full; the kernel's bound for
	 * that. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){.tv_sec = 1}, sizeof(struct timeval));
	if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
		result = -errno;
	if (result < 0)
		close(fd);
	else
		node->fd = fd;
	return result;
}

/* One candidate; keeps what is to be said if it fails. */
static int candidate(struct takt_node *node, const char *path, char *looked, size_t size)
{
	const int result = try_path(node, path);

	if (result < 0)
		append(looked, size, "%s%s (%s)", looked[0] ? ", " : "", path, strerror(-result));
	return result;
}

static int find_daemon(struct takt_node *node, const char *path, char *looked, size_t size)
{
	const char *socket_path = getenv("TAKTD_SOCKET");
	const char *runtime = getenv("TAKTD_RUNTIME_DIR");
	const char *xdg = getenv("XDG_RUNTIME_DIR");
	char text[512];
	int result;

	looked[0] = '\0';
	if (!path && socket_path && *socket_path)
		path = socket_path;
	if (path)
		return candidate(node, path, looked, size);
	if (runtime && *runtime) {
		snprintf(text, sizeof(text), "%s/lanes.sock", runtime);
		return candidate(node, text, looked, size);
	}
	if (xdg && *xdg) {
		snprintf(text, sizeof(text), "%s/taktd/lanes.sock", xdg);
		result = candidate(node, text, looked, size);
		/* A socket that nobody serves any more says nothing about the system's own daemon. */
		if (result != -ENOENT && result != -ECONNREFUSED)
			return result;
	}
	return candidate(node, "/run/taktd/lanes.sock", looked, size);
}

static void pause_before_retry(uint64_t *pause_ns, uint64_t until_ns)
{
	const uint64_t next = takt_clock_ns() + *pause_ns;

	takt_sleep_until(next < until_ns ? next : until_ns);
	*pause_ns = *pause_ns * 2 < RETRY_MAX_NS ? *pause_ns * 2 : RETRY_MAX_NS;
}

static int greet(struct takt_node *node)
{
	struct takt_hello hello = {TAKT_WIRE_VERSION, TAKT_WIRE_VERSION, {0}};
	struct takt_welcome welcome;
	struct takt_answer *answer = malloc(sizeof(*answer));
	int result;

	if (!answer)
		return takt_node_fail(node, -ENOMEM, "out of memory");
	snprintf(hello.client, sizeof(hello.client), "%s", program_invocation_short_name);
	result =
	    takt_node_request(node, TAKT_MSG_HELLO, &hello, sizeof(hello), TAKT_MSG_WELCOME, sizeof(welcome), answer);
	if (result == 0) {
		memcpy(&welcome, answer->body.text, sizeof(welcome));
		node->daemon_pid = welcome.pid;
		memcpy(node->name, welcome.node, sizeof(node->name));
		node->name[sizeof(node->name) - 1] = '\0';
		if (welcome.version != TAKT_WIRE_VERSION)
			result = takt_node_fail(
			    node, -EPROTO, "taktd at %s speaks wire version %u, this library only %u: update libtakt",
			    node->path, welcome.version, TAKT_WIRE_VERSION);
		takt_answer_drop(answer);
	}
	free(answer);
	return result;
}

static int connect_within(struct takt_node *node, const char *path, uint64_t until_ns)
{
	uint64_t pause_ns = RETRY_FIRST_NS;
	char looked[TAKT_ERROR_BYTES / 2];
	int result;

	for (;;) {
		result = find_daemon(node, path, looked, sizeof(looked));
		if (result == 0) {
			result = greet(node);
			if (result != -ENOTCONN && result != -EAGAIN)
				return result;
		}
		if (result != -ENOENT && result != -ECONNREFUSED && result != -EAGAIN && result != -ENOTCONN)
			break;
		if (takt_clock_ns() >= until_ns)
			break;
		if (node->fd >= 0)
			close(node->fd);
		node->fd = -1;
		pause_before_retry(&pause_ns, until_ns);
	}
	if (!looked[0]) /* it was there and hung up, or is booting: the text is its own */
		return result;
	if (result == -EACCES || result == -EPERM)
		return takt_node_fail(
		    node, result, "no permission for taktd's socket: %s. Its folder must be open to this user", looked);
	return takt_node_fail(node, result,
			      "no daemon found at %s: is taktd running? $TAKTD_SOCKET names another socket", looked);
}

int takt_connect(takt_node **node, const char *path, int64_t timeout_ns)
{
	struct takt_node *made = calloc(1, sizeof(*made));
	const uint64_t now = takt_clock_ns();
	int result;

	*node = made;
	if (!made)
		return -ENOMEM;
	made->fd = -1;
	made->owner = getpid();
	pthread_mutex_init(&made->lock, NULL);
	result = connect_within(made, path, timeout_ns < 0 ? UINT64_MAX : now + (uint64_t)timeout_ns);
	if (result < 0 && made->fd >= 0) {
		close(made->fd);
		made->fd = -1;
	}
	return result;
}

void takt_close(takt_node *node)
{
	if (!node)
		return;
	for (struct takt_lane *lane = node->lanes; lane; lane = lane->sibling) {
		lane->node = NULL;
		takt_lane_end(lane, 0, "its connection was closed");
	}
	if (node->fd >= 0)
		close(node->fd);
	pthread_mutex_destroy(&node->lock);
	free(node);
}

const char *takt_error(const takt_node *node)
{
	return node ? node->error : "out of memory";
}

const char *takt_node_name(const takt_node *node)
{
	return node->name;
}

const char *takt_node_path(const takt_node *node)
{
	return node->path;
}

uint32_t takt_node_pid(const takt_node *node)
{
	return node->daemon_pid;
}

/* ---- listing ------------------------------------------------------------------------------------------------- */

/* Adds the elements of one page, a JSON array, to the text of an array that is still open. */
static int add_page(char **text, size_t *used, const char *page)
{
	const char *first = strchr(page, '['), *last = strrchr(page, ']');
	size_t bytes;
	char *grown;

	if (!first || !last || last < first)
		return -EPROTO;
	for (first += 1; first < last && strchr(" \t\r\n", *first); first++)
		;
	bytes = (size_t)(last - first);
	grown = realloc(*text, *used + bytes + 3); /* comma, closing bracket, NUL */
	if (!grown)
		return -ENOMEM;
	*text = grown;
	if (bytes && *used > 1)
		grown[(*used)++] = ',';
	memcpy(grown + *used, first, bytes);
	*used += bytes;
	return 0;
}

static int list(takt_node *node, uint32_t kind, char **json)
{
	struct takt_list_request ask = {kind, 0};
	struct takt_answer *answer = malloc(sizeof(*answer));
	char *text = malloc(3);
	size_t used = 1;
	int result = answer && text ? 0 : takt_node_fail(node, -ENOMEM, "out of memory");

	*json = NULL;
	if (text)
		text[0] = '[';
	while (result == 0) {
		struct takt_listing page;

		result =
		    takt_node_request(node, TAKT_MSG_LIST, &ask, sizeof(ask), TAKT_MSG_LISTING, sizeof(page), answer);
		if (result < 0)
			break;
		memcpy(&page, answer->body.text, sizeof(page));
		takt_answer_drop(answer);
		result = add_page(&text, &used, answer->body.text + sizeof(page));
		if (result == 0 && page.next_offset && page.next_offset <= ask.offset)
			result = -EPROTO;
		if (result < 0)
			takt_node_fail(node, result, "taktd at %s sent a list that can't be read", node->path);
		if (!page.next_offset)
			break;
		ask.offset = page.next_offset;
	}
	free(answer);
	if (result < 0) {
		free(text);
		return result;
	}
	text[used] = ']';
	text[used + 1] = '\0';
	*json = text;
	return 0;
}

int takt_list(takt_node *node, uint32_t kind, char **json)
{
	int result;

	pthread_mutex_lock(&node->lock);
	takt_node_reconnect(node);
	result = list(node, kind, json);
	if (result == -ENOTCONN && takt_node_reconnect(node) == 0) /* it ended unnoticed: nobody had used it since */
		result = list(node, kind, json);
	pthread_mutex_unlock(&node->lock);
	return result;
}

void takt_free(void *memory)
{
	free(memory);
}

/* ---- attaching ----------------------------------------------------------------------------------------------- */

void takt_lane_free(struct takt_lane *lane)
{
	if (!lane)
		return;
	takt_lane_free(lane->before);
	if (lane->map)
		takt_unmap(lane->map, lane->size);
	takt_layout_free(&lane->layout);
	if (lane->memfd >= 0)
		close(lane->memfd);
	if (lane->wake_fd >= 0)
		close(lane->wake_fd);
	takt_local_free(lane);
	free(lane->shapes);
	free(lane);
}

/* Everything that the daemon says about the memory is checked before it is used: seals, size, layout. */
static int map_lane(struct takt_node *node, struct takt_lane *lane, const struct takt_attached *attached)
{
	int result = takt_memfd_size(lane->memfd, &lane->size);

	if (result < 0)
		return takt_node_fail(node, -EPROTO, "the lane's memory is not a sealed memory file");
	if (lane->size != attached->memfd_bytes || attached->total_size > lane->size)
		return takt_node_fail(node, -EPROTO, "the lane's memory has %llu bytes, announced were %llu",
				      (unsigned long long)lane->size, (unsigned long long)attached->memfd_bytes);
	result = takt_map(lane->memfd, lane->size, 1, &lane->map);
	if (result < 0) {
		lane->map = NULL;
		return takt_node_fail(node, result, "can't map the lane's %llu bytes: %s",
				      (unsigned long long)lane->size, strerror(-result));
	}
	result = takt_layout_read(lane->map, lane->size, &lane->layout);
	if (result < 0)
		return takt_node_fail(
		    node, -EPROTO, "the lane's memory is not laid out as wire version %u says: update libtakt or taktd",
		    TAKT_WIRE_VERSION);
#ifdef MADV_POPULATE_WRITE
	/* First touches cost page faults: pay them now. Older kernels refuse; then the first use of each slot pays. */
	madvise(lane->map, lane->size, MADV_POPULATE_WRITE);
#endif
	result = takt_lane_init(lane);
	return result < 0 ? takt_node_fail(node, result, "out of memory") : 0;
}

static int take_lane(struct takt_node *node, struct takt_answer *answer, uint32_t wait_mode, takt_lane **lane)
{
	struct takt_lane *made = calloc(1, sizeof(*made));
	struct takt_attached attached;
	int result;

	memcpy(&attached, answer->body.text, sizeof(attached));
	if (!made || answer->fd_count != 2) {
		takt_answer_drop(answer);
		free(made);
		takt_node_send(node, TAKT_MSG_DETACH, &attached.lane_id, sizeof(attached.lane_id), 0);
		return made ? takt_node_fail(node, -EMFILE,
					     "the lane's descriptors did not arrive: has this process too many open?")
			    : takt_node_fail(node, -ENOMEM, "out of memory");
	}
	made->memfd = answer->fds[0];
	made->wake_fd = answer->fds[1];
	made->lane_id = attached.lane_id;
	made->token = attached.token;
	made->wait_mode = wait_mode;
	made->local_fd = -1;
	result = map_lane(node, made, &attached);
	if (result == 0) {
		result = takt_local_init(made, answer->body.text + sizeof(attached), answer->body_bytes - sizeof(attached));
		if (result < 0)
			takt_node_fail(node, result, "the answer that \"%s\" falls back to can't be kept: %s",
				       made->layout.name, strerror(-result));
	}
	if (result < 0) {
		takt_lane_free(made);
		takt_node_send(node, TAKT_MSG_DETACH, &attached.lane_id, sizeof(attached.lane_id), 0);
		return result;
	}
	made->node = node;
	made->sibling = node->lanes;
	node->lanes = made;
	*lane = made;
	return 0;
}

int takt_attach(takt_node *node, const char *name, uint32_t kind, uint32_t wait_mode, int64_t timeout_ns,
		takt_lane **lane)
{
	struct takt_attach_request ask = {kind, wait_mode, {0}};
	const uint64_t now = takt_clock_ns();
	const uint64_t until_ns = timeout_ns < 0 ? UINT64_MAX : now + (uint64_t)timeout_ns;
	uint64_t pause_ns = RETRY_FIRST_NS;
	struct takt_answer *answer;
	int result, tries = 2; /* the first may be on a connection that has ended, and nobody had used it since */

	*lane = NULL;
	if (!name || !*name || strlen(name) > TAKT_NAME_MAX)
		return takt_node_fail(node, -EINVAL, "name \"%.80s\": 1 to %u bytes are allowed", name ? name : "",
				      TAKT_NAME_MAX);
	if (kind > TAKT_KIND_MODEL || wait_mode > TAKT_WAIT_HYBRID)
		return takt_node_fail(node, -EINVAL, "kind %u, wait mode %u: see takt.h for what there is", kind,
				      wait_mode);
	answer = malloc(sizeof(*answer));
	if (!answer)
		return takt_node_fail(node, -ENOMEM, "out of memory");
	memcpy(ask.name, name, strlen(name));
	for (;;) {
		pthread_mutex_lock(&node->lock);
		takt_node_reconnect(node);
		result = takt_node_request(node, TAKT_MSG_ATTACH, &ask, sizeof(ask), TAKT_MSG_ATTACHED,
					   sizeof(struct takt_attached), answer);
		if (result == 0)
			result = take_lane(node, answer, wait_mode, lane);
		pthread_mutex_unlock(&node->lock);
		if (result == -ENOTCONN && --tries > 0)
			continue;
		if (result != -EAGAIN || takt_clock_ns() >= until_ns)
			break;
		pause_before_retry(&pause_ns, until_ns);
	}
	free(answer);
	return result;
}

/* A forked child only lets go of its copies; the lane is its parent's. */
static void give_back(struct takt_node *node, struct takt_lane *lane)
{
	const struct takt_lane_id ask = {lane->lane_id};
	struct takt_answer *answer;

	for (struct takt_lane **link = &node->lanes; *link; link = &(*link)->sibling)
		if (*link == lane) {
			*link = lane->sibling;
			break;
		}
	if (!lane->lane_id || node->fd < 0 || node->owner != getpid() || !(answer = malloc(sizeof(*answer))))
		return;
	takt_node_request(node, TAKT_MSG_DETACH, &ask, sizeof(ask), TAKT_MSG_DETACHED, 0, answer);
	free(answer);
}

void takt_detach(takt_lane *lane)
{
	if (!lane)
		return;
	if (lane->node) {
		pthread_mutex_lock(&lane->node->lock);
		give_back(lane->node, lane);
		pthread_mutex_unlock(&lane->node->lock);
	}
	takt_lane_free(lane);
}
