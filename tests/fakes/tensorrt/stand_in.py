"""Puts the stand-in for TensorRT, in a version of choice, where `import tensorrt` (or `tensorrt_rtx`) finds it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from taktd.engines.engine import EngineSpec
from taktd.engines.gpu import GpuOptions, build_request
from taktd.engines.tensorrt_build import build_plan
from taktd.engines.tensorrt_library import Library

SITE = Path(__file__).resolve().parent / "site"
VERSIONS = ("11.4.0.106", "10.16.1.11", "10.3.0")
RTX = "1.7.1.116"  # the same under another name: `tensorrt_rtx`


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSIONS[0]) -> None:
    """For this process until the test ends, and for the processes that it starts."""
    monkeypatch.setenv("FAKE_TENSORRT_VERSION", VERSIONS[0] if version == RTX else version)
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    monkeypatch.syspath_prepend(str(SITE))
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def built(library: Library, spec: EngineSpec, **options: object) -> bytes:
    """The plan of a model for device 0; options are those of the request."""
    request = replace(build_request(spec, 0, GpuOptions("")), **options)  # type: ignore[arg-type]
    return build_plan(library, request, lambda *_: None, lambda: False)
