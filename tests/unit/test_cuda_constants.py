"""What we declare of the CUDA driver API is what NVIDIA's cuda.h declares, where that header is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "drivers" / "cuda_api.h"
FAKE = ROOT / "tests" / "fakes" / "cuda"
ASKED = 12000  # of cuGetProcAddress


def header_folder() -> Path | None:
    """The toolkit's, or what `make test-gpu-fakes` has fetched."""
    fetched = (ROOT / "build" / "gpu-fakes").glob("**/headers/nvidia/cuda_runtime/include")
    places = [*Path("/usr/local").glob("cuda*/include"), Path("/usr/include"), *fetched]
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


def entries() -> list[tuple[str, str]]:
    """(name, parameters) of each entry that our module asks the driver for."""
    found = re.findall(r"X\((cu\w+), \((.*?)\)\)", API.read_text().replace("\\\n", ""))
    assert len(found) > 45
    return found


def call_with(parameters: str) -> str:
    """Arguments of our types: void * converts to each pointer type, an integer in a pointer's place is an error."""
    plain = [parameter.strip() for parameter in parameters.split(",")]
    return ", ".join("(void *)0" if "*" in p or p == "CUhandle" else f"({p})0" for p in plain)


def test_parameters_are_nvidias(cuda_h: Path, tmp_path: Path) -> None:
    """Those of the version that cuGetProcAddress answers with: the newest that is not newer than what is asked for.

    The library has several versions of many entries, with other parameters.
    """
    typedefs = (cuda_h / "cudaTypedefs.h").read_text()
    source = ['#pragma GCC diagnostic error "-Wint-conversion"', "#include <stdint.h>", "#include <cuda.h>"]
    calls = []
    for name, parameters in entries():
        pattern = rf"typedef CUresult \(CUDAAPI \*PFN_{name}_v(\d+)\)\((.*?)\);"
        known = {int(version): real for version, real in re.findall(pattern, typedefs)}
        real = known[max(version for version in known if version <= ASKED)]
        source.append(f"typedef CUresult (CUDAAPI *real_{name})({real});")
        calls.append(f"    (void)((real_{name})0)({call_with(parameters)});")
    source += ["void f(void);", "void f(void)", "{", *calls, "}", ""]
    done = compile_against(cuda_h, "\n".join(source), tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"#define CUDA_VERSION_ASKED {ASKED}\n" in API.read_text()


def test_the_simulated_driver_answers_with_nvidias_errors(cuda_h: Path) -> None:
    named = {int(number): name for name, number in error_names(cuda_h)}
    ours = re.search(r"enum \{\n    OK = 0,(.*?)\};", (FAKE / "fake.h").read_text(), re.DOTALL)
    assert ours is not None
    pairs = re.findall(r"([A-Z_]+) = (\d+)", ours[1])
    assert len(pairs) > 15
    short = {"NO_DEVICE", "ALREADY_REGISTERED", "NOT_REGISTERED"}
    for name, number in pairs:
        real = named[int(number)]
        assert name in short or name in (real, real.removeprefix("STREAM_"), f"{real}ED"), f"{name}: {real}"
    for number, name in re.findall(r'\{(\d+), "(CUDA_\w+)"', (FAKE / "graph.c").read_text()):
        assert name in (f"CUDA_ERROR_{named[int(number)]}", f"CUDA_{named[int(number)]}")


def test_the_simulated_driver_knows_attributes_by_nvidias_numbers(cuda_h: Path, tmp_path: Path) -> None:
    text = (FAKE / "device.c").read_text()
    found = re.findall(r"case (\d+): \*value = [^;]+; break;\s+/\* ([A-Z_0-9]+)(?:: \w+)? \*/", text)
    assert len(found) > 12
    checks = "".join(f'_Static_assert(CU_DEVICE_ATTRIBUTE_{name} == {number}, "{name}");\n' for number, name in found)
    done = compile_against(cuda_h, f"#include <cuda.h>\n{checks}", tmp_path)
    assert done.returncode == 0, done.stderr


def error_names(folder: Path) -> list[tuple[str, str]]:
    return re.findall(r"CUDA_(?:ERROR_)?(\w+)\s*=\s*(\d+)", errors_of(folder))


def errors_of(folder: Path) -> str:
    text = (folder / "cuda.h").read_text()
    return text[text.index("typedef enum cudaError_enum") : text.index("} CUresult;")]


def test_errors_are_nvidias(cuda_h: Path) -> None:
    """Every code of our table is one of NVIDIA's."""
    from taktd.drivers.cuda_fault import KINDS

    assert set(KINDS) <= {int(number) for _, number in error_names(cuda_h)}


def test_what_nvidia_calls_fatal_for_the_process_sticks(cuda_h: Path) -> None:
    """ "This leaves the process in an inconsistent state and any further CUDA work will return the same error." """
    from taktd.drivers.cuda_fault import KINDS

    told = re.findall(r"/\*\*(.*?)\*/\s*CUDA_ERROR_\w+\s*=\s*(\d+)", errors_of(cuda_h), re.DOTALL)
    fatal = {int(number) for text, number in told if "inconsistent" in text}
    assert len(fatal) >= 10
    assert {code for code in fatal if not KINDS.get(code, (None, False))[1]} == set()
