"""Write constraints.txt: the newest versions that pyproject.toml allows, tried together, for several Pythons at once.

`make constraints` runs it. Each Python gets a throw-away environment; where they agree a package has one line, where
they don't it has one line per Python with a marker. Versions only: what is installed is decided by pyproject.toml.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by `make constraints`: every version that is tested, for Python {}.\n"


def resolve(python: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Install everything afresh with `python`; returns its "3.x" and {package: version}."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--upgrade", "pip", "setuptools>=77,<90"], check=True)
    extras = ["--group", "dev", "--group", "robot"]
    subprocess.run([*pip, "install", "--no-build-isolation", f"{ROOT}[plot]", *extras], check=True, cwd=ROOT)
    frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    pairs = [line.split("==") for line in frozen.splitlines() if "==" in line]
    # What GPUs need is resolved and not installed: pycuda is compiled against CUDA's headers.
    gpu = [*pip, "install", "--dry-run", "--no-build-isolation", "--report", "-", f"{ROOT}[gpu]"]
    report = json.loads(subprocess.run(gpu, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    pairs += [[item["metadata"]["name"], item["metadata"]["version"]] for item in report["install"]]
    name = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.run([python, "-c", name], check=True, capture_output=True, text=True).stdout.strip()
    return version, {package: pinned for package, pinned in pairs if package != "taktd"}


def merge(found: dict[str, dict[str, str]]) -> list[str]:
    """One line per package and version. The newest Python speaks for those above it."""
    pythons = sorted(found, key=lambda v: tuple(map(int, v.split("."))))
    versions: dict[str, dict[str, str]] = defaultdict(dict)
    for python in pythons:
        for package, pinned in found[python].items():
            versions[package][python] = pinned
    lines = []
    for package in sorted(versions, key=str.lower):
        by_python = versions[package]
        if len(set(by_python.values())) == 1:
            lines.append(f"{package}=={next(iter(by_python.values()))}")
            continue
        for python in by_python:
            relation = ">=" if python == pythons[-1] else "=="
            lines.append(f'{package}=={by_python[python]} ; python_version {relation} "{python}"')
    return lines


def main() -> None:
    found = {}
    for python in sys.argv[1:]:
        print(f"resolving for {python}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            version, packages = resolve(python, Path(folder))
            found[version] = packages
    text = HEADER.format(" and ".join(found)) + "\n".join(merge(found)) + "\n"
    (ROOT / "constraints.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
