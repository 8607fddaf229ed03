"""The simulated device: time as declared, outputs by rule, faults as a GPU would show them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktd.drivers.fault import DeviceFault, FaultKind
from taktd.drivers.sim import (
    RUNS_MAX,
    SLOWNESS_MAX,
    UNTIL_CLEARED,
    FaultFile,
    SimDevice,
    SimFault,
    SimFaultKind,
)
from taktd.engines.engine import EngineSpec, Tensor
from taktd.engines.errors import EngineFailure, FailureKind
from taktd.engines.factory import engine_opener
from taktd.engines.inspect import inspect_model, specs_from_json
from taktd.engines.simulated import Cost, SimulatedEngine, SimulatedOptions, WarmSimulatedEngine
from tests import models

K = SimFaultKind
MS = 1_000_000


class Hung(Exception):
    pass


class World:
    """A device on a clock of its own, and its fault file."""

    def __init__(self, folder: Path) -> None:
        self.now_ns = 0
        self.path = folder / "sim0"
        self.faults = FaultFile(self.path, write=True)
        self.device = self.open()

    def open(self) -> SimDevice:
        return SimDevice(self.path, clock=self.tick, sleep=self.sleep, hang=self.hang)

    def tick(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def hang(self) -> None:
        raise Hung

    def run(self, cost_ns: int = MS) -> tuple[int, bool]:
        """Duration in ns, and whether results are to be NaN."""
        before = self.now_ns
        spoiled = self.device.run(cost_ns, lambda: None)
        return self.now_ns - before, spoiled


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_takes_its_cost(world: World) -> None:
    took_ns, spoiled = world.run(5 * MS)
    assert 5 * MS <= took_ns <= 5 * MS + 10_000
    assert not spoiled


def test_work_longer_than_the_cost_is_not_cut(world: World) -> None:
    before = world.now_ns
    world.device.run(MS, lambda: world.sleep(0.003))
    assert world.now_ns - before >= 3 * MS


@pytest.mark.parametrize(
    ("kind", "fault", "sticky"),
    [(K.OUT_OF_MEMORY, FaultKind.OUT_OF_MEMORY, False), (K.ERROR, FaultKind.LAUNCH_FAILED, False),
     (K.LOST, FaultKind.DEVICE_LOST, True)],
)  # fmt: skip
def test_a_fault_hits_as_many_runs_as_it_says(world: World, kind: K, fault: FaultKind, sticky: bool) -> None:
    world.run()
    world.faults.inject(SimFault(kind, runs=2))
    for _ in range(2):
        with pytest.raises(DeviceFault) as raised:
            world.run()
        assert (raised.value.kind, raised.value.sticky) == (fault, sticky)
    if sticky:
        with pytest.raises(DeviceFault):
            world.run()
    else:
        world.run()


def test_a_lost_device_is_lost_for_this_process_whatever_comes_after(world: World) -> None:
    world.faults.inject(SimFault(K.LOST))
    with pytest.raises(DeviceFault):
        world.run()
    world.faults.clear()
    with pytest.raises(DeviceFault):
        world.run()
    world.device = world.open()
    world.run()


def test_a_new_process_takes_a_counted_fault_as_past(world: World) -> None:
    world.faults.inject(SimFault(K.LOST))
    world.device = world.open()
    world.run()


def test_a_fault_until_cleared_waits_for_every_process(world: World) -> None:
    world.faults.inject(SimFault(K.SLOW, factor=3, runs=UNTIL_CLEARED))
    world.device = world.open()
    for _ in range(5):
        assert world.run()[0] >= 3 * MS
    world.faults.clear()
    assert world.run()[0] < 2 * MS
    world.faults.inject(SimFault(K.LOST, runs=UNTIL_CLEARED))
    with pytest.raises(DeviceFault) as raised:
        world.open()
    assert raised.value.kind is FaultKind.DEVICE_LOST


def test_a_rehearsal_uses_up_no_fault(world: World, tmp_path: Path) -> None:
    engine = warm(models.identity(tmp_path / "m.onnx", (4,)), world)
    batch, x, y = engine.batch(1), np.ones(4, np.float32), np.zeros(4, np.float32)
    world.faults.inject(SimFault(K.ERROR))
    for _ in range(3):
        batch.run_bound()
    with pytest.raises(EngineFailure):
        batch.run([[x.ctypes.data]], [[y.ctypes.data]])
    world.faults.inject(SimFault(K.SLOW, factor=4, runs=UNTIL_CLEARED))
    before = world.now_ns
    batch.run_bound()
    assert world.now_ns - before >= 4 * MS, "what lasts is there for everybody"


def test_slow_is_a_factor(world: World) -> None:
    world.faults.inject(SimFault(K.SLOW, factor=10, runs=1))
    assert 10 * MS <= world.run()[0] <= 10 * MS + 20_000
    assert world.run()[0] < 2 * MS


def test_nan_and_hang(world: World) -> None:
    world.faults.inject(SimFault(K.NAN))
    assert [world.run()[1], world.run()[1]] == [True, False]
    world.faults.inject(SimFault(K.HANG))
    with pytest.raises(Hung):
        world.run()


def test_the_same_fault_again_is_a_new_one(world: World) -> None:
    for _ in range(3):
        world.faults.inject(SimFault(K.ERROR))
        with pytest.raises(DeviceFault):
            world.run()
        world.run()


@given(
    kind=st.sampled_from(list(K)), factor=st.integers(1, SLOWNESS_MAX), runs=st.integers(0, RUNS_MAX),
    serials=st.integers(0, 3),
)  # fmt: skip
def test_the_word_keeps_what_was_injected(
    kind: K, factor: int, runs: int, serials: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "word"
    writer, reader = FaultFile(path, write=True), FaultFile(path)
    for _ in range(serials):
        writer.clear()
    before = reader.word
    writer.inject(SimFault(kind, factor, runs))
    assert reader.read() == SimFault(kind, factor, runs)
    assert reader.word != before
    writer.close()
    reader.close()


@pytest.mark.parametrize("fault", [SimFault(K.SLOW, 0), SimFault(K.SLOW, 1 << 16), SimFault(K.NAN, 1, -1)])
def test_what_does_not_fit_into_the_word_is_refused(world: World, fault: SimFault) -> None:
    with pytest.raises(ValueError, match="factor 1 to"):
        world.faults.inject(fault)


def test_a_fault_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    FaultFile(tmp_path / "real", write=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic"):
        FaultFile(tmp_path / "link", write=True)


# ---- cost ----

points = st.lists(st.integers(0, 10**9), min_size=1, max_size=6).map(sorted)


@given(times=points, shares=st.data())
def test_a_distribution_rises_and_stays_within_its_points(times: list[int], shares: st.DataObject) -> None:
    ppm = sorted(shares.draw(st.sets(st.integers(0, 999_999), min_size=len(times) - 1, max_size=len(times) - 1)))
    cost = Cost(tuple(zip([*ppm, 1_000_000], times, strict=True)))
    drawn = [cost.at(share) for share in range(0, 1_000_001, 50_000)]
    assert drawn == sorted(drawn)
    assert times[0] <= drawn[0]
    assert drawn[-1] == times[-1]
    assert all(cost.at(share) == ns for share, ns in cost.points)


def test_a_percentile_table_is_what_is_measured() -> None:
    cost = Cost(((500_000, 1_000), (990_000, 2_000), (1_000_000, 9_000)))
    drawn = sorted(cost.at(share) for share in range(1, 1_000_001, 97))
    assert statistics.median(drawn) == pytest.approx(1_000, rel=0.01)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(2_000, rel=0.01)
    assert drawn[-1] <= 9_000


# ---- engine ----


def warm(path: Path, world: World, max_batch: int = 1, **options: object) -> WarmSimulatedEngine:
    found = inspect_model(path, {})
    spec = EngineSpec("m", str(path), specs_from_json(found["inputs"]), specs_from_json(found["outputs"]), max_batch)
    chosen = SimulatedOptions(**{"cost": Cost.fixed(MS), **options})  # type: ignore[arg-type]
    return SimulatedEngine(spec, world.device, chosen).warm()


def tensor(array: np.ndarray) -> Tensor:
    return Tensor(array.ctypes.data, array.shape)


def test_identity_repeats_or_cuts_the_input(world: World, tmp_path: Path) -> None:
    obs, actions = np.arange(48, dtype=np.float32).reshape(1, 48), np.zeros((1, 12), np.float32)
    warm(models.mlp(tmp_path / "m.onnx", (48, 12)), world).bind([tensor(obs)], [tensor(actions)])()
    assert np.array_equal(actions[0], obs[0, :12])
    small, wide = np.arange(4, dtype=np.float32).reshape(1, 4), np.zeros((1, 10), np.float32)
    warm(models.mlp(tmp_path / "w.onnx", (4, 10)), world).bind([tensor(small)], [tensor(wide)])()
    assert wide[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_identity_converts_types(world: World, tmp_path: Path) -> None:
    x, y = np.arange(64), np.zeros(64, np.float32)
    warm(models.gather(tmp_path / "m.onnx"), world).bind([tensor(x)], [tensor(y)])()
    assert np.array_equal(x, y)


def test_constant_and_onnx(world: World, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", (48, 12))
    obs, actions = np.ones((1, 48), np.float32), np.zeros((1, 12), np.float32)
    warm(path, world, outputs="constant", constant=0.25).bind([tensor(obs)], [tensor(actions)])()
    assert set(actions[0].tolist()) == {0.25}
    warm(path, world, outputs="onnx").bind([tensor(obs)], [tensor(actions)])()
    assert len(set(actions[0].tolist())) > 1


def test_draws_come_from_the_seed(world: World, tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", (4,))
    x, y = np.zeros(4, np.float32), np.zeros(4, np.float32)

    def times(seed: int) -> list[int]:
        run = warm(path, world, cost=Cost.uniform(MS, 9 * MS), seed=seed).bind([tensor(x)], [tensor(y)])
        result = []
        for _ in range(20):
            before = world.now_ns
            run()
            result.append((world.now_ns - before) // 50_000)
        return result

    assert times(1) == times(1) != times(2)


@pytest.mark.parametrize(
    ("kind", "failure", "sticky"),
    [(K.OUT_OF_MEMORY, FailureKind.OUT_OF_MEMORY, False), (K.ERROR, FailureKind.LAUNCH_FAILED, False),
     (K.LOST, FailureKind.DEVICE_LOST, True)],
)  # fmt: skip
@pytest.mark.parametrize("outputs", ["identity", "constant", "onnx"])
def test_faults_are_failures_of_their_kind(
    world: World, tmp_path: Path, outputs: str, kind: K, failure: FailureKind, sticky: bool
) -> None:
    engine = warm(models.identity(tmp_path / "m.onnx", (4,)), world, outputs=outputs)
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    ways: list[Callable[[], object]] = [
        engine.bind([tensor(x)], [tensor(y)]),
        lambda: engine.run_shaped([tensor(x)], [tensor(y)]),
        lambda: engine.batch(1).run([[x.ctypes.data]], [[y.ctypes.data]]),
    ]
    for way in ways:
        world.faults.inject(SimFault(kind))
        with pytest.raises(EngineFailure) as raised:
            way()
        assert (raised.value.kind, raised.value.sticky) == (failure, sticky)
        assert not y.any()


def test_nan_spoils_numbers_and_leaves_integers(world: World, tmp_path: Path) -> None:
    engine = warm(models.topk(tmp_path / "m.onnx"), world, outputs="onnx")
    x = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    top, indices = np.zeros(64, np.float32), np.zeros(64, np.int64)
    run = engine.bind([tensor(x)], [tensor(top), tensor(indices)])
    world.faults.inject(SimFault(K.NAN))
    run()
    assert np.isnan(top).all()
    assert np.array_equal(indices, np.argsort(x)[::-1][:64])
    run()
    assert np.isfinite(top).all()


def test_the_factory_knows_every_driver(tmp_path: Path) -> None:
    assert engine_opener({"kind": "cpu"})
    plan = {"kind": "sim", "cost": [[1_000_000, 0]], "outputs": "identity", "constant": 0.0, "seed": 1, "faults": None}
    assert engine_opener(plan)
    file = FaultFile(tmp_path / "sim0", write=True)
    file.inject(SimFault(K.LOST, runs=UNTIL_CLEARED))
    with pytest.raises(EngineFailure, match="lost") as raised:
        engine_opener({**plan, "faults": str(tmp_path / "sim0")})
    assert raised.value.sticky
    with pytest.raises(ValueError, match="no engines"):
        engine_opener({"kind": "abacus"})
