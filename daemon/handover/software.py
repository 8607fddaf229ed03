"""Which taktd a process runs: an upgrade puts another one on the disk while executors of the one before still serve.

The files themselves are compared, not a version number: a package may be built twice under one.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Final

from taktd.engines.onnx_version import onnxruntime_build

FOLDERS: Final = ("taktd.daemon", "taktd.engines", "taktd.drivers", "taktd.ipc")
LIBRARIES: Final = ("numpy", "onnx", "pycuda")  # what executors compute with, beside ONNX Runtime
SUFFIXES: Final = (".py", ".so")


def fingerprint(folders: tuple[Path, ...], libraries: tuple[str, ...] = LIBRARIES) -> str:
    """The same as long as no file of the code was exchanged: by name, size and time."""
    found: list[tuple[str, int | str, int]] = []
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in SUFFIXES:
                with suppress(FileNotFoundError):  # a package is being unpacked at this moment
                    status = file.stat()
                    found.append((str(file.relative_to(folder)), status.st_size, status.st_mtime_ns))
    for name in libraries:
        try:
            found.append((name, metadata.version(name), 0))
        except metadata.PackageNotFoundError:
            continue
    found.append(("onnxruntime", onnxruntime_build(), 0))
    return hashlib.sha256(repr(found).encode()).hexdigest()


@functools.cache
def software() -> str:
    """That of this process; asked for the first time while it starts, before anything can have been exchanged."""
    return fingerprint(tuple(Path(import_module(name).__path__[0]) for name in FOLDERS))
