"""What was measured holds only while the machine stays as it was: each loss is named, what got better is none."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from taktd.daemon.doctor.gpu import GpuReading, GpuReadings
from taktd.daemon.doctor.preconditions import Preconditions, capture, ground, lost
from taktd.daemon.doctor.tree import Tree

GOOD = Path(__file__).parents[1] / "fixtures" / "sysroots" / "good"
CORE_3 = frozenset({3})
GPU = GpuReading(
    index=0, name="RTX", persistence=True, clock_mhz=1560, clock_max_mhz=3105, throttle_reasons=1, power_state=0,
    processes=(),
)  # fmt: skip


def readings(*gpus: GpuReading) -> GpuReadings:
    return GpuReadings(driver="580.95.05", gpus=gpus)


def certified() -> Preconditions:
    return capture(Tree(GOOD), CORE_3, readings(GPU))


def test_an_unchanged_machine_has_lost_nothing() -> None:
    assert lost(certified(), certified()) == ()


@pytest.mark.parametrize(
    ("path", "content", "name"),
    [
        ("sys/devices/system/cpu/cpu3/cpufreq/scaling_governor", "powersave", "governor"),
        ("sys/devices/system/cpu/cpu3/cpufreq/scaling_min_freq", "800000", "frequency_min"),
        ("sys/devices/system/cpu/cpu3/cpufreq/scaling_max_freq", "800000", "frequency_max"),
        ("sys/devices/system/cpu/online", "0-2", "core_online"),
        ("proc/sys/kernel/sched_rt_runtime_us", "950000", "rt_throttling"),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet", "clocksource"),
    ],
)
def test_each_change_for_the_worse_is_named_with_its_mend(tmp_path: Path, path: str, content: str, name: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(GOOD, root, symlinks=True)
    (root / path).write_text(content)
    found = lost(certified(), capture(Tree(root), CORE_3, readings(GPU)))
    assert [loss.name for loss in found] == [name]
    assert found[0].mend
    assert name in str(found[0])


def test_a_change_on_another_core_is_none_of_this_certificate(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(GOOD, root, symlinks=True)
    (root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").write_text("powersave")
    assert lost(certified(), capture(Tree(root), CORE_3, readings(GPU))) == ()


def test_what_became_better_is_no_loss() -> None:
    before = replace(certified(), rt_runtime_us=950_000)
    assert lost(before, certified()) == ()


@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        (replace(GPU, persistence=False), ["gpu_persistence"]),
        (replace(GPU, throttle_reasons=0x20), ["gpu_throttling"]),
        (replace(GPU, clock_mhz=210), ["gpu_clock"]),
        (replace(GPU, clock_mhz=1550), []),
        (replace(GPU, clock_mhz=None, persistence=None), []),
        (None, ["gpu_present"]),
    ],
)
def test_a_gpu_loses_its_clock_its_persistence_or_itself(gpu: GpuReading | None, names: list[str]) -> None:
    now = capture(Tree(GOOD), CORE_3, readings(gpu) if gpu else readings())
    assert [loss.name for loss in lost(certified(), now)] == names


def test_a_gpu_that_was_slowed_or_used_by_others_from_the_start_has_no_ground() -> None:
    slowed = capture(Tree(GOOD), CORE_3, readings(replace(GPU, throttle_reasons=0x40, processes=(4711,))))
    assert [loss.name for loss in lost(slowed, slowed)] == ["gpu_throttling", "gpu_users"]


def test_what_was_measured_at_another_clock_is_another_measurement(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(GOOD, root, symlinks=True)
    before = ground(Tree(root), CORE_3)
    assert before == ground(Tree(root), CORE_3)
    (root / "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor").write_text("powersave")
    assert ground(Tree(root), CORE_3) != before
    assert len(ground(Tree(root), frozenset())) == 4


def test_driver_files_that_are_upgraded_under_a_running_daemon_are_a_loss(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(GOOD, root, symlinks=True)
    link = root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so.580.95.05")
    before = capture(Tree(root), CORE_3, None, "GPU-1")
    link.unlink()
    link.symlink_to("libcuda.so.590.12")
    (found,) = lost(before, capture(Tree(root), CORE_3, None, "GPU-1"))
    assert str(found) == "gpu_library of libcuda: was 580.95.05, now 590.12; to mend: systemctl reboot"
    assert lost(before, before) == ()
    no_gpu = capture(Tree(root), CORE_3, None, "")
    assert no_gpu.gpu_library == "", "it is nothing to a device that is no GPU"
