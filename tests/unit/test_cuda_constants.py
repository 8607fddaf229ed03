"""What we declare of the CUDA driver API is what NVIDIA's cuda.h declares, where that header is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "drivers" / "cuda_api.h"


def header_folder() -> Path | None:
    places = [*Path("/usr/local").glob("cuda*/include"), Path("/usr/include")]
    return next((p for p in places if (p / "cuda.h").is_file()), None)


@pytest.fixture
def cuda_h() -> Path:
    folder = header_folder()
    if folder is None or shutil.which("cc") is None:
        pytest.skip("no CUDA header here (cuda.h)")
    return folder


def compile_against(folder: Path, source: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "check.c"
    path.write_text(source)
    command = ["cc", "-std=gnu11", "-c", "-o", "/dev/null", f"-I{folder}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def declared() -> dict[str, int]:
    found = re.findall(r"^\s+([A-Z][A-Z0-9_]+) = (-?\d+),", API.read_text(), re.MULTILINE)
    return {name: int(value) for name, value in found}


def real_name(ours: str) -> str:
    if ours.startswith("ATTRIBUTE_"):
        return f"CU_DEVICE_{ours}"
    return {
        "CAPTURE_MODE_THREAD_LOCAL": "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL",
        "MEMHOSTALLOC_PORTABLE_DEVICEMAP": "CU_MEMHOSTALLOC_PORTABLE|CU_MEMHOSTALLOC_DEVICEMAP",
        "MEMHOSTREGISTER_PORTABLE_DEVICEMAP": "CU_MEMHOSTREGISTER_PORTABLE|CU_MEMHOSTREGISTER_DEVICEMAP",
        "WRITE_VALUE_DEFAULT": "CU_STREAM_WRITE_VALUE_DEFAULT",
        "TAKT_CUDA_SUCCESS": "CUDA_SUCCESS",
        "TAKT_CUDA_NOT_READY": "CUDA_ERROR_NOT_READY",
        "TAKT_CUDA_NOT_SUPPORTED": "CUDA_ERROR_NOT_SUPPORTED",
    }.get(ours, f"CU_{ours}")


def test_constants_are_nvidias(cuda_h: Path, tmp_path: Path) -> None:
    ours = {name: value for name, value in declared().items() if name != "TAKT_CUDA_TIMED_OUT"}
    assert len(ours) > 15
    checks = "".join(f'_Static_assert(({real_name(n)}) == {v}, "{n}");\n' for n, v in ours.items())
    done = compile_against(cuda_h, f"#include <cuda.h>\n{checks}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_parameters_are_nvidias(cuda_h: Path, tmp_path: Path) -> None:
    """Each entry takes as many parameters, of the same sizes and kinds (all handles are pointers)."""
    entries = re.findall(r"X\((cu\w+), \((.*?)\)\)", API.read_text())
    assert len(entries) > 40
    calls = []
    for name, parameters in entries:
        values = []
        for parameter in parameters.split(", "):
            plain = parameter.strip()
            values.append("(void *)0" if "*" in plain or plain == "CUhandle" else f"({plain})0")
        # void * converts to each pointer type, and an integer where a pointer is wanted is an error
        calls.append(f"    (void){name}({', '.join(values)});\n")
    source = "#include <stdint.h>\n#include <cuda.h>\nvoid f(void);\nvoid f(void)\n{\n" + "".join(calls) + "}\n"
    source = "#define cuEventElapsedTime cuEventElapsedTime\n" + source
    done = compile_against(cuda_h, '#pragma GCC diagnostic error "-Wint-conversion"\n' + source, tmp_path)
    assert done.returncode == 0, done.stderr


def test_errors_are_nvidias(cuda_h: Path) -> None:
    """Every code of our table carries NVIDIA's name for it."""
    from taktd.drivers.cuda_fault import KINDS

    named = dict(re.findall(r"CUDA_(?:ERROR_)?(\w+)\s*=\s*(\d+)", (cuda_h / "cuda.h").read_text()))
    numbers = {int(number) for number in named.values()}
    assert set(KINDS) <= numbers
