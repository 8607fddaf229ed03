"""Builds the two C extensions; everything else about the package is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

core = Extension(
    "taktd.ipc._core",
    sources=sorted(glob("ipc/_core*.c") + glob("ipc/core/*.c")),
    depends=sorted(glob("ipc/*.h") + glob("ipc/core/*.h")),
    define_macros=[("Py_LIMITED_API", "0x030A0000"), ("_GNU_SOURCE", None)]
    + [("TAKT_CORE_CLIENT", None) for _ in glob("ipc/_core_client.c")],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
    py_limited_api=True,
)
cuda = Extension(
    "taktd.drivers._cuda",
    sources=["drivers/_cuda.c", "drivers/cuda_launch.c"],
    depends=["drivers/cuda_api.h", "drivers/cuda_module.h"],
    define_macros=[("_GNU_SOURCE", None)],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
    libraries=["dl"],  # a library of its own before glibc 2.34
    py_limited_api=True,
)
setup(ext_modules=[core, cuda], options={"bdist_wheel": {"py_limited_api": "cp310"}})
