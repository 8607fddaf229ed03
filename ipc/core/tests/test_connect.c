/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the daemon, and what is said when it is not there. */
#include <unistd.h>

#include "fake.h"

static void refused(const char *path, int expected, const char *text)
{
	takt_node *node;

	CHECK(takt_connect(&node, path, 0) == expected);
	CHECK_TEXT(takt_error(node), text);
	takt_close(node);
}

static void test_an_absent_daemon_is_named_with_its_path(void)
{
	refused("/nowhere/lanes.sock", -ENOENT, "no daemon found at /nowhere/lanes.sock");
	refused("/nowhere/lanes.sock", -ENOENT, "is taktd running?");
}

static void test_the_environment_is_asked_in_order(void)
{
	setenv("XDG_RUNTIME_DIR", "/nowhere/xdg", 1);
	refused(NULL, -ENOENT, "/nowhere/xdg/taktd/lanes.sock");
	refused(NULL, -ENOENT, "/run/taktd/lanes.sock");
	setenv("TAKTD_RUNTIME_DIR", "/nowhere/runtime", 1);
	refused(NULL, -ENOENT, "at /nowhere/runtime/lanes.sock (");
	setenv("TAKTD_SOCKET", "/nowhere/socket", 1);
	refused(NULL, -ENOENT, "at /nowhere/socket (");
	unsetenv("TAKTD_SOCKET");
	unsetenv("TAKTD_RUNTIME_DIR");
	unsetenv("XDG_RUNTIME_DIR");
}

static void test_a_path_too_long_is_refused(void)
{
	char path[300];

	memset(path, 'a', sizeof(path) - 1);
	path[sizeof(path) - 1] = '\0';
	refused(path, -ENAMETOOLONG, "too long");
}

static void test_a_daemon_is_told_by_name_and_pid(struct fake *fake)
{
	takt_node *node = fake_connect(fake);

	CHECK(!strcmp(takt_node_name(node), "fake-node") && takt_node_pid(node) == 4711);
	CHECK(!strcmp(takt_node_path(node), fake->path) && !strcmp(takt_error(node), ""));
	takt_close(node);
}

static void test_lists_are_joined_from_pages(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	char *json;

	CHECK(takt_list(node, TAKT_KIND_LOOP, &json) == 0);
	CHECK(!strcmp(json, "[{\"name\": \"entry0\"} ,{\"name\": \"entry2\"} ]"));
	takt_free(json);
	takt_close(node);
}

static void test_another_wire_version_is_refused(struct fake *fake)
{
	fake->welcome = 2;
	refused(fake->path, -EPROTO, "wire version 2");
	fake->welcome = 0;
}

static void test_attach_waits_for_a_daemon_that_boots(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane;

	fake->booting = 2;
	CHECK(takt_attach(node, "fake", TAKT_KIND_ANY, TAKT_WAIT_BLOCK, 0, &lane) == -EAGAIN && !lane);
	CHECK_TEXT(takt_error(node), "booting");
	CHECK(takt_attach(node, "fake", TAKT_KIND_ANY, TAKT_WAIT_BLOCK, 5000 * (int64_t)MS, &lane) == 0);
	takt_detach(lane);
	takt_close(node);
}

static void test_bad_arguments_are_refused(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane;
	char name[65];

	memset(name, 'n', sizeof(name) - 1);
	name[sizeof(name) - 1] = '\0';
	CHECK(takt_attach(node, name, TAKT_KIND_ANY, TAKT_WAIT_BLOCK, 0, &lane) == -EINVAL);
	CHECK(takt_attach(node, "", TAKT_KIND_ANY, TAKT_WAIT_BLOCK, 0, &lane) == -EINVAL);
	CHECK(takt_attach(node, "fake", 3, TAKT_WAIT_BLOCK, 0, &lane) == -EINVAL);
	CHECK(takt_attach(node, "fake", TAKT_KIND_ANY, 3, 0, &lane) == -EINVAL);
	takt_close(node);
}

static void *start_later(void *argument)
{
	usleep(50000);
	fake_start(argument);
	return NULL;
}

static void test_connect_waits_for_a_daemon_that_is_not_there_yet(void)
{
	struct fake first = {.mode = FAKE_ECHO}, fake = {.mode = FAKE_ECHO};
	char path[108], *digit;
	pthread_t thread;
	takt_node *node;

	fake_start(&first); /* the next one's path is the next number */
	strcpy(path, first.path);
	digit = strrchr(path, '.') - 1;
	*digit += 1;
	CHECK(pthread_create(&thread, NULL, start_later, &fake) == 0);
	CHECK(takt_connect(&node, path, 5000 * (int64_t)MS) == 0);
	pthread_join(thread, NULL);
	takt_close(node);
	fake_stop(&fake);
	fake_stop(&first);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO};

	test_an_absent_daemon_is_named_with_its_path();
	test_the_environment_is_asked_in_order();
	test_a_path_too_long_is_refused();
	fake_start(&fake);
	test_a_daemon_is_told_by_name_and_pid(&fake);
	test_lists_are_joined_from_pages(&fake);
	test_another_wire_version_is_refused(&fake);
	test_attach_waits_for_a_daemon_that_boots(&fake);
	test_bad_arguments_are_refused(&fake);
	fake_stop(&fake);
	test_connect_waits_for_a_daemon_that_is_not_there_yet();
	return 0;
}
