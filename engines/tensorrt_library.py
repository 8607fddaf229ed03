"""NVIDIA's library, found and asked: TensorRT 10.3 to 11.4 (``tensorrt``) and TensorRT-RTX (``tensorrt_rtx``).

One code path for all: names are looked up, numbers never (enum values differ between versions), and what a version
lacks is asked for with ``getattr``. The library reports failures as None or False plus words in its log; ``Log`` keeps
those words for the error that we raise.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
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
KEPT_LINES_MAX: Final = 1000  # a run that fails logs, and nobody clears while jobs run


class Log:
    """The library's warnings and errors since the last ``clear``, the latest of them."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES_MAX)

    def add(self, severity: str, message: str) -> None:
        if severity in ("INTERNAL_ERROR", "ERROR", "WARNING"):
            self.lines.append(f"{severity.lower().replace('_', ' ')}: {message.strip()}")

    def clear(self) -> None:
        self.lines.clear()

    def errors(self) -> str:
        """What it said about the failure, the latest last; "nothing" if nothing."""
        found = [line for line in self.lines if not line.startswith("warning")] or list(self.lines)
        return "; ".join(found[-LINES_MAX:]) or "nothing in its log"

    def warnings(self) -> str:
        """What it warned of; "" if of nothing."""
        return "; ".join([line for line in self.lines if line.startswith("warning")][-LINES_MAX:])


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

    def made(self, kind: str) -> Any:
        """A new ``Builder`` or ``Runtime``, with the plugins that the library brings itself.

        Raises ``ModelRefused`` where the library does not get on with the driver: its constructor finds that out.
        """
        try:
            found = getattr(self.module, kind)(self.logger)
        except TypeError as error:  # what pybind11 makes of a factory that returns nothing
            raise ModelRefused(
                f"{self.name} does not work with this driver",
                found=self.log.errors(),
                allowed="a driver that this version of TensorRT supports (11.4 needs r580 or newer)",
                hint="Upgrade NVIDIA's driver, or install the TensorRT that belongs to it.",
            ) from error
        self.module.init_libnvinfer_plugins(self.logger, "")
        return found

    def context_of(self, engine: Any, *, shapes_vary: bool) -> Any:
        """An execution context whose memory is given by us, None where there is none to be had.

        TensorRT-RTX compiles kernels for the shapes that it meets, by default in threads of its own beside the runs.
        For fixed shapes it shall do so in the first run, which is a warm-up; where shapes vary, never.
        """
        given = self.member("ExecutionContextAllocationStrategy", "USER_MANAGED")
        when = self.member("DynamicShapesKernelSpecializationStrategy", "NONE" if shapes_vary else "EAGER")
        if when is None:
            return engine.create_execution_context(given)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(given)
        config.dynamic_shapes_kernel_specialization_strategy = when
        return engine.create_execution_context(config)


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


_found: dict[str, Library] = {}


def find_library(flavour: str = "auto") -> Library:
    """``flavour``: one of ``FLAVOURS``, or "auto": the first that is there. Raises ``ModelRefused``: none is usable.

    One object a flavour and process: the library logs to the first logger that it was given, whoever asks later.
    """
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
        if name not in _found or _found[name].module is not module:
            log = Log()
            _found[name] = Library(name, module, version, log, _logger(module, log))
        return _found[name]
    raise ModelRefused(
        "TensorRT is not usable here",
        found="; ".join(problems),
        allowed="tensorrt 10.3 to 11.x, or tensorrt_rtx 1.x",
        hint=_HOW,
    )
