"""Turn CHANGELOG.md into debian/changelog. Usage: changelog.py SUFFIX   (appended to each version, as "+deb12")

Each "## VERSION ..." section is one entry with its list items; an "Unreleased" section counts as the version of
pyproject.toml. A date in the heading (2026-11-30) is the entry's; without one, the day of $SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from email.utils import formatdate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAINTAINER = "taktd developers <taktd@packages.example.org>"


def current_version() -> str:
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("changelog: pyproject.toml has no version")
    return found[1]


def entries(text: str) -> list[tuple[str, float, list[str]]]:
    """(version, time, items) of each section, newest first as in the file."""
    result = []
    now = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        found = re.search(r"\d+\.\d+\.\d+", title)
        date = re.search(r"\d{4}-\d\d-\d\d", title)
        at = time.mktime(time.strptime(date[0], "%Y-%m-%d")) if date else now
        items = [re.sub(r"\s+", " ", item).strip() for item in re.split(r"^[-*] ", body, flags=re.MULTILINE)[1:]]
        items = [re.sub(r"### .*$", "", item).strip() for item in items]
        result.append((found[0] if found else current_version(), at, items or ["No user-visible change."]))
    return result


def main() -> None:
    suffix = sys.argv[1] if len(sys.argv) > 1 else ""
    file = ROOT / "CHANGELOG.md"
    found = entries(file.read_text(encoding="utf-8")) if file.exists() else []
    if not found or found[0][0] != current_version():
        sys.exit(f"changelog: CHANGELOG.md doesn't begin with version {current_version()}, the one in pyproject.toml")
    for version, at, items in found:
        print(f"taktd ({version}{suffix}) unstable; urgency=medium\n")
        for item in items:
            print(textwrap.fill(item, 78, initial_indent="  * ", subsequent_indent="    ", break_on_hyphens=False))
        print(f"\n -- {MAINTAINER}  {formatdate(at)}\n")


if __name__ == "__main__":
    main()
