"""Which taktd a process runs: told by the files, whatever the version number says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from taktd.daemon.handover.software import fingerprint, software


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "inner" / "__pycache__").mkdir(parents=True)
    (tmp_path / "executor.py").write_text("one")
    (tmp_path / "inner" / "_core.abi3.so").write_bytes(b"\x7fELF")
    return tmp_path


def test_the_same_files_are_the_same_software(code: Path) -> None:
    before = fingerprint((code,))
    (code / "inner" / "__pycache__" / "executor.cpython-313.pyc").write_bytes(b"byte code, made at the first start")
    (code / "notes.txt").write_text("no code")
    assert fingerprint((code,)) == before
    assert software() == software()


@pytest.mark.parametrize("name", ["executor.py", "inner/_core.abi3.so"])
def test_a_file_of_the_same_size_that_is_newer_is_another_one(code: Path, name: str) -> None:
    before = fingerprint((code,))
    os.utime(code / name, (time.time(), 1))
    assert fingerprint((code,)) != before


def test_a_file_more_or_less_is_another_one(code: Path) -> None:
    before = fingerprint((code,))
    (code / "more.py").write_text("")
    more = fingerprint((code,))
    (code / "executor.py").unlink()
    assert len({before, more, fingerprint((code,))}) == 3


def test_another_library_to_compute_with_is_another_one(code: Path) -> None:
    assert fingerprint((code,), libraries=("numpy",)) != fingerprint((code,), libraries=("absent", "onnxruntime"))
