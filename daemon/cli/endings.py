"""How commands end: exit codes, and one way to say what went wrong."""

from __future__ import annotations

import json
import sys
from typing import Final, NoReturn

FINE: Final = 0
NO: Final = 1  # asked and answered: no
UNUSABLE: Final = 2  # options, files, names that can't be used
NOTHING_THERE: Final = 3  # nothing there to ask
INTERRUPTED: Final = 130  # Ctrl-C, as shells count it


def die(message: str, hint: str = "", *, code: int = NO, as_json: bool = False) -> NoReturn:
    """Say what happened and what to do, and exit. With as_json stdout gets the same as one object."""
    if as_json:
        print(json.dumps({"error": {"what": message, "hint": hint}}))
    print(f"taktctl: {message}", file=sys.stderr)
    if hint:
        print(f"  to do: {hint}", file=sys.stderr)
    raise SystemExit(code)
