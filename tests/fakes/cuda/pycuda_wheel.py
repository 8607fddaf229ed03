"""`python tests/fakes/cuda/pycuda_wheel.py FOLDER`: real pycuda, built for this Python and its numpy, into FOLDER.

pycuda comes as source only. It is compiled once (minutes) against NVIDIA's header and linked against the simulated
libcuda, which has the symbols that it needs; the wheel stays in FOLDER/wheels. `make test-gpu-fakes` runs the tests
with FOLDER/site on the path: the default environment has no pycuda. nvidia-ml-py comes along, to hold its stand-ins to.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.fakes.cuda import simulated

PYCUDA = "pycuda==2026.1"
# cuda.h and cudaProfiler.h are in them; nothing of them is run. Not a toolkit's that may lie here: the same everywhere.
HEADERS = ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-profiler-api-cu12==12.9.79")
SITECONF = """\
CUDA_ROOT = {root!r}
CUDA_INC_DIR = {include!r}
CUDADRV_LIB_DIR = [{library!r}]
CUDADRV_LIBNAME = ["cuda"]
CUDART_LIB_DIR = CURAND_LIB_DIR = CUDART_LIBNAME = CURAND_LIBNAME = []
CUDA_ENABLE_GL = CUDA_ENABLE_CURAND = CUDA_TRACE = False
CXXFLAGS = ["-O1", "-w"]
LDFLAGS = BOOST_INC_DIR = BOOST_LIB_DIR = BOOST_PYTHON_LIBNAME = BOOST_THREAD_LIBNAME = []
BOOST_COMPILER = "gcc"
USE_SHIPPED_BOOST = True
CUDA_PRETEND_VERSION = None
"""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments], check=True)


def cuda_headers(folder: Path) -> list[str]:
    """The folders with NVIDIA's headers."""
    pip("download", "--no-deps", "-d", str(folder), *HEADERS)
    for name in folder.glob("nvidia_cuda_*.whl"):
        with zipfile.ZipFile(name) as wheel:
            wheel.extractall(folder / "headers")
    return [str(found) for found in (folder / "headers").glob("nvidia/*/include")]


def build(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir(parents=True, exist_ok=True)
    pip("download", "--no-deps", "--no-build-isolation", "--no-binary", "pycuda", "-d", str(source), PYCUDA)
    with tarfile.open(next(source.glob("pycuda-*.tar.gz"))) as archive:
        archive.extractall(source, filter="data")
    unpacked = next(p for p in source.glob("pycuda-*") if p.is_dir())
    places = {"root": str(source), "include": cuda_headers(source), "library": str(simulated.build().parent)}
    (unpacked / "siteconf.py").write_text(SITECONF.format(**places))
    print("compiling pycuda: minutes, once", file=sys.stderr)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheels"), str(unpacked))
    return next((folder / "wheels").glob("pycuda-*.whl"))


def main(folder: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = next((folder / "wheels").glob(f"pycuda-*-{tag}-*.whl"), None) or build(folder)
    if not all((folder / "site" / name).exists() for name in ("pycuda", "pynvml.py")):
        pinned = ["-c", str(simulated.ROOT / "constraints.txt"), "--no-deps", "--target", str(folder / "site")]
        pip("install", *pinned, str(wheel), "mako", "markupsafe", "pytools")
        pip("install", *pinned, "platformdirs", "siphash24", "typing-extensions", "nvidia-ml-py")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
