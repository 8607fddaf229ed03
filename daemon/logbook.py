"""The daemon's log: one line to stderr for each thing that happened, once, with the ids that name it.

Under systemd an entry goes to journald with its ids as fields, where systemd-python is installed (journal.py); else
each line begins with its level as `<4>`, which journald takes off again (sd-daemon(3)).
"""

from __future__ import annotations

import os
import sys
from typing import Final, Literal

from taktd.daemon import journal

Level = Literal["error", "warning", "notice", "info", "debug"]
_NUMBERS: Final[dict[str, int]] = {"error": 3, "warning": 4, "notice": 5, "info": 6, "debug": 7}


def _to_journal() -> bool:
    """Whether stderr is what JOURNAL_STREAM says, and not a terminal or a file it was redirected to."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


_JOURNAL: Final = _to_journal()
_SEND: Final = journal.find_sender() if _JOURNAL else None


def log(level: Level, text: str, *, event: str = "", **ids: object) -> None:
    """Write one event. ids are appended as key=value: device, loop, pid, uid, lane, …; a tuple for several of a kind.
    event: a key of MESSAGE_IDS."""
    told = {key: ",".join(map(str, value)) if isinstance(value, tuple) else value for key, value in ids.items()}
    details = " ".join(f"{key}={value}" for key, value in told.items() if ids[key] != ())
    if _SEND is not None:
        try:
            _SEND(*journal.entry(f"{text} [{details}]" if details else text, _NUMBERS.get(level, 6), event, ids))
            return
        except OSError:
            pass  # journald is being restarted: our standard error is kept for it by systemd
    prefix = (
        f"<{_NUMBERS.get(level, 6)}>" if _JOURNAL else "taktd: " if level in ("info", "notice") else f"taktd: {level}: "
    )
    lines = text.splitlines() or [""]
    lines[0] += f" [{details}]" if details else ""
    try:
        sys.stderr.write("".join(f"{prefix if n == 0 or _JOURNAL else '  '}{line}\n" for n, line in enumerate(lines)))
        sys.stderr.flush()
    except OSError:
        pass  # a log that nobody reads must not stop the daemon
