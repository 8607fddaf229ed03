"""Simulated devices, fallbacks, versions and verification in a configuration: what is accepted, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from taktd.daemon.config.configuration import ConfigError, Configuration, ConfigurationRefused, load

BASE = """\
devices: {cpu0: {driver: cpu}, cpu1: {driver: cpu}, sim0: {driver: sim, DEVICE}}
models:
  go1: {path: store/go1, version: latest, MODEL}
  small: {path: small.onnx}
loops:
  walk: {model: go1, device: sim0, period: 1ms, LOOP}
TOP
"""


def parse(folder: Path, device: str = "", model: str = "", loop: str = "", top: str = "") -> Configuration:
    text = BASE.replace("DEVICE", device).replace("MODEL", model).replace("LOOP", loop).replace("TOP", top)
    (folder / "taktd.yaml").write_text(text)
    return load(folder / "taktd.yaml")


def error(folder: Path, key: str, **parts: str) -> ConfigError:
    with pytest.raises(ConfigurationRefused) as refused:
        parse(folder, **parts)
    found = [e for e in refused.value.errors if e.key == key]
    assert len(found) == 1, [str(e) for e in refused.value.errors]
    assert found[0].line > 0
    assert found[0].found or found[0].allowed or found[0].hint
    return found[0]


def test_everything_has_its_default(tmp_path: Path) -> None:
    c = parse(tmp_path)
    sim, walk, go1 = c.devices["sim0"], c.loops["walk"], c.models["go1"]
    assert sim.cost == ((1_000_000, 1_000_000),)
    assert (sim.outputs.kind, sim.seed) == ("identity", 1)
    assert (walk.fallback, walk.fallback_uncertified, walk.probation_ns) == ((), False, 3_000_000_000)
    assert (go1.version, c.models["small"].version) == ("latest", None)
    assert (go1.verify.samples, go1.verify.rtol, go1.non_finite) == (None, None, {})
    assert c.allow_faults is False


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("2ms", ((1_000_000, 2_000_000),)),
        ("0us", ((1_000_000, 0),)),
        ("{least: 1ms, most: 2ms}", ((0, 1_000_000), (1_000_000, 2_000_000))),
        ("{max: 3ms, p50: 1ms, p99.9: 2ms}", ((500_000, 1_000_000), (999_000, 2_000_000), (1_000_000, 3_000_000))),
    ],
)
def test_a_cost_is_a_time_a_range_or_percentiles(tmp_path: Path, text: str, points: object) -> None:
    assert parse(tmp_path, device=f"cost: {text}").devices["sim0"].cost == points


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("cost: 5", "cost", "not understood"),
        ("cost: fast", "cost", "not a duration"),
        ("cost: 61s", "cost", "too large"),
        ("cost: -1ms", "cost", "not a duration"),
        ("cost: {p50: 1ms}", "cost", "longest time"),
        ("cost: {p50: 2ms, max: 1ms}", "cost", "falls"),
        ("cost: {least: 2ms, most: 1ms}", "cost", "falls"),
        ("cost: {p50: 1ms, p50.0: 1ms, max: 2ms}", "cost", "falls"),
        ("cost: {p500: 1ms, max: 2ms}", "cost.p500", "no percentile"),
        ("cost: {p50: 1, max: 2ms}", "cost.p50", "not a duration"),
        ("outputs: zero", "outputs", "not understood"),
        ("outputs: {constant: .nan}", "outputs.constant", "not a plain number"),
        ("outputs: {constant: a}", "outputs.constant", "not a number"),
        ("outputs: {const: 1}", "outputs.const", "known key"),
        ("seed: -1", "seed", "not allowed"),
        ("seed: 1.5", "seed", "whole number"),
    ],
)
def test_a_wrong_simulated_device(tmp_path: Path, text: str, key: str, what: str) -> None:
    assert what in error(tmp_path, f"devices.sim0.{key}", device=text).what


def test_only_a_simulated_device_has_a_cost(tmp_path: Path) -> None:
    (tmp_path / "taktd.yaml").write_text("devices: {c: {driver: cpu, cost: 1ms, seed: 3}}\n")
    with pytest.raises(ConfigurationRefused) as refused:
        load(tmp_path / "taktd.yaml")
    assert {e.key for e in refused.value.errors} == {"devices.c.cost", "devices.c.seed"}
    assert all("driver: sim" in e.allowed for e in refused.value.errors)


def test_constants_and_onnx(tmp_path: Path) -> None:
    assert parse(tmp_path, device="outputs: {constant: 0.5}").devices["sim0"].outputs.constant == 0.5
    assert parse(tmp_path, device="outputs: onnx").devices["sim0"].outputs.kind == "onnx"


def test_fallbacks_in_all_forms(tmp_path: Path) -> None:
    walk = parse(
        tmp_path, loop="fallback: [cpu0, {device: cpu1, model: small}, {constant: {actions: [0, -1.5], z: 2}}]"
    ).loops["walk"]
    first, second, last = walk.fallback
    assert (first.kind, first.device, first.model) == ("device", "cpu0", "")
    assert (second.device, second.model) == ("cpu1", "small")
    assert (last.kind, last.constant) == ("constant", {"actions": (0.0, -1.5), "z": 2.0})
    assert parse(tmp_path, loop="fallback: hold").loops["walk"].fallback[0].kind == "hold"


def test_who_stands_in_is_known_by_device(tmp_path: Path) -> None:
    c = parse(tmp_path, loop="fallback: [cpu0, {device: cpu1, model: small}, hold], fallback_uncertified: true")
    assert [(loop.name, model) for loop, model in c.stand_ins_on("cpu0")] == [("walk", "go1")]
    assert [(loop.name, model) for loop, model in c.stand_ins_on("cpu1")] == [("walk", "small")]
    assert c.stand_ins_on("sim0") == ()


@pytest.mark.parametrize(
    ("text", "key", "what", "allowed"),
    [
        ("fallback: [cpu9]", "fallback[0]", "does not exist", "cpu0"),
        ("fallback: [cpu0, {device: cpu9}]", "fallback[1]", "does not exist", "cpu0"),
        ("fallback: [{device: cpu0, model: none}]", "fallback[0]", "model that does not exist", "go1"),
        ("fallback: [sim0]", "fallback[0]", "own device", "another"),
        ("fallback: [cpu0, {device: cpu0, model: small}]", "fallback[1]", "twice", "once"),
        ("fallback: [hold, cpu0]", "fallback[0]", "not the last", "always answer"),
        ("fallback: [{constant: {a: 0}}, hold]", "fallback[0]", "not the last", "always answer"),
        ("fallback: [{constant: {}}]", "fallback[0].constant", "not understood", "each output"),
        ("fallback: [{constant: {a: x}}]", "fallback[0].constant.a", "not a number", "finite"),
        ("fallback: [{constant: {a: 0}, device: cpu0}]", "fallback", "both", "hold"),
        ("fallback: [{model: small}]", "fallback", "not understood", "device"),
        ("fallback: [7]", "fallback", "not understood", "device"),
        ("fallback: [cpu0, cpu1, a, b, c]", "fallback", "too many", "4"),
        ("fallback_uncertified: true", "fallback_uncertified", "no meaning", "fallback"),
        ("fallback: [hold], fallback_uncertified: true", "fallback_uncertified", "no meaning", "fallback"),
        ("probation: 3", "probation", "not a duration", "unit"),
    ],
)
def test_a_wrong_fallback(tmp_path: Path, text: str, key: str, what: str, allowed: str) -> None:
    e = error(tmp_path, f"loops.walk.{key}", loop=text)
    assert what in e.what
    assert allowed in e.allowed


def test_the_only_device_is_no_fallback(tmp_path: Path) -> None:
    (tmp_path / "taktd.yaml").write_text(
        "devices: {c: {driver: cpu}}\nmodels: {m: {path: m}}\nloops: {l: {model: m, period: 1ms, fallback: [c]}}\n"
    )
    with pytest.raises(ConfigurationRefused, match="own device"):
        load(tmp_path / "taktd.yaml")


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "newest", "[1]", "true", "1000000000"])
def test_no_version(tmp_path: Path, value: str) -> None:
    text = f"devices: {{c: {{driver: cpu}}}}\nmodels: {{m: {{path: m, version: {value}}}}}\n"
    (tmp_path / "taktd.yaml").write_text(text)
    with pytest.raises(ConfigurationRefused, match="is no version") as refused:
        load(tmp_path / "taktd.yaml")
    assert "latest" in refused.value.errors[0].allowed


def test_samples_are_relative_to_the_file_that_says_so(tmp_path: Path) -> None:
    c = parse(
        tmp_path, model="verify: {samples: golden.npz, rtol: 0.01, atol: 0}, non_finite: {actions: forbid, b: flag}"
    )
    assert c.models["go1"].verify.samples == str(tmp_path / "golden.npz")
    assert (c.models["go1"].verify.rtol, c.models["go1"].verify.atol) == (0.01, 0.0)
    assert c.models["go1"].non_finite == {"actions": "forbid", "b": "flag"}


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("verify: {rtol: -0.1}", "verify.rtol", "negative"),
        ("verify: {rtol: tight}", "verify.rtol", "not a number"),
        ("verify: {atol: 1e-}", "verify.atol", "not a number"),
        ("verify: {atol: -1e-4}", "verify.atol", "negative"),
        ("verify: {samples: 7}", "verify.samples", "not text"),
        ("verify: off", "verify", "not a mapping"),
        ("non_finite: {actions: maybe}", "non_finite.actions", "choices"),
        ("non_finite: forbid", "non_finite", "not a mapping"),
    ],
)
def test_wrong_verification(tmp_path: Path, text: str, key: str, what: str) -> None:
    assert what in error(tmp_path, f"models.go1.{key}", model=text).what


def test_faults_are_allowed_by_true_only(tmp_path: Path) -> None:
    assert parse(tmp_path, top="allow_faults: true").allow_faults is True
    assert "true or false" in error(tmp_path, "allow_faults", top="allow_faults: 1").what
