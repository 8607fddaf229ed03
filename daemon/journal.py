"""Log entries with fields, for journald, where systemd-python is importable; elsewhere logbook writes plain lines.

The ids of an entry become TAKT_LOOP=, TAKT_DEVICE=, TAKT_EPOCH=, …, one field for each of several loops; an event that
programs may wait for has a MESSAGE_ID that never changes (docs/operations.md lists them). Called by logbook only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Final

IDENTIFIER: Final = "taktd"
#: What an event is called in our code → its MESSAGE_ID for ever.
MESSAGE_IDS: Final[dict[str, str]] = {
    "ready": "67da974ba7804842a4727ac7b90a90fd",
    "stopping": "18b23a8e94164f9bb0426cb4408d3877",
    "stopped": "72b13baa34ae4ede8c9bc8aed42c617e",
    "executor-died": "6dfc672162e74d2bae06287abbe73778",
    "precondition-lost": "7893c2a5ec634d55ab6648aff3f6b72e",
    "precondition-holds": "08cff3966eb5496abdf8b5d83e575be4",
    "refused": "09a4d826c16c4f35be3fc94b4bd537f7",
    "reload-done": "5d4e5d71cae44ba4bc28e95ec7ee0341",
    "cache-rejected": "8534bef52eda4727892ac86a4750bcb9",
    "model-added": "4c542760ad874967afc1f262f1d638aa",
    "model-activated": "d04a52da05da4dc3aa533d86a3dc2ad7",
    "model-removed": "7373626e179b43bcab200c88e7c35481",
    "shadow-began": "ec673dcfba63441891f1cc259e9ebcd0",
    "shadow-ended": "0f74ac09925745c8bd1c86f526013b4f",
    "door-open": "f657d2fc09fd4951a0bc775d9c22e4f1",
    "gateway-died": "1c8d370bc7884b60b9a330d9d19d617e",
    "gateway-ends": "b843948fb16c49a29bab43398988eaed",
    "handover": "b7c1f0a4e1a94c0d9f2f3c5d6a8e7b10",
    "lane-unclaimed": "64e45b0ba2e84def8af3d2ac3ab4621d",
    "stand-in-lost": "2f6d1c9be0b84a7f8d35a1e47c90b3d2",
    "gpu-fault": "a7f0b1d45c9e4f02b6a4d2c81e93570f",
    "fault-injected": "d9de4908c48646ed92183bb441a38c0f",
    "operation-failed": "0f9a2d8c0725405d8d3b47aa6384c413",
}

Send = Callable[..., None]


def find_sender() -> Send | None:
    """systemd.journal.sendv, which takes NAME=value again and again; None where systemd-python (python3-systemd) is not
    installed."""
    try:
        return importlib.import_module("systemd.journal").sendv  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return None


def entry(text: str, priority: int, event: str, ids: Mapping[str, object]) -> list[str]:
    """The entry as NAME=value. Journald takes upper-case letters, digits and underscores as names.

    An id that is a tuple becomes one field for each value: journald keeps them all, and finds the entry by any of them.
    """
    result = [f"MESSAGE={text}", f"PRIORITY={priority}", f"SYSLOG_IDENTIFIER={IDENTIFIER}"]
    if event:
        result.append(f"TAKT_EVENT={event}")
    if event in MESSAGE_IDS:  # a test finds names that are not; a log must not stop the daemon for one
        result.append(f"MESSAGE_ID={MESSAGE_IDS[event]}")
    for key, value in ids.items():
        name = "".join(c if c.isascii() and c.isalnum() else "_" for c in key).upper()
        result += [f"TAKT_{name}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return result
