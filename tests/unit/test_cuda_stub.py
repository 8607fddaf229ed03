"""The stub of `taktd.drivers._cuda` names what the module has, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from taktd.drivers import _cuda

STUB = Path(__file__).resolve().parents[2] / "drivers" / "_cuda.pyi"


def declared() -> set[str]:
    names = set()
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names - {"DeviceInfo"}


def test_the_stub_is_the_modules() -> None:
    assert declared() == {name for name in dir(_cuda) if not name.startswith("__")}


def test_before_the_driver_is_loaded_every_call_says_so() -> None:
    code = "from taktd.drivers import _cuda\n_cuda.device_count()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "libcuda is not loaded: call load() first" in done.stderr
    code = "from taktd.drivers import _cuda\n_cuda.Launch(1, 1, 1, 0, 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "not loaded" in done.stderr


@pytest.mark.parametrize("name", ["libc.so.6", "no-such-library.so"])
def test_a_library_that_is_no_driver_is_refused(name: str) -> None:
    code = f"from taktd.drivers import _cuda\n_cuda.load({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
