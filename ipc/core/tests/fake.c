/* SPDX-License-Identifier: Apache-2.0
 *
 * fake.c: see fake.h. One connection and one lane at a time; input x and output y, both FP32 of shape 4 x 4.
 */
#include "fake.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "message.h"

static void reply(struct fake *fake, uint16_t type, uint32_t request_id, int32_t code, const void *body, size_t bytes,
		  const int *fds)
{
	struct takt_message head = {TAKT_MESSAGE_MAGIC, type, 0, request_id, code};
	struct iovec parts[2] = {{&head, sizeof(head)}, {(void *)(uintptr_t)body, bytes}};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
	union {
		char bytes[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr align;
	} control;

	if (fds) {
		message.msg_control = control.bytes;
		message.msg_controllen = sizeof(control.bytes);
		CMSG_FIRSTHDR(&message)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&message)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&message)->cmsg_len = CMSG_LEN(2 * sizeof(int));
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), fds, 2 * sizeof(int));
	}
	sendmsg(fake->connection, &message, MSG_NOSIGNAL);
}

static void drop_lane(struct fake *fake)
{
	if (!fake->map)
		return;
	takt_unmap(fake->map, fake->size);
	takt_layout_free(&fake->layout);
	close(fake->wake_fd);
	fake->map = NULL;
	fake->held_count = 0;
}

static void make_lane(struct fake *fake, uint32_t request_id)
{
	struct takt_layout *layout = &fake->layout;
	struct takt_attached attached = {.lane_id = 7};
	int pair[2], fds[2];
	void *map;

	drop_lane(fake);
	memset(layout, 0, sizeof(*layout));
	layout->kind = fake->dynamic ? TAKT_KIND_MODEL : TAKT_KIND_LOOP;
	layout->dynamic = fake->dynamic;
	layout->slot_count = fake->slot_count ? fake->slot_count : 4;
	layout->tensor_count = 2;
	layout->input_count = 1;
	layout->period_ns = fake->dynamic ? 0 : MS;
	layout->deadline_ns = layout->period_ns;
	strcpy(layout->name, "fake");
	strcpy(layout->model_name, "identity");
	layout->tensors = calloc(2, sizeof(*layout->tensors));
	for (int i = 0; i < 2; i++)
		layout->tensors[i] = (struct takt_tensor_entry){.dtype = TAKT_FP32, .rank = 2, .dims = {4, 4}};
	strcpy(layout->tensors[0].name, "x");
	strcpy(layout->tensors[1].name, "y");
	CHECK(takt_layout_compute(layout) == 0);
	fds[0] = takt_layout_create(layout);
	CHECK(fds[0] >= 0);
	fake->size = layout->total_size;
	CHECK(takt_map(fds[0], fake->size, 1, &map) == 0);
	fake->map = map;
	takt_rings_init(&fake->rings, map, layout);
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
	fake->wake_fd = pair[0];
	fds[1] = pair[1];
	takt_store_word(&fake->rings.cursors->daemon_sleeping, 1); /* poll() is all it does */
	if (fake->spoil)
		fake->spoil(fake, map);
	attached.total_size = attached.memfd_bytes = fake->size;
	reply(fake, TAKT_MSG_ATTACHED, request_id, 0, &attached, sizeof(attached), fds);
	close(fds[0]);
	close(fds[1]);
}

