"""Which ONNX Runtime would be imported, told without importing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from taktd.daemon.handover.software import fingerprint
from taktd.engines.onnx_version import onnxruntime_build


def lay(folder: Path, name: str, version: str) -> None:
    (folder / "onnxruntime" / "capi").mkdir(parents=True)
    (folder / "onnxruntime" / "__init__.py").write_text("raise SystemExit('imported')\n")
    text = f"package_name = '{name}'\n__version__ = '{version}'\ncuda_version = '13.0'\n"
    (folder / "onnxruntime" / "capi" / "build_and_package_info.py").write_text(text)


def test_it_is_the_one_that_is_imported() -> None:
    assert onnxruntime_build() == f"onnxruntime {onnxruntime.__version__}"


def test_asking_imports_nothing() -> None:
    program = "import sys; from taktd.engines.onnx_version import onnxruntime_build as f; f(); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "onnxruntime" not in said.stdout.split()


def test_a_build_that_comes_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(())
    lay(tmp_path, "onnxruntime-gpu", "1.31.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "onnxruntime")
    assert onnxruntime_build() == "onnxruntime-gpu 1.31.1"
    assert fingerprint(()) != before  # executors that compute with the other one are replaced at a hand-over
