"""Write lock.txt: every library that the Debian package bundles, with its version and the hashes of its wheels.

Versions come from constraints.txt, what is needed from pyproject.toml; the wheels are fetched once for each Python to
take their hashes. `packaging/wheelhouse` and the build trust the lock only. Usage: lock.py PYTHON...   (3.11 3.13)
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "packaging" / "lock.txt"
# What the package adds to the dependencies: the doctor's view of GPUs, and what builds our own wheel.
EXTRAS = ["nvidia-ml-py>=13,<14", "setuptools>=77,<90"]
HEADER = "# Written by packaging/lock.py for Python {}: what the Debian package is built from, offline.\n"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]


def fetch(python: str, folder: Path) -> None:
    """Download the wheels of the whole closure for that Python into the folder."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "-q", "download", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python, *platforms, "-c", str(ROOT / "constraints.txt"), "-d", str(folder)]
    subprocess.run([*command, *wanted, *EXTRAS], check=True)


def name_and_version(wheel: Path) -> tuple[str, str]:
    name, version = wheel.name.split("-")[:2]
    return re.sub(r"[-_.]+", "-", name).lower(), version


def main() -> None:
    pythons = sys.argv[1:] or ["3.11", "3.13"]
    hashes: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for python in pythons:
        print(f"fetching for Python {python}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            fetch(python, Path(folder))
            for wheel in Path(folder).glob("*.whl"):
                hashes[name_and_version(wheel)][python] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lines = []
    for (name, version), by_python in sorted(hashes.items()):
        if len(by_python) != len(pythons):
            sys.exit(f"{name} {version} is for Python {', '.join(by_python)} only: pin one version for all of them")
        lines.append(f"{name}=={version}")
        lines[-1] += "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(set(by_python.values())))
    LOCK.write_text(HEADER.format(" and ".join(pythons)) + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
