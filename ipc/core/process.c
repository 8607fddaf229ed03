/* SPDX-License-Identifier: Apache-2.0
 *
 * process.c: what /proc says about a process that we hold a pidfd of.
 */
#include "server.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The beginning of a file as a string; empty if it can't be read. */
static void read_text(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t count = fd < 0 ? -1 : read(fd, text, size - 1);

	if (fd >= 0)
		close(fd);
	text[count > 0 ? count : 0] = 0;
}

int takt_process_is_stopped(int pidfd)
{
	char path[64], text[512];
	const char *at;
	int pid;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", pidfd);
	read_text(path, text, sizeof(text));
	at = strstr(text, "\nPid:");
	pid = at ? atoi(at + strlen("\nPid:")) : 0;
	if (pid <= 0)
		return 1;
	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	read_text(path, text, sizeof(text));
	at = strrchr(text, ')'); /* behind the program's name, which may hold anything */
	return !at || at[1] == 0 || (at[2] != 'R' && at[2] != 'S');
}
