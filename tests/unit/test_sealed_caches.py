"""Caches: old or new at every step, never half; what is broken or foreign is announced and made again (FAULTS 8, 9)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taktd.daemon.certification.measurements import MeasurementStore, identity
from taktd.daemon.config.configuration import Model, load
from taktd.daemon.durable_file import SealBroken, read_sealed, write_sealed
from taktd.daemon.models.inspection import Inspector
from tests import models
from tests.fakes.failing_calls import counted, failing, fails, killed_at

OLD, NEW = {"a": 1}, {"a": [2, 3], "b": "ü"}
COSTS = {"1": {"p50_ns": 5}}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_each_failing_call_leaves_the_old_or_the_new(tmp_path: Path, number: int) -> None:
    path = tmp_path / "file.json"
    for at in range(1, counted(lambda: write_sealed(path, "k", OLD)) + 1):
        write_sealed(path, "k", OLD)
        with pytest.raises(OSError), failing(at, fails(number)):
            write_sealed(path, "k", NEW)
        assert read_sealed(path, "k") in (OLD, NEW)
        assert os.listdir(tmp_path) == ["file.json"]


def test_a_kill_at_each_call_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for at in range(1, counted(lambda: write_sealed(path, "k", OLD)) + 1):
        write_sealed(path, "k", OLD)
        killed_at(at, lambda: write_sealed(path, "k", NEW))
        assert read_sealed(path, "k") in (OLD, NEW)


@settings(deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_never_believed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    write_sealed(path, "k", NEW)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) * 8 - 1))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    try:
        assert read_sealed(path, "k") == NEW  # white space may flip to other white space
    except SealBroken:
        pass


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_a_truncated_file_is_not_believed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "file.json"
    write_sealed(path, "k", NEW)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * cut // 100])
    with pytest.raises(SealBroken, match="damaged"):
        read_sealed(path, "k")


def test_what_belongs_to_something_else_or_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert read_sealed(path, "k") is None
    write_sealed(path, "k", NEW)
    with pytest.raises(SealBroken, match="belongs to something else"):
        read_sealed(path, "other")
    path.chmod(0o666)
    with pytest.raises(SealBroken, match="written by everybody"):
        read_sealed(path, "k")
    path.chmod(0o640)
    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(SealBroken, match="is a link"):
        read_sealed(tmp_path / "link.json", "k")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(SealBroken, match="no regular file"):
        read_sealed(tmp_path / "pipe.json", "k")
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(SealBroken, match="uid 12345"):
            read_sealed(path, "k")


# ---- the caches that use it ----


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_broken_measurements_are_announced_and_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = MeasurementStore(tmp_path / "m")
    assert store.read("k") is None
    assert store.write("k", COSTS, 7, True)
    assert store.read("k") == {"costs": COSTS, "dispatch_ns": 7, "real_time": True, "refuted": ""}
    assert not capfd.readouterr().err
    damaged(tmp_path / "m" / "k.json")
    assert store.read("k") is None
    assert "are made again" in capfd.readouterr().err
    assert store.write("k", COSTS, 8, True)
    assert store.read("k") is not None


def test_a_disk_that_is_full_costs_the_next_start_time_and_nothing_else(tmp_path: Path) -> None:
    store = MeasurementStore(tmp_path / "m")
    store.write("k", COSTS, 1, True)
    with failing(2, fails(errno.ENOSPC)):  # the first makes a folder that is there
        assert not store.write("k", COSTS, 2, True)
    assert store.read("k") == {"costs": COSTS, "dispatch_ns": 1, "real_time": True, "refuted": ""}


def test_what_jobs_refuted_is_kept_with_the_reason_until_it_is_measured_anew(tmp_path: Path) -> None:
    store = MeasurementStore(tmp_path / "m")
    store.refute("k", "nothing is there yet")
    assert store.read("k") is None
    store.write("k", COSTS, 1, True)
    store.refute("k", "20 of the first 30 jobs took longer")
    said = "20 of the first 30 jobs took longer"
    assert store.read("k") == {"costs": COSTS, "dispatch_ns": 1, "real_time": True, "refuted": said}
    store.write("k", COSTS, 2, True)
    assert store.read("k") == {"costs": COSTS, "dispatch_ns": 2, "real_time": True, "refuted": ""}


def test_a_broken_inspection_is_announced_and_made_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inspector, model = Inspector(tmp_path / "i"), Model(path=str(models.identity(tmp_path / "m.onnx")))
    asked = []
    ask = Inspector._ask

    async def counted_ask(self: Inspector, model: Model) -> dict[str, Any]:
        asked.append(model.path)
        return await ask(self, model)

    monkeypatch.setattr(Inspector, "_ask", counted_ask)
    first = asyncio.run(inspector.inspect(model))
    assert asyncio.run(inspector.inspect(model)) == first
    assert len(asked) == 1
    damaged(next((tmp_path / "i").glob("*.json")))
    assert asyncio.run(inspector.inspect(model)) == first
    assert len(asked) == 2
    assert "is looked at again" in capfd.readouterr().err
    assert asyncio.run(inspector.inspect(model)) == first
    assert len(asked) == 2


def test_measurements_of_another_device_or_other_options_have_another_name(tmp_path: Path) -> None:
    inspection = {"digest": "d", "runtime": "r", "inputs": [{"dims": [1]}]}

    def key(device: str, model: str = "") -> str:
        file = tmp_path / "t.yaml"
        file.write_text(f"devices: {{d: {{{device}}}}}\nmodels: {{m: {{path: m.onnx{model}}}}}\n")
        c = load(file)
        return identity(c.devices["d"], c.models["m"], inspection, 0)

    keys = [
        key("driver: cpu"), key("driver: cpu, cores: [1]"), key("driver: sim"), key("driver: sim, cost: 2ms"),
        key("driver: sim, seed: 2"), key("driver: sim, outputs: onnx"), key("driver: cpu", ", non_finite: {y: forbid}"),
        key("driver: cpu", ", batching: {max_batch: 2}"),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key("driver: cpu") == keys[0]


def test_files_are_json_that_a_person_can_read(tmp_path: Path) -> None:
    write_sealed(tmp_path / "f", "k", NEW)
    assert json.loads((tmp_path / "f").read_text())["body"] == NEW
