"""Versions changed on a real daemon while things go wrong: two changes at once, a kill during an import, no room.

Instants are drawn from a seed that a failing test shows: TAKTD_SEED=… runs it again.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taktd.daemon.control_client import AnswerNo, ask
from tests import models
from tests.chance import seed
from tests.running import Running, eventually
from tests.system.test_handover import Walking

SIZES = (8, 16, 4)
LARGE = (8, 3000, 3000, 4)  # 36 MB
FILE_BYTES_MAX = 16 << 20
YAML = """\
devices: {{cpu0: {{driver: cpu}}}}
models: {{policy: {{path: {folder}/store/policy, version: latest}}}}
loops: {{walk: {{model: policy, device: cpu0, period: 10ms, budget: 4ms, on_late: run, probation: {probation}}}}}
admission: {{on_refusal: uncertified}}
"""


class Stored(Running):
    """A daemon whose store has one version. Executors of a killed supervisor are found by the next one."""

    def __init__(self, folder: Path, probation: str = "0s") -> None:
        self.store = folder / "store/policy"
        models.mlp(self.store / "1/model.onnx", SIZES)
        (folder / "taktd").mkdir()
        super().__init__(folder / "taktd", YAML.format(folder=folder, probation=probation))

    def asking(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "taktd.daemon.cli", "model", *arguments], env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def listed(self) -> dict[str, Any]:
        answer = self.taktctl_json("model", "list", "policy")
        assert "models" in answer, answer
        [entry] = answer["models"]
        assert isinstance(entry, dict)
        return entry

    def whole(self) -> list[int]:
        """The versions; each of them checked against its manifest, and nothing else lies there."""
        entry = self.listed()
        assert not any(version["problem"] for version in entry["versions"]), entry
        numbers = [version["version"] for version in entry["versions"]]
        assert {p.name for p in self.store.iterdir()} <= {str(n) for n in numbers} | {"active.json"}
        return numbers


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Any]:
    made: list[Stored] = []

    def make(**more: Any) -> Stored:
        made.append(Stored(tmp_path, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_of_two_activations_at_once_one_is_refused_and_the_loop_goes_on(stored: Any, tmp_path: Path) -> None:
    running = stored(probation="3s")
    running.start().await_ready()
    for number in (2, 3):
        file = models.mlp(tmp_path / f"new{number}.onnx", SIZES, seed=number)
        assert running.taktctl("model", "add", "policy", str(file)).returncode == 0
    with Walking(running) as walking:
        first = running.asking("activate", "policy", "2")
        eventually(lambda: "executors of cpu0 are replaced" in running.log, 20)
        runtime = {"TAKTD_RUNTIME_DIR": str(running.runtime)}
        # Not by four taktctl: on a busy machine the first change is over before the last of them has started.
        for op, version in (("activate", {"version": 3}), ("rollback", {}), ("remove", {"version": 3})):
            with pytest.raises(AnswerNo, match="under way") as refused:
                ask(f"model.{op}", runtime, name="policy", **version)
            assert refused.value.hint == "wait until it is done"
        with pytest.raises(AnswerNo, match="another change is being made: model policy, version 2"):
            running.ask("reload")
        told, _ = first.communicate(timeout=60)
        assert first.returncode == 0
        assert "version 2 is served" in told
    walking.reconcile()
    entry = running.listed()
    assert (entry["serving"], [v["version"] for v in entry["versions"] if v["active"]]) == (2, [2])
    assert running.loop("walk")["switches"] == {"start": 1, "handover": 1}


def test_a_supervisor_that_is_killed_during_an_import_leaves_whole_versions_only(stored: Any, tmp_path: Path) -> None:
    chance = random.Random(seed())
    running = stored()
    running.start().await_ready()
    large = models.mlp(tmp_path / "large.onnx", LARGE)
    with Walking(running) as walking:
        for _ in range(4):
            importing = running.asking("add", "policy", str(large))
            # Whoever looks from outside may miss it: then the kill comes after it, which must be as harmless.
            eventually(
                lambda i=importing: any(p.name.startswith(".import") for p in running.store.iterdir())
                or i.poll() is not None, 60, "it copies",
            )  # fmt: skip
            time.sleep(chance.uniform(0, 0.15))
            running.remember_family()
            running.process.kill()
            running.process.wait()
            importing.communicate(timeout=30)
            before = walking.journal["ok", "primary"]
            eventually(lambda b=before: walking.journal["ok", "primary"] > b + 3, 10, "the loop goes on")
            running.start().await_ready()
            assert all(v["version"] in (1, 2) and not v["problem"] for v in running.listed()["versions"])
        done = running.taktctl("model", "add", "policy", str(large))
        assert done.returncode == 0, done.stderr
        assert running.whole() == [1, 2]
        assert running.listed()["serving"] == 1
    walking.reconcile()
    assert running.stop() == 0


def test_a_disk_without_room_for_an_import_costs_nothing_else(stored: Any, tmp_path: Path) -> None:
    """The kernel says so at the same place as a full disk does: a write that is cut short, then an error."""
    running = stored()
    running.start().await_ready()
    large = models.mlp(tmp_path / "large.onnx", LARGE)
    small = models.mlp(tmp_path / "small.onnx", SIZES, seed=2)
    for file, version in ((large, 2), (small, 3)):  # once, so that they are known and no other process inspects them
        assert running.taktctl("model", "add", "policy", str(file)).returncode == 0
        assert running.taktctl("model", "remove", "policy", str(version)).returncode == 0
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    with Walking(running) as walking:
        done = running.taktctl("model", "add", "policy", str(large))
        assert done.returncode == 1
        assert "can't be imported: file too large" in done.stderr.lower()
        assert running.whole() == [1]
        assert running.taktctl("model", "add", "policy", str(small)).returncode == 0
        assert running.whole() == [1, 4]
    walking.reconcile()
    assert running.stop() == 0