static void wake(struct fake *fake)
{
	struct takt_cursors *cursors = fake->rings.cursors;

	takt_dekker_fence();
	switch (takt_load_word(&cursors->client_waiting)) {
	case TAKT_WAITING_FUTEX:
		syscall(SYS_futex, &cursors->completion_tail, FUTEX_WAKE, 1, NULL, NULL, 0);
		break;
	case TAKT_WAITING_BYTE:
		send(fake->wake_fd, "x", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		break;
	default:
		break;
	}
}

static void complete(struct fake *fake, const struct takt_submission *job, uint16_t status)
{
	struct takt_completion done = {.sequence = job->sequence, .slot = job->slot, .status = status};
	uint8_t *slot = fake->map + fake->layout.slots_offset + job->slot * fake->layout.slot_stride;

	done.taken_ns = done.started_ns = takt_clock_ns();
	done.area = 1;
	done.path = status == TAKT_OK ? TAKT_PATH_PRIMARY : TAKT_PATH_NONE;
	memcpy(slot + fake->layout.tensors[1].offset_in_slot_1, slot + fake->layout.tensors[0].offset_in_slot,
	       fake->layout.tensors[0].bytes);
	if (job->flags & TAKT_SUBMIT_SHAPES) {
		struct takt_shape *shapes = (void *)(slot + fake->layout.shapes_offset_in_slot);

		shapes[1] = shapes[0];
		done.flags = TAKT_SHAPES;
	}
	done.ended_ns = takt_clock_ns();
	takt_rings_complete(&fake->rings, &done);
	wake(fake);
}

static void end_lane(struct fake *fake)
{
	struct {
		uint64_t lane_id;
		char text[20];
	} body = {7, "somebody pulled it"};

	reply(fake, TAKT_MSG_LANE_ENDED, 0, 0, &body, sizeof(body.lane_id) + strlen(body.text), NULL);
	takt_store_word(&fake->rings.cursors->detach_reason, TAKT_DETACH_ENDED);
	takt_store_state(&fake->rings.cursors->lane_state, TAKT_LANE_DETACHED);
	syscall(SYS_futex, &fake->rings.cursors->completion_tail, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void cancel(struct fake *fake, uint64_t sequence)
{
	for (uint32_t i = 0; i < fake->held_count; i++) {
		if (fake->held[i].sequence != sequence)
			continue;
		complete(fake, &fake->held[i], TAKT_CANCELLED);
		fake->held[i] = fake->held[--fake->held_count];
		return;
	}
}

static void serve(struct fake *fake)
{
	struct takt_submission job;

	while (fake->map && takt_rings_peek(&fake->rings, &job) > 0) {
		takt_rings_taken(&fake->rings);
		if (job.flags & TAKT_SUBMIT_CANCEL)
			cancel(fake, job.sequence);
		else if (takt_load_word(&fake->mode) == FAKE_ECHO)
			complete(fake, &job, TAKT_OK);
		else if (takt_load_word(&fake->mode) == FAKE_HOLD)
			fake->held[fake->held_count++] = job;
		else
			end_lane(fake);
	}
	for (; takt_load_word(&fake->mode) == FAKE_ECHO && fake->held_count; fake->held_count--)
		complete(fake, &fake->held[fake->held_count - 1], TAKT_OK); /* the newest first: not in order */
}

static void attach(struct fake *fake, uint32_t request_id)
{
	static const char booting[] = "still booting";
	const uint32_t left = takt_load_word(&fake->booting);

	if (left) {
		takt_store_word(&fake->booting, left - 1);
		reply(fake, TAKT_MSG_ERROR, request_id, -EAGAIN, booting, strlen(booting), NULL);
		return;
	}
	make_lane(fake, request_id);
}

static void listing(struct fake *fake, uint32_t request_id, uint32_t offset)
{
	struct {
		struct takt_listing head;
		char text[48];
	} body = {{3, offset < 2 ? offset + 1 : 0}, ""};

	snprintf(body.text, sizeof(body.text), offset == 1 ? "[]" : "[ {\"name\": \"entry%u\"} ]", offset);
	reply(fake, TAKT_MSG_LISTING, request_id, 0, &body, sizeof(body.head) + strlen(body.text), NULL);
}

/* 0: the client has hung up. */
static int control(struct fake *fake)
{
	union {
		char bytes[512];
		struct takt_message head;
	} message;
	struct takt_welcome welcome = {TAKT_WIRE_VERSION, 4711, "fake-node"};
	struct takt_list_request ask;
	uint32_t request_id;

	if (recv(fake->connection, message.bytes, sizeof(message.bytes), MSG_DONTWAIT) <= 0)
		return 0;
	request_id = message.head.request_id;
	switch (message.head.type) {
	case TAKT_MSG_HELLO:
		if (fake->welcome)
			welcome.version = (uint32_t)fake->welcome;
		reply(fake, TAKT_MSG_WELCOME, request_id, 0, &welcome, sizeof(welcome), NULL);
		break;
	case TAKT_MSG_ATTACH:
		attach(fake, request_id);
		break;
	case TAKT_MSG_DETACH:
		drop_lane(fake);
		takt_store_word(&fake->detached, takt_load_word(&fake->detached) + 1);
		reply(fake, TAKT_MSG_DETACHED, request_id, 0, message.bytes + sizeof(message.head), 8, NULL);
		break;
	case TAKT_MSG_LIST:
		memcpy(&ask, message.bytes + sizeof(message.head), sizeof(ask));
		listing(fake, request_id, ask.offset);
		break;
	default:
		break;
	}
	return 1;
}

static void *run(void *argument)
{
	struct fake *fake = argument;

	for (;;) {
		struct pollfd fds[4] = {{fake->stop_pipe[0], POLLIN, 0},
					{fake->listener, POLLIN, 0},
					{fake->connection, POLLIN, 0},
					{fake->map ? fake->wake_fd : -1, POLLIN, 0}};
		char bytes[64];

		poll(fds, 4, -1);
		if (fds[0].revents && read(fake->stop_pipe[0], bytes, 1) == 1 && bytes[0] == 's')
			return NULL;
		if (fds[3].revents)
			while (recv(fake->wake_fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
				;
		serve(fake);
		if (fds[2].revents && !control(fake)) {
			drop_lane(fake);
			close(fake->connection);
			fake->connection = -1;
		}
		if (fds[1].revents && fake->connection < 0)
			fake->connection = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
	}
}

void fake_start(struct fake *fake)
{
	static int number;
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	const char *folder = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";

	snprintf(fake->path, sizeof(fake->path), "%s/takt-test-%d-%d.sock", folder, (int)getpid(), number++);
	strcpy(address.sun_path, fake->path);
	fake->connection = fake->wake_fd = -1;
	fake->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(bind(fake->listener, (struct sockaddr *)&address, sizeof(address)) == 0 &&
	      listen(fake->listener, 8) == 0);
	CHECK(pipe2(fake->stop_pipe, O_CLOEXEC) == 0);
	CHECK(pthread_create(&fake->thread, NULL, run, fake) == 0);
}

void fake_set_mode(struct fake *fake, enum fake_mode mode)
{
	takt_store_word(&fake->mode, mode);
	CHECK(write(fake->stop_pipe[1], "m", 1) == 1);
}

void fake_stop(struct fake *fake)
{
	CHECK(write(fake->stop_pipe[1], "s", 1) == 1);
	pthread_join(fake->thread, NULL);
	drop_lane(fake);
	if (fake->connection >= 0)
		close(fake->connection);
	close(fake->listener);
	close(fake->stop_pipe[0]);
	close(fake->stop_pipe[1]);
	unlink(fake->path);
}

takt_node *fake_connect(struct fake *fake)
{
	takt_node *node;

	CHECK(takt_connect(&node, fake->path, 0) == 0);
	return node;
}

takt_lane *fake_attach(takt_node *node, uint32_t wait_mode)
{
	takt_lane *lane;

	CHECK(takt_attach(node, "fake", TAKT_KIND_ANY, wait_mode, 0, &lane) == 0);
	return lane;
}

void fill(takt_lane *lane, float value)
{
	struct takt_tensor x;

	CHECK(takt_input(lane, "x", &x) == 0);
	for (size_t i = 0; i < x.bytes / sizeof(float); i++)
		((float *)x.data)[i] = value + (float)i;
}

float answer(takt_lane *lane)
{
	struct takt_tensor y;

	CHECK(takt_output(lane, "y", &y) == 0);
	return ((float *)y.data)[0];
}
