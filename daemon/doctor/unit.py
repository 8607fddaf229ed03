"""What systemd gives the service: its unit file and the drop-ins that change it, read as systemd.unit(5) says.

Only for lists of words in [Service], such as capabilities, groups and devices. Called by the checks; reads only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from taktd.daemon.doctor.tree import Tree

NAME: Final = "taktd.service"
#: The first that has a unit, or a drop-in of a name, is the one that counts.
FOLDERS: Final = (
    "/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system",
    "/lib/systemd/system",
)  # fmt: skip
DROP_INS: Final = f"/etc/systemd/system/{NAME}.d"


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit file, then its drop-ins in the order in which they are read: (path, text of each)."""

    files: tuple[tuple[str, str], ...]

    @property
    def path(self) -> str:
        return self.files[0][0]

    def words(self, key: str) -> list[str]:
        """All words of a list setting: each line adds some, an empty one drops all before it, ~ takes some away."""
        found: list[str] = []
        for _, text in self.files:
            for value in _values(text, key):
                words = value.removeprefix("~").split()
                if value.startswith("~"):
                    found = [word for word in found if word not in words]
                else:
                    found = found + words if words else []
        return found

    def who_sets(self, key: str) -> str:
        """The file that says something of a setting last, "" if none does."""
        return next((path for path, text in reversed(self.files) if _values(text, key)), "")


def read_unit(tree: Tree) -> Unit | None:
    """The service's unit; None where there is none, or it is masked."""
    # Masked is a link to /dev/null, which a recorded tree need not have.
    found = next((folder for folder in FOLDERS if NAME in tree.names(folder)), None)
    text = tree.text(f"{found}/{NAME}") if found else None
    if text is None:
        return None
    drop_ins: dict[str, str] = {}
    for folder in FOLDERS:
        for name in tree.names(f"{folder}/{NAME}.d"):
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{folder}/{NAME}.d/{name}")
    # A drop-in that leads to /dev/null has no text: it hides one of its name.
    read = [(path, tree.text(path)) for _, path in sorted(drop_ins.items())]
    return Unit(((f"{found}/{NAME}", text), *((path, more) for path, more in read if more is not None)))


def enable(drop_in: str) -> str:
    """The command that enables one of the package's drop-ins."""
    return (
        f"mkdir -p {DROP_INS} && ln -s /usr/share/taktd/drop-ins/{drop_in}.conf {DROP_INS}/ && "
        "systemctl daemon-reload && systemctl restart taktd"
    )


def _values(text: str, key: str) -> list[str]:
    """What the lines of [Service] say of a key."""
    section, found = "", []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        name, equals, value = line.partition("=")
        if section == "[Service]" and equals and name.strip() == key:
            found.append(value.strip())
    return found
