"""Which ONNX Runtime `import onnxruntime` gives here, found out without importing it.

It comes in several distributions (onnxruntime, onnxruntime-gpu) with one module name, and two may lie on the path: then
the first is imported, and what the installer's notes say of the other is wrong. So the module's own file is asked.
"""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

__all__ = ["onnxruntime_build"]


def onnxruntime_build() -> str:
    """ "onnxruntime 1.32.0", "onnxruntime-gpu 1.31.1"; "" where there is none."""
    try:
        found = find_spec("onnxruntime")
    except ValueError:  # something stands in its place that was never looked for on the path
        found = None
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            text = Path(folder, "capi", "build_and_package_info.py").read_text(encoding="utf-8")
        except OSError:
            continue
        values = dict(re.findall(r"""^(\w+) = ['"](.*)['"]""", text, re.MULTILINE))
        if "package_name" in values and "__version__" in values:
            return f"{values['package_name']} {values['__version__']}"
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""
