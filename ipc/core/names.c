/* SPDX-License-Identifier: Apache-2.0
 *
 * names.c: the one table in C of the names behind the numbers of takt.h. taktd.ipc reads its Python tables from here.
 */
#include "takt.h"

static const char *const status_names[] = {"ok",     "expired", "refused",   "invalid",
					   "failed", "lost",    "cancelled", "detached"};
static const char *const path_names[] = {"", "primary", "stand-in", "hold", "constant"};
static const char *const cause_names[] = {"",       "blocked_by", "overrun",     "late_release",
					  "wakeup", "handover",   "stale_input", "machine"};

static const struct {
	const char *name;
	uint32_t bits;
} dtypes[] = {
	[TAKT_FP32] = {"FP32", 32},
	[TAKT_UINT8] = {"UINT8", 8},
	[TAKT_INT8] = {"INT8", 8},
	[TAKT_UINT16] = {"UINT16", 16},
	[TAKT_INT16] = {"INT16", 16},
	[TAKT_INT32] = {"INT32", 32},
	[TAKT_INT64] = {"INT64", 64},
	[TAKT_BOOL] = {"BOOL", 8},
	[TAKT_FP16] = {"FP16", 16},
	[TAKT_FP64] = {"FP64", 64},
	[TAKT_UINT32] = {"UINT32", 32},
	[TAKT_UINT64] = {"UINT64", 64},
	[TAKT_COMPLEX64] = {"COMPLEX64", 64},
	[TAKT_COMPLEX128] = {"COMPLEX128", 128},
	[TAKT_BF16] = {"BF16", 16},
	[TAKT_FP8E4M3FN] = {"FP8E4M3FN", 8},
	[TAKT_FP8E4M3FNUZ] = {"FP8E4M3FNUZ", 8},
	[TAKT_FP8E5M2] = {"FP8E5M2", 8},
	[TAKT_FP8E5M2FNUZ] = {"FP8E5M2FNUZ", 8},
	[TAKT_UINT4] = {"UINT4", 4},
	[TAKT_INT4] = {"INT4", 4},
};

#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

const char *takt_status_name(uint32_t status)
{
	if (status == TAKT_PENDING)
		return "pending";
	return status < COUNT(status_names) ? status_names[status] : "unknown";
}

const char *takt_path_name(uint32_t path)
{
	return path < COUNT(path_names) ? path_names[path] : "unknown";
}

const char *takt_cause_name(uint32_t cause)
{
	return cause < COUNT(cause_names) ? cause_names[cause] : "unknown";
}

const char *takt_dtype_name(uint32_t dtype)
{
	return dtype < COUNT(dtypes) && dtypes[dtype].name ? dtypes[dtype].name : "unknown";
}

uint32_t takt_dtype_bits(uint32_t dtype)
{
	return dtype < COUNT(dtypes) ? dtypes[dtype].bits : 0;
}
