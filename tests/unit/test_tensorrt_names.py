"""The stand-in for TensorRT has nothing that the real bindings of the version it plays don't have.

Our code runs on the stand-in in each version (tests/conformance/test_engines.py): so each name that our code uses is a
name of the real bindings. The dumps are made from those by tests/fakes/tensorrt/dump_names.py.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from taktd.engines.tensorrt_types import _NAMES as TYPES
from tests.fakes.tensorrt import stand_in

NAMES = Path(stand_in.__file__).parent / "names"


def dump(version: str) -> dict[str, Any]:
    return json.loads((NAMES / f"{version}.json").read_text())


@pytest.fixture(params=[*stand_in.VERSIONS, stand_in.RTX])
def played(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    stand_in.install(monkeypatch, request.param)
    name = "tensorrt_rtx" if request.param == stand_in.RTX else "tensorrt"
    return importlib.import_module(name), dump(request.param)


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


def test_each_class_method_and_property_is_real(played: tuple[Any, dict[str, Any]]) -> None:
    module, real = played
    assert module.__version__ == real["version"]
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and not name.startswith("_") and value.__module__ == module.__name__
    }
    assert len(classes) > 20
    for name, kind in classes.items():
        assert name in real["classes"], f"{name} is no class of {real['version']}"
        known = real["classes"][name]
        if issubclass(kind, enum.Enum):
            assert set(kind.__members__) == set(known["enum"])
            continue
        for attribute, value in public(kind).items():
            if isinstance(value, type):
                assert f"{name}.{attribute}" in real["classes"]
            elif isinstance(value, property):
                assert attribute in known["properties"], f"{name}.{attribute}"
            else:
                assert attribute in known["methods"], f"{name}.{attribute}()"


def test_each_argument_is_called_as_in_the_real_bindings(played: tuple[Any, dict[str, Any]]) -> None:
    module, real = played
    compared = 0
    for name, kind in vars(module).items():
        if not isinstance(kind, type) or name.startswith("_") or "methods" not in real["classes"].get(name, {}):
            continue
        for method, value in public(kind).items():
            overloads = real["classes"][name]["methods"].get(method)
            if not overloads or not inspect.isfunction(value):
                continue
            ours = list(inspect.signature(value).parameters)
            shortest = [names[: len(ours)] for names in overloads]
            assert ours in shortest, f"{name}.{method}({', '.join(ours)}): real {overloads}"
            compared += 1
    assert compared > 30


def test_functions_and_instance_properties_are_real(played: tuple[Any, dict[str, Any]]) -> None:
    module, real = played
    assert "init_libnvinfer_plugins" in real["functions"]
    for kind, made in (
        ("IBuilderConfig", module.IBuilderConfig()),
        ("INetworkDefinition", module.INetworkDefinition()),
    ):
        for attribute in vars(made):
            assert attribute.startswith("_") or attribute in real["classes"][kind]["properties"], f"{kind}.{attribute}"


@pytest.mark.parametrize("version", [*stand_in.VERSIONS, stand_in.RTX])
def test_the_names_that_our_code_asks_for_by_text_are_real(version: str) -> None:
    """What goes through ``Library.member`` would silently be None if it were misspelt."""
    enums = {name: set(c["enum"]) for name, c in dump(version)["classes"].items() if "enum" in c}
    assert {"WORKSPACE"} <= enums["MemoryPoolType"]
    assert {"TF32", "ERROR_ON_TIMING_CACHE_MISS"} <= enums["BuilderFlag"]
    assert ("EDITABLE_TIMING_CACHE" in enums["BuilderFlag"]) == (version != "10.3.0")
    assert {"USER_MANAGED"} <= enums["ExecutionContextAllocationStrategy"]
    kernels = enums.get("DynamicShapesKernelSpecializationStrategy", set())
    assert {"EAGER", "NONE"} <= kernels if version == stand_in.RTX else not kernels
    assert {"STRONGLY_TYPED"} <= enums["NetworkDefinitionCreationFlag"]
    assert "DEVICE" in enums["TensorLocation"]
    assert "LINEAR" in enums["TensorFormat"]
    assert set(TYPES) <= enums["DataType"]


@pytest.mark.parametrize("version", stand_in.VERSIONS)
def test_what_strong_typing_makes_superfluous_is_not_used(version: str) -> None:
    sources = "".join(p.read_text() for p in (Path(__file__).parents[2] / "engines").glob("tensorrt*.py"))
    for forbidden in ("BuilderFlag.FP16", '"FP16")', "int8_calibrator", "execute_v2", "OBEY_PRECISION"):
        assert forbidden not in sources
