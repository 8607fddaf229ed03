"""Compile pycuda's wheel for the Python that runs this, against the numpy that taktd brings. `packaging/gpu` calls it,
on the host or in a small system of the other Debian release.

Usage: pycuda_wheel.py SOURCES OUT. SOURCES has pycuda's source and the wheels of numpy, setuptools and CUDA's headers.
Needs g++, the Python's headers and nothing else: no pip, no network, no CUDA toolkit, no driver.

What is linked against in the driver's place has its name and nothing in it, so the extension asks for libcuda.so.1 by
name, and the symbols are the driver's of the machine it runs on.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SITECONF = """\
CUDA_ROOT = "{here}"
CUDA_INC_DIR = ["{here}/include"]
CUDADRV_LIB_DIR = ["{here}"]
CUDADRV_LIBNAME = ["cuda"]
CUDART_LIB_DIR = CURAND_LIB_DIR = CUDART_LIBNAME = CURAND_LIBNAME = []
CUDA_ENABLE_GL = CUDA_ENABLE_CURAND = CUDA_TRACE = False
CXXFLAGS = ["-O2", "-w", "-ffile-prefix-map={here}=."]
LDFLAGS = BOOST_INC_DIR = BOOST_LIB_DIR = BOOST_PYTHON_LIBNAME = BOOST_THREAD_LIBNAME = []
BOOST_COMPILER = "gcc"
USE_SHIPPED_BOOST = True
CUDA_PRETEND_VERSION = None
"""


def unpack(sources: Path, here: Path) -> Path:
    """Lay out what the compilation needs below ``here``; returns pycuda's folder."""
    for wheel in sources.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(here / "site")
    (here / "include").mkdir()
    for header in (here / "site").glob("nvidia/*/include/*"):
        header.rename(here / "include" / header.name)
    subprocess.run(["tar", "-xzf", next(sources.glob("pycuda-*.tar.gz")), "-C", here], check=True)
    driver = ["cc", "-shared", "-fPIC", "-x", "c", "-Wl,-soname,libcuda.so.1", "-o", str(here / "libcuda.so"), "-"]
    subprocess.run(driver, input=b"int taktd_gpu_build;\n", check=True)
    pycuda = next(here.glob("pycuda-*"))
    (pycuda / "siteconf.py").write_text(SITECONF.format(here=here), encoding="utf-8")
    return pycuda


def compile_on_all_cores() -> None:
    """Make setuptools compile an extension's sources side by side: Boost.Python takes minutes."""
    importlib.import_module("setuptools")  # puts its own distutils in place
    from distutils.compilers.C.base import Compiler

    def compile_(self: Any, sources: Any, output_dir: Any = None, macros: Any = None, include_dirs: Any = None,
                 debug: bool = False, extra_preargs: Any = None, extra_postargs: Any = None, depends: Any = None,
                 ) -> Any:  # fmt: skip
        macros, objects, post, pp_opts, build = self._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        options = self._get_cc_args(pp_opts, debug, extra_preargs)

        def one(name: str) -> None:
            self._compile(name, *build[name], options, post, pp_opts)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, build))
        return objects

    Compiler.compile = compile_


def judge(out: Path) -> None:
    """Whether the extension asks for the driver, and for nothing else that is not of the distribution."""
    (wheel,) = out.glob("pycuda-*.whl")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        (name,) = (name for name in archive.namelist() if "/_driver." in name)
        told = subprocess.run(
            ["readelf", "-d", archive.extract(name, folder)], capture_output=True, text=True, check=True
        )
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", told.stdout))
    if needed - {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"} != {"libcuda.so.1"}:
        sys.exit(
            f"pycuda_wheel: {name} needs {sorted(needed)}: libcuda.so.1 and the distribution's libraries were expected"
        )


def main() -> None:
    sources, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory(prefix="taktd-gpu-") as folder:
        pycuda = unpack(sources, Path(folder).resolve())
        # setuptools from SOURCES, not the system's.
        sys.path.insert(0, str(pycuda.parent / "site"))
        sys.path.insert(0, str(pycuda))
        os.chdir(pycuda)
        compile_on_all_cores()
        out.mkdir(parents=True, exist_ok=True)
        # Stands before the libraries: the driver shall be asked for by its name, though what is linked against has none
        # of the symbols. They are bound when they are called: a driver may lack one that is newer than it.
        os.environ["LDFLAGS"] = "-Wl,--no-as-needed -Wl,-z,relro,-z,lazy"
        sys.argv = ["setup.py", "-q", "bdist_wheel", "-d", str(out)]
        runpy.run_path("setup.py", run_name="__main__")
        judge(out)


if __name__ == "__main__":
    main()
