"""GPUs in the configuration: what can be said of one, what is refused, and what its executor is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taktd.daemon.certification.measurements import identity
from taktd.daemon.config.configuration import Configuration, ConfigurationRefused, load, settings
from taktd.daemon.supervision.device_plan import plans_of
from taktd.daemon.supervision.engine_plan import driver_plan
from taktd.engines.gpu import GpuOptions

MS = 1_000_000
INSPECTION: dict[str, Any] = {"digest": "d", "runtime": "r", "inputs": [], "outputs": [], "dynamic": False}


def loaded(folder: Path, gpu: str, loops: str = "", more: str = "") -> Configuration:
    file = folder / "taktd.yaml"
    file.write_text(
        f"devices: {{gpu0: {{driver: cuda, gpu: {gpu}}}{more}}}\n"
        f"models: {{walk: {{path: w.onnx}}, look: {{path: l.onnx}}}}\n{loops}"
    )
    return load(file)


def driver(configuration: Configuration, folder: Path) -> dict[str, Any]:
    plans = plans_of(configuration, dict.fromkeys(configuration.models, INSPECTION))
    return driver_plan(plans["gpu0"], folder)


def test_a_uuid_is_enough(tmp_path: Path) -> None:
    gpu = loaded(tmp_path, "GPU-1234abcd").devices["gpu0"].gpu
    assert gpu is not None
    assert (gpu.device, gpu.runtime, gpu.plans, gpu.plugins) == ("GPU-1234abcd", "tensorrt", {}, ())
    assert loaded(tmp_path, "0").devices["gpu0"].gpu.device == "0"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("{device: 0}", "device"),
        ("{device: GPU-1, plugins: [p.so]}", "not an absolute path"),
        ("{device: GPU-1, plans: {walk: w.plan}}", "not an absolute path"),
        ("{device: GPU-1, plans: {fly: /w.plan}}", "is no model"),
        ("{device: GPU-1, timing_cache: t}", "not an absolute path"),
        ("{device: GPU-1, pin_tactics: true}", "timing_cache"),
        ("{device: GPU-1, runtime: onnxruntime, plans: {walk: /w.plan}}", "only with runtime: tensorrt"),
        ("{device: GPU-1, run_limit: 0s}", "run_limit"),
        ("{device: GPU-1, optimization_level: 9}", "optimization_level"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(tmp_path: Path, gpu: str, words: str) -> None:
    with pytest.raises(ConfigurationRefused) as caught:
        loaded(tmp_path, gpu)
    assert words in str(caught.value)
    assert "devices.gpu0.gpu" in str(caught.value)


def test_two_devices_that_say_they_are_one_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused, match="the same GPU as that of gpu0"):
        loaded(tmp_path, "GPU-1", more=", left: {driver: cuda, gpu: gpu-1}")


LOOPS = """\
loops:
  a: {model: walk, device: gpu0, period: 20ms, deadline: 10ms, criticality: soft}
  b: {model: walk, device: gpu0, period: 50ms, criticality: hard}
"""


def test_a_models_stream_is_as_urgent_as_its_most_critical_loop(tmp_path: Path) -> None:
    told = driver(loaded(tmp_path, "GPU-1", LOOPS + "  c: {model: look, device: gpu0, period: 90ms}\n"), tmp_path)
    assert {name: GpuOptions.of(told, name).urgency for name in ("walk", "look")} == {"walk": 2, "look": 1}


@pytest.mark.parametrize(
    ("gpu", "loops", "limit_ns"),
    [
        ("GPU-1", "", 2000 * MS),  # best effort alone
        ("GPU-1", LOOPS, 100 * MS),  # ten times the shortest deadline
        ("GPU-1", LOOPS.replace("20ms, deadline: 10ms", "20ms, budget: 6ms"), 60 * MS),
        ("GPU-1", LOOPS.replace("20ms, deadline: 10ms", "2ms"), 50 * MS),  # never so short that a hiccup is a hang
        ("GPU-1", LOOPS.replace("20ms, deadline: 10ms", "9s").replace("50ms", "9s"), 2000 * MS),
        ("{device: GPU-1, run_limit: 7ms}", LOOPS, 7 * MS),
        ("{device: GPU-1, run_limit: 7ms}", "", 7 * MS),
    ],
)
def test_how_long_a_run_may_take_comes_from_what_was_promised(
    tmp_path: Path, gpu: str, loops: str, limit_ns: int
) -> None:
    assert GpuOptions.of(driver(loaded(tmp_path, gpu, loops), tmp_path), "walk").timeout_ns == limit_ns


def test_an_executor_is_told_how_engines_are_made(tmp_path: Path) -> None:
    text = (
        "{device: GPU-1, workspace: 2MiB, optimization_level: 4, plugins: [/p.so], plans: {walk: /w.plan},"
        " timing_cache: /t, pin_tactics: true, build_limit: 9s}"
    )
    told = driver(loaded(tmp_path, text), tmp_path)
    walk, look = GpuOptions.of(told, "walk"), GpuOptions.of(told, "look")
    assert (walk.plan, look.plan) == ("/w.plan", "")
    assert (walk.workspace_bytes, walk.optimization_level, walk.plugins) == (2 << 20, 4, ("/p.so",))
    assert (walk.timing_cache, walk.pin_tactics) == ("/t", True)
    assert told["build_limit_ns"] == 9_000 * MS


def test_another_plan_under_the_same_name_is_measured_again(tmp_path: Path) -> None:
    plan = tmp_path / "w.plan"
    configuration = loaded(tmp_path, f"{{device: GPU-1, plans: {{walk: {plan}}}}}")

    def called(model: str) -> str:
        return identity(configuration.devices["gpu0"], configuration.models[model], INSPECTION, 0)

    plan.write_bytes(b"one")
    one = called("walk"), called("look")
    plan.write_bytes(b"two")
    two = called("walk"), called("look")
    assert one[0] != two[0]
    assert one[1] == two[1]


def test_every_setting_of_a_gpu_is_listed() -> None:
    listed = {setting.key for setting in settings()}
    keys = ("device", "runtime", "workspace", "optimization_level", "plugins", "plans", "timing_cache", "pin_tactics")
    for key in (*keys, "build_limit", "run_limit"):
        assert f"devices.NAME.gpu.{key}" in {found.removesuffix(".NAME") for found in listed}
