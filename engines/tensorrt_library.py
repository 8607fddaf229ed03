"""NVIDIA's library, found and asked: TensorRT 10.3 to 11.4 (``tensorrt``) and TensorRT-RTX (``tensorrt_rtx``).

One code path for all: names are looked up, numbers never (enum values differ between versions), and what a version
lacks is asked for with ``getattr``. The library reports failures as None or False plus words in its log; ``Log`` keeps
those words for the error that we raise.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Final

from taktd.engines.errors import ModelRefused

__all__ = ["FLAVOURS", "Library", "Log", "find_library"]

FLAVOURS: Final = ("tensorrt", "tensorrt_rtx")
MAJORS: Final = {"tensorrt": (10, 11), "tensorrt_rtx": (1,)}
_HOW: Final = (
    "Install it: on Debian and Ubuntu from NVIDIA's repository `apt install python3-libnvinfer` (its Python must be the"
    " one taktd runs on), on Jetson it is part of JetPack, elsewhere `pip install tensorrt`, or `tensorrt-rtx` for RTX"
    " cards."
)
LINES_MAX: Final = 12


class Log:
    """The library's warnings and errors since the last ``clear``."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, severity: str, message: str) -> None:
        if severity in ("INTERNAL_ERROR", "ERROR", "WARNING"):
            self.lines.append(f"{severity.lower().replace('_', ' ')}: {message.strip()}")

    def clear(self) -> None:
        self.lines.clear()

    def errors(self) -> str:
        """What it said about the failure, the latest last; "nothing" if nothing."""
        found = [line for line in self.lines if not line.startswith("warning")] or self.lines
        return "; ".join(found[-LINES_MAX:]) or "nothing in its log"


@dataclass(frozen=True, slots=True)
class Library:
    """One flavour of TensorRT, imported."""

    flavour: str
    module: Any
    version: str
    log: Log
    logger: Any

    @property
    def name(self) -> str:
        return f"{self.flavour} {self.version}"

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    def member(self, enum: str, name: str) -> Any | None:
        """The member of an enum, None where this version has none."""
        return getattr(getattr(self.module, enum, None), name, None)

    @property
    def network_flags(self) -> int:
        """Strongly typed networks: asked for on 10, the only kind on 11 and RTX."""
        strong = self.member("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")
        return 1 << int(strong) if self.flavour == "tensorrt" and self.major == 10 and strong is not None else 0


def _logger(module: Any, log: Log) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            log.add(severity.name, msg)

    return Logger()


def _import(name: str) -> Any:
    """The module, or its bindings alone: pip's wheels put the module into a package that only downloads the rest."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or importlib.util.find_spec(f"{name}_bindings") is None:
            raise
        return importlib.import_module(f"{name}_bindings")


def find_library(flavour: str = "auto") -> Library:
    """``flavour``: one of ``FLAVOURS``, or "auto": the first that is there. Raises ``ModelRefused``: none is usable."""
    problems = []
    for name in FLAVOURS if flavour == "auto" else (flavour,):
        try:
            module = _import(name)
        except (ImportError, OSError) as error:  # OSError: its shared library is missing
            problems.append(f"{name}: {error}")
            continue
        version = str(module.__version__)
        if int(version.split(".")[0]) not in MAJORS[name]:
            problems.append(f"{name}: version {version}, supported are {', '.join(map(str, MAJORS[name]))}.x")
            continue
        log = Log()
        return Library(name, module, version, log, _logger(module, log))
    raise ModelRefused(
        "TensorRT is not usable here",
        found="; ".join(problems),
        allowed="tensorrt 10.3 to 11.x, or tensorrt_rtx 1.x",
        hint=_HOW,
    )
