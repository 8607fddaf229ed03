"""What a supervisor leaves for the one after its death: whole, exact, and never about a process that is not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from taktd.daemon.config.configuration import Configuration, load
from taktd.daemon.config.keeping import NotKept, keep, restore
from taktd.daemon.handover import predecessor
from taktd.daemon.runtime_folder import EXECUTORS_FILE, EXECUTORS_SOCKET

YAML = """\
devices:
  sim0: {driver: sim, cost: {p50: 1ms, p99: 2ms, max: 3ms}}
  cpu0: {driver: cpu, cores: [0]}
models:
  id: {path: /nowhere/id.onnx, allow: {users: ["12"]}}
loops:
  walk: {model: id, device: sim0, period: 20ms, budget: 10ms, fallback: [cpu0, {constant: {y: [1.5, 2]}}]}
admission: {margin: 1.25}
grace: 2s
"""


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    (tmp_path / "taktd.yaml").write_text(YAML)
    return load(tmp_path / "taktd.yaml")


def test_a_configuration_comes_back_exactly(configuration: Configuration) -> None:
    back = restore(json.loads(json.dumps(keep(configuration))))
    assert back == configuration
    assert repr(back) == repr(configuration)
    assert back.models["id"].model_fields_set == configuration.models["id"].model_fields_set


def test_what_another_version_wrote_is_refused(configuration: Configuration) -> None:
    kept = keep(configuration)
    del kept["grace_ns"]
    with pytest.raises(NotKept, match="Configuration is not what it was"):
        restore(kept)
    with pytest.raises(NotKept):
        restore(["no", "configuration"])


def test_only_processes_with_their_start_time_are_expected(tmp_path: Path, configuration: Configuration) -> None:
    assert predecessor.read(tmp_path) is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        predecessor.write_down(tmp_path, [("cpu0", child.pid, 7)], (3, 5), configuration, {"id": {"digest": "d"}})
        found = predecessor.read(tmp_path)
        assert found is not None
        assert [(one.device, one.pid, one.member) for one in found.alive] == [("cpu0", child.pid, 7)]
        assert (found.pid, found.epoch, found.last_epoch) == (os.getpid(), 3, 5)
        assert found.configuration == configuration
        os.close(found.alive[0].pidfd)
        # The same number, begun at another time: somebody else's.
        entry = {"device": "cpu0", "pid": child.pid, "member": 7, "start": predecessor.start_time(child.pid) + 1}
        assert predecessor._find(entry) is None
        child.communicate(b"\n")
    found = predecessor.read(tmp_path)
    assert found is not None
    assert not found.alive
    (tmp_path / EXECUTORS_SOCKET).touch()
    predecessor.forget(tmp_path)
    assert predecessor.read(tmp_path) is None
    assert not (tmp_path / EXECUTORS_SOCKET).exists()


def test_a_damaged_file_is_no_predecessor(tmp_path: Path, configuration: Configuration) -> None:
    predecessor.write_down(tmp_path, [], (1, 1), configuration, {})
    file = tmp_path / EXECUTORS_FILE
    file.write_bytes(file.read_bytes()[:-40])
    assert predecessor.read(tmp_path) is None
