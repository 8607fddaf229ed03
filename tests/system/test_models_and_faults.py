"""A real daemon with a simulated device and models as versions: faults, verification, the store, from outside."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests import models
from tests.conftest import Start
from tests.running import Running, eventually

YAML = """\
devices: {{sim0: {{driver: sim, cost: 200us, seed: 3{device}}}}}
models:
  go1: {{path: {folder}/store/go1, version: {version}{model}}}
loops:
  walk: {{model: go1, device: sim0, period: 20ms, budget: 2ms, on_late: run}}
admission: {{on_refusal: uncertified}}
{top}
"""


def yaml(folder: Path, version: str = "latest", device: str = "", model: str = "", top: str = "") -> str:
    models.identity(folder / "store/go1/1/model.onnx", (4,))
    return YAML.format(folder=folder, version=version, device=device, model=model, top=top)


def inject(running: Running, *arguments: str) -> dict[str, object]:
    done = running.taktctl("fault", "inject", "sim0", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_each_fault_is_what_the_client_sees(taktd: Start, tmp_path: Path) -> None:
    running = taktd(yaml(tmp_path, model=", non_finite: {y: forbid}", top="allow_faults: true"))
    with running.connect() as node, node.attach("walk") as lane:

        def infer() -> str:
            lane.inputs["x"][:] = [1, 2, 3, 4]
            return str(lane.infer(timeout_us=5e6).status)

        assert infer() == "ok"
        np.testing.assert_array_equal(lane.outputs["y"], [1, 2, 3, 4])
        for kind in ("oom", "error", "nan"):
            inject(running, kind)
            assert infer() == "failed", kind
            assert infer() == "ok", kind
        assert inject(running, "slow=30x")["runs"] == 0
        reply = lane.infer(timeout_us=5e6)
        assert reply.ok
        assert reply.overrun
        inject(running, "none")
        assert infer() == "ok"
        inject(running, "lost")
        assert infer() in ("ok", "lost"), "the process ends; another one does the job again, or says that it was lost"
        assert infer() == "ok"
    assert running.taktctl_json("fault", "list")["faults"] == [
        {"device": "sim0", "kind": "lost", "factor": 1, "runs": 1}
    ]
    eventually(lambda: "NaN" in running.log, what="the log says it, when the executor has time")


def test_a_reply_says_that_an_output_was_flagged(taktd: Start, tmp_path: Path) -> None:
    running = taktd(yaml(tmp_path, model=", non_finite: {y: flag}"))
    with running.connect() as node, node.attach("walk") as lane:
        for value, flagged in ((1, False), (np.nan, True), (np.inf, True), (2, False)):
            lane.inputs["x"][:] = value
            reply = lane.infer(timeout_us=5e6)
            assert reply.ok
            assert reply.not_finite is flagged, value
            np.testing.assert_array_equal(lane.outputs["y"], value)
    told = "output 'y' of model 'go1' has NaN or infinity in it"
    eventually(lambda: told in running.log, what="the log says it, when the executor has time")


def test_a_hanging_engine_does_not_keep_the_daemon_from_stopping(taktd: Start, tmp_path: Path) -> None:
    running = taktd(yaml(tmp_path, top="allow_faults: true"))
    with running.connect() as node, node.attach("walk") as lane:
        inject(running, "hang")
        assert lane.infer(timeout_us=300_000).status == "pending"
    assert running.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["fault", "inject", "sim0", "oom"], 1, "not allowed"),
        (["fault", "inject", "sim0", "lightning"], 2, "is no fault"),
        (["fault", "inject", "sim0", "oom", "--runs", "-1"], 2, "not in the range"),
        (["fault", "inject", "sim0"], 2, "Missing argument"),
        (["model", "activate", "go1", "9"], 1, "no version 9"),
        (["model", "activate", "go1", "x"], 2, "not a valid integer"),
        (["model", "activate", "go2", "1"], 1, "no model"),
        (["model", "add", "go1", "/none/x.onnx"], 2, "does not exist"),
        (["model", "add", "go1", "/etc/hostname"], 1, "no ONNX model"),
        (["model", "rollback", "go1"], 1, "no version to go back to"),
        (["model", "remove", "go1", "1"], 1, "in use"),
        (["model", "list", "go2"], 1, "no model"),
    ],
)
def test_bad_input_to_the_commands(one_daemon: Running, arguments: list[str], code: int, what: str) -> None:
    done = one_daemon.taktctl(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert what in done.stderr
    assert done.stderr.count("to do: ") <= 1


@pytest.fixture(scope="module")
def one_daemon(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("one")
    running = Running(folder, yaml(folder))
    running.start().await_ready()
    yield running
    running.close()


def test_versions_from_outside(taktd: Start, tmp_path: Path) -> None:
    running = taktd(yaml(tmp_path))
    new = models.identity(tmp_path / "new.onnx", (6,))
    assert "version 2" in running.taktctl("model", "add", "go1", str(new)).stdout
    [entry] = running.taktctl_json("model", "list", "go1")["models"]
    assert [(v["version"], v["active"]) for v in entry["versions"]] == [(1, True), (2, False)]
    assert entry["serving"] == 1
    assert "new.onnx" in running.taktctl("model", "list").stdout
    assert running.taktctl("model", "remove", "go1", "2").returncode == 0
    assert not (tmp_path / "store/go1/2").exists()


def test_models_are_shown_with_version_digest_and_what_they_were_compared_with(taktd: Start, tmp_path: Path) -> None:
    ones = np.ones((2, 1), np.float32)
    np.savez(tmp_path / "golden.npz", x=ones, y=ones)
    for name in ("bare", "sampled"):
        models.identity(tmp_path / f"{name}.onnx")
    text = yaml(tmp_path).replace("devices: {", "devices: {cpu0: {driver: cpu}, ").replace("models:\n", "models:\n"
        f"  bare: {{path: {tmp_path}/bare.onnx, device: cpu0}}\n"
        f"  sampled: {{path: {tmp_path}/sampled.onnx, device: cpu0, verify: {{samples: {tmp_path}/golden.npz}}}}\n"
    )  # fmt: skip
    running = taktd(text)
    found = {model["name"]: model for model in running.taktctl_json("models")["models"]}
    assert (found["go1"]["version"], found["bare"]["version"]) == (1, None)
    assert found["go1"]["verified"] is None
    assert "simulated" in found["go1"]["not_verified"]
    bare, sampled = found["bare"]["verified"], found["sampled"]["verified"]
    assert (bare["source"], bare["samples"], bare["file"]) == ("random", 4, None)
    assert (sampled["source"], sampled["samples"], sampled["file"]) == ("golden", 2, f"{tmp_path}/golden.npz")
    assert sampled["worst"] == {"y": 0.0}
    told = running.taktctl("models").stdout
    for word in (found["bare"]["digest"][:12], "random, 4 samples", "golden.npz, 2 samples", "go1 is not verified"):
        assert word in told


def test_without_a_daemon_there_is_nothing_to_ask(tmp_path: Path) -> None:
    folder = tmp_path / "nobody"
    folder.mkdir()
    running = Running(folder, yaml(folder))
    try:
        for arguments in (["model", "list"], ["model", "rollback", "go1"], ["fault", "inject", "sim0", "oom"]):
            assert running.taktctl(*arguments).returncode == 3
    finally:
        running.close()


def ended(taktd: Start, text: str) -> str:
    """The log of a daemon that refused to start."""
    running = taktd(text, wait=False)
    assert running.process.wait(30) == 78
    return running.log


def test_a_version_that_does_not_exist_is_refused_at_start(taktd: Start, tmp_path: Path) -> None:
    log = ended(taktd, yaml(tmp_path, version="7"))
    assert "model go1: there is no version 7" in log
    assert "to do: there are 1" in log


def test_a_version_that_was_changed_on_disk_is_refused_at_start(taktd: Start, tmp_path: Path) -> None:
    running = taktd(yaml(tmp_path))
    running.taktctl("model", "add", "go1", str(models.identity(tmp_path / "new.onnx", (6,))))
    assert running.stop() == 0
    file = tmp_path / "store/go1/2/model.onnx"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    log = ended(lambda *a, **k: taktd(*a, name="again", **k), yaml(tmp_path, version="2"))
    assert "is not what was imported" in log


def test_an_engine_that_computes_something_else_is_refused_with_numbers(taktd: Start, tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", x=np.ones((1, 4), np.float32), y=np.full((1, 4), 2, np.float32))
    log = ended(
        taktd, yaml(tmp_path, device=", outputs: onnx", model=f", verify: {{samples: {tmp_path}/g.npz, atol: 0.5}}")
    )
    assert "the engine of model 'go1' does not compute what the model says" in log
    assert "1.0 in y[0] of sample 0, expected 2.0, 1 apart" in log
    assert "0.5 + 0.001 x |expected|" in log


@pytest.mark.parametrize(
    ("model", "what"),
    [(", non_finite: {z: forbid}", "no output 'z'"), (", verify: {samples: none.npz}", "can't be used")],
)
def test_rules_that_do_not_fit_the_model_are_refused(taktd: Start, tmp_path: Path, model: str, what: str) -> None:
    assert what in ended(taktd, yaml(tmp_path, device=", outputs: onnx", model=model))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: needs root")
def test_a_full_disk_during_an_import(taktd: Start, tmp_path: Path) -> None:
    small = tmp_path / "store"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this container may not mount")
    try:
        running = taktd(yaml(tmp_path))
        large = models.mlp(tmp_path / "large.onnx", (48, 512, 12))
        done = running.taktctl("model", "add", "go1", str(large))
        assert done.returncode == 1
        assert os.strerror(errno.ENOSPC).lower() in done.stderr
        assert "make room" in done.stderr
        assert sorted(p.name for p in (small / "go1").iterdir()) == ["1"]
        with running.connect() as node, node.attach("walk") as lane:
            assert lane.infer().ok
        assert running.stop() == 0
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


def test_a_fallback_with_other_tensors_is_refused_at_start(taktd: Start, tmp_path: Path) -> None:
    models.identity(tmp_path / "small.onnx", (5,))
    text = yaml(tmp_path)
    for old, new in (
        ("devices: {", "devices: {cpu0: {driver: cpu}, "),
        ("models:\n", f"models:\n  small: {{path: {tmp_path}/small.onnx}}\n"),
        ("on_late: run", "fallback: [{device: cpu0, model: small}]"),
    ):
        text = text.replace(old, new)
    log = ended(taktd, text)
    assert "loops.walk.fallback[0]: model small can't stand in for go1: found input x FP32[5], needed x FP32[4]" in log


def test_an_activated_version_answers_on_the_lane_that_was_there(taktd: Start, tmp_path: Path) -> None:
    running = taktd(yaml(tmp_path, device=", outputs: onnx").replace("on_late: run", "on_late: run, probation: 0s"))
    tensors = [models.value(name, models.FP32, (4,)) for name in "xy"]
    negated = models.save(tmp_path / "neg.onnx", [helper.make_node("Neg", ["x"], ["y"])], tensors[:1], tensors[1:])
    with running.connect() as node, node.attach("walk") as lane:

        def answer() -> list[float]:
            lane.inputs["x"][:] = [1, 2, 3, 4]
            assert lane.infer(timeout_us=5e6).ok
            return [float(value) for value in lane.outputs["y"]]

        assert answer() == [1, 2, 3, 4]
        assert running.taktctl("model", "add", "go1", str(negated)).returncode == 0
        assert answer() == [1, 2, 3, 4]
        done = running.taktctl("model", "activate", "go1", "2")
        assert done.returncode == 0, done.stderr
        assert answer() == [-1, -2, -3, -4]
        assert running.taktctl("model", "rollback", "go1").returncode == 0
        assert answer() == [1, 2, 3, 4]
    assert running.taktctl_json("model", "list", "go1")["models"][0]["serving"] == 1


@pytest.mark.parametrize("kind", ["loop", "model"])
def test_a_version_with_other_tensors_is_not_activated_under_a_client(taktd: Start, tmp_path: Path, kind: str) -> None:
    running = taktd(yaml(tmp_path, device=", outputs: onnx").replace("on_late: run", "on_late: run, probation: 0s"))
    assert running.taktctl("model", "add", "go1", str(models.identity(tmp_path / "wide.onnx", (6,)))).returncode == 0
    with running.connect() as node, node.attach("walk" if kind == "loop" else "go1", kind=kind) as lane:
        done = running.taktctl("model", "activate", "go1", "2")
        assert (done.returncode, done.stdout) == (1, "")
        assert "input x is FP32[4], and would be FP32[6]" in done.stderr
        assert f"(uid {os.geteuid()}, pid {os.getpid()}) on {kind} {'walk' if kind == 'loop' else 'go1'}" in done.stderr
        assert "`version: 2`" in done.stderr
        assert lane.infer(timeout_us=5e6).ok
        assert running.loop("walk")["switches"] == {"start": 1}
    [entry] = running.taktctl_json("model", "list", "go1")["models"]
    assert (entry["serving"], [v["active"] for v in entry["versions"]]) == (1, [True, False])
    # Nobody is attached any more: now it goes through, and who comes finds the new shape.
    done = running.taktctl("model", "activate", "go1", "2")
    assert done.returncode == 0, done.stderr
    with running.connect() as node, node.attach("walk") as lane:
        assert lane.inputs["x"].shape == (6,)
        assert lane.infer(timeout_us=5e6).ok
        assert "input x is FP32[6], and would be FP32[4]" in running.taktctl("model", "rollback", "go1").stderr
