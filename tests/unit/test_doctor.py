"""The doctor against recorded machines and a fake NVML: what it says, and that it looks nowhere else."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from taktd.daemon import control_client
from taktd.daemon.cli.doctor import doctor
from taktd.daemon.doctor.examination import CHECKS, Examination, examine
from taktd.daemon.doctor.finding import LEVELS, Finding, Subject
from taktd.daemon.doctor.gpu import read_gpus
from taktd.daemon.doctor.rights import executors
from taktd.daemon.doctor.tree import Tree, Unreadable, format_cores, parse_cores
from taktd.daemon.doctor.wakeup import BAD_P999_NS, GOOD_P999_NS, WakeUps, judge, measure_apart

TESTS = Path(__file__).parents[1]
SYSROOTS = TESTS / "fixtures" / "sysroots"


def _load_fake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_nvml", TESTS / "fakes" / "nvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fake = _load_fake()


def ask(box: str, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(doctor, ["--json", "--sysroot", str(SYSROOTS / box), *options])
    return result.exit_code, json.loads(result.stdout)


def levels(report: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in report["findings"]}


def finding_of(examination: Examination, check: str) -> Finding:
    return next(finding for finding in examination.findings if finding.check == check)


def good_box() -> tuple[Tree, Subject]:
    return Tree(SYSROOTS / "good"), Subject(cores=frozenset({3}))


# ---- recorded machines ----


def test_a_good_box_passes_every_check_that_files_can_answer() -> None:
    code, report = ask("good")
    assert code == 0
    assert report["fit"] is True
    assert report["cores"] == "3"
    assert {check for check, level in levels(report).items() if level != "ok"} == {"gpu-state"}


def test_a_bad_box_fails_in_every_way_it_is_bad() -> None:
    code, report = ask("bad")
    assert code == 1
    assert report["fit"] is False
    assert levels(report) == {
        "preemption": "fail",
        "isolation": "warning",
        "interrupts": "warning",
        "governor": "fail",
        "idle-states": "warning",
        "smt": "warning",
        "rt-throttling": "fail",
        "rt-groups": "fail",
        "rights": "fail",
        "real-time": "fail",
        "swap": "warning",
        "huge-pages": "warning",
        "clocksource": "fail",
        "virtual-machine": "ok",
        "gpu-driver": "fail",
        "gpu-nodes": "fail",
        "gpu-state": "unknown",
        "gpu-mps": "warning",
    }


def test_a_virtual_machine_is_named_with_its_stolen_time() -> None:
    code, report = ask("vm")
    found = next(finding for finding in report["findings"] if finding["check"] == "virtual-machine")
    assert code == 1
    assert found["level"] == "fail"
    assert "QEMU" in found["evidence"]
    assert "1.29 %" in found["evidence"]
    assert levels(report)["clocksource"] == "warning"
    assert levels(report)["governor"] == "unknown"
    assert levels(report)["gpu"] == "ok"


def test_a_jetson_is_told_its_power_mode_and_what_lifts_it() -> None:
    _, report = ask("jetson")
    found = next(finding for finding in report["findings"] if finding["check"] == "jetson-power")
    assert found["level"] == "warning"
    assert "15W, not MAXN_SUPER" in found["evidence"]
    assert found["mend"] == "nvpmodel -m 2 && jetson_clocks"
    assert "gpu-state" not in levels(report)


@pytest.mark.parametrize("box", ["good", "bad", "vm", "jetson"])
def test_each_finding_has_evidence_a_reason_and_a_command_where_something_is_wrong(box: str) -> None:
    _, report = ask(box)
    assert report["count"] == {level: list(levels(report).values()).count(level) for level in LEVELS}
    for finding in report["findings"]:
        assert finding["evidence"], finding
        if finding["level"] in ("warning", "fail"):
            assert finding["why"], finding
            assert finding["mend"], finding


def test_an_empty_tree_answers_unknown_and_nothing_of_this_machine(tmp_path: Path) -> None:
    examination = examine(Tree(tmp_path), Subject())
    assert examination.fit
    told = {finding.check for finding in examination.findings if finding.level == "ok"}
    # What isn't there can't be in the way.
    assert told == {"huge-pages", "gpu"}


def test_nothing_is_measured_below_a_sysroot() -> None:
    _, report = ask("good", "--seconds", "5")
    assert "wake-up" not in levels(report)


def test_a_sysroot_that_is_no_folder_is_unusable_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(doctor, ["--sysroot", str(tmp_path / "absent")])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "absent" in result.stderr


def test_cores_can_be_given_instead_of_configured() -> None:
    _, report = ask("good", "--cores", "1-2")
    assert report["cores"] == "1-2"
    assert levels(report)["isolation"] == "warning"
    assert CliRunner().invoke(doctor, ["--cores", "many"]).exit_code == 2


def status_of(file: Path, pid: int | None) -> dict[str, Any]:
    executor = {"pid": pid, "serving_pid": pid, "rights": {"affinity": [3]}}
    return {"pid": 900, "configuration": str(file), "executors": [executor]}


def test_a_running_daemon_says_which_configuration_and_which_executors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "taktd.yaml"
    file.write_text("devices:\n  cpu0: {driver: cpu, cores: [0], priority: 77}\n")
    monkeypatch.setattr(control_client, "ask", lambda *_, **__: status_of(file, None))
    report = json.loads(CliRunner().invoke(doctor, ["--json", "--seconds", "0"]).stdout)
    assert (report["cores"], report["priority"], report["configuration"]) == ("0", 77, str(file))
    file.write_text("devices: 3\n")
    report = json.loads(CliRunner().invoke(doctor, ["--json", "--seconds", "0"]).stdout)
    assert (report["cores"], levels(report)["configuration"]) == ("3", "fail")


def test_executors_of_another_daemon_are_not_judged() -> None:
    tree, _ = good_box()
    pid = executors(tree)[0].pid
    for processes, level in ((None, "fail"), ({pid}, "fail"), ({pid + 1}, "unknown")):
        kept = None if processes is None else frozenset(processes)
        subject = Subject(cores=frozenset({1}), processes=kept)
        assert finding_of(examine(tree, subject), "real-time").level == level


def test_an_executor_on_the_cores_of_another_configuration_is_mended_by_a_restart() -> None:
    tree, _ = good_box()
    found = finding_of(examine(tree, Subject(cores=frozenset({1}))), "real-time")
    assert found.level == "fail"
    assert "may run on cores 3" in found.evidence
    assert found.mend.startswith("systemctl restart taktd")


def test_a_refused_configuration_is_a_finding_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "taktd" / "taktd.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("devices:\n  cpu0: {driver: cpu, coars: [1]}\n")
    result = CliRunner().invoke(doctor, ["--json", "--sysroot", str(tmp_path)])
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["findings"][0]["check"] == "configuration"
    assert "coars" in report["findings"][0]["evidence"]


def test_the_table_for_people_says_why_and_how_to_mend() -> None:
    result = CliRunner().invoke(doctor, ["--sysroot", str(SYSROOTS / "bad")])
    assert "governor" in result.stdout
    assert "cpupower frequency-set -g performance" in result.stdout
    assert "9 fail" in result.stdout


# ---- single changes to the good box ----


def changed(tmp_path: Path, path: str, content: str | None) -> Tree:
    root = tmp_path / "root"
    shutil.copytree(SYSROOTS / "good", root, symlinks=True)
    target = root / path.lstrip("/")
    if content is None:
        target.unlink()
    else:
        target.write_text(content)
    return Tree(root)


@pytest.mark.parametrize(
    ("path", "content", "check", "level"),
    [
        ("/proc/sys/kernel/sched_rt_runtime_us", "950000", "rt-throttling", "warning"),
        ("/proc/sys/kernel/sched_rt_runtime_us", "0", "rt-throttling", "fail"),
        ("/sys/devices/system/cpu/online", "0-2", "isolation", "fail"),
        ("/sys/devices/system/cpu/nohz_full", "(null)", "isolation", "warning"),
        ("/sys/devices/system/cpu/cpu3/cpufreq/energy_performance_preference", "power", "governor", "warning"),
        ("/proc/irq/125/effective_affinity_list", "0,3", "interrupts", "warning"),
        ("/sys/devices/system/cpu/cpu3/topology/thread_siblings_list", "1,3", "smt", "warning"),
        ("/proc/905/status", "VmLck:\t0 kB\nCapEff:\t0000000000804000\nCpus_allowed_list:\t3\n", "real-time", "fail"),
        ("/run/systemd/container", "lxc", "virtual-machine", "warning"),
        ("/sys/module/nvidia/version", "570.10.01", "gpu-driver", "fail"),
        ("/dev/nvidia-uvm", None, "gpu-nodes", "warning"),
        ("/proc/900/fd/9", None, "idle-states", "warning"),
        ("/sys/devices/system/clocksource/clocksource0/current_clocksource", "kvm-clock", "clocksource", "warning"),
    ],
)
def test_one_change_is_seen_by_its_check(
    tmp_path: Path, path: str, content: str | None, check: str, level: str
) -> None:
    (tmp_path / "root").parent.mkdir(exist_ok=True)
    if not (SYSROOTS / "good" / path.lstrip("/")).parent.exists():
        shutil.copytree(SYSROOTS / "good", tmp_path / "root", symlinks=True)
        target = tmp_path / "root" / path.lstrip("/")
        target.parent.mkdir(parents=True)
        target.write_text(content or "")
        tree = Tree(tmp_path / "root")
    else:
        tree = changed(tmp_path, path, content)
    found = finding_of(examine(tree, Subject(cores=frozenset({3}))), check)
    assert found.level == level
    assert found.evidence
    assert found.why
    assert found.mend


def test_a_real_time_kernel_is_fine_without_a_gpu_and_a_warning_with_one(tmp_path: Path) -> None:
    tree = changed(tmp_path, "/proc/version", "Linux version 6.12.48-rt (Debian) #1 SMP PREEMPT_RT Debian")
    assert finding_of(examine(tree, Subject()), "preemption").level == "ok"
    assert finding_of(examine(tree, Subject(gpu=True)), "preemption").level == "warning"


def test_a_forbidden_file_makes_its_check_unknown_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tree.text

    def text(self: Tree, path: str) -> str | None:
        if path == "/proc/swaps":
            raise Unreadable(path, "Permission denied")
        return real(self, path)

    monkeypatch.setattr(Tree, "text", text)
    tree, subject = good_box()
    examination = examine(tree, subject)
    assert finding_of(examination, "swap").level == "unknown"
    assert "/proc/swaps" in finding_of(examination, "swap").evidence
    assert len(examination.findings) >= len(CHECKS)


# ---- the tree ----


def test_links_are_resolved_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hostname").write_text("inside\n")
    (tmp_path / "absolute").symlink_to("/etc/hostname")
    (tmp_path / "climbing").symlink_to("../../../../etc/hostname")
    (tmp_path / "circle").symlink_to("circle")
    tree = Tree(tmp_path)
    assert tree.text("/absolute") == "inside"
    assert tree.text("/climbing") == "inside"
    assert tree.text("/../../etc/hostname") == "inside"
    assert tree.text("/circle") is None


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("(null)", set()), ("managed_irq,domain,3", {3})]
)
def test_core_lists_are_read_and_written(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores
    assert parse_cores(format_cores(cores)) == cores


# ---- GPUs ----


def gpu_levels(*gpus: Any, **options: Any) -> dict[str, str]:
    nvml = fake.FakeNvml(*gpus, **options)
    tree, subject = good_box()
    found = examine(tree, subject, read_gpus(nvml)).findings
    assert nvml.open_count == 0
    return {finding.check: finding.level for finding in found if finding.check.startswith("gpu")}


def test_a_gpu_as_it_should_be_passes() -> None:
    assert set(gpu_levels(fake.FakeGpu()).values()) == {"ok"}


@pytest.mark.parametrize(
    ("gpu", "check", "level"),
    [
        ({"persistence": 0}, "gpu0-persistence", "fail"),
        ({"persistence": None}, "gpu0-persistence", "unknown"),
        ({"throttle_reasons": 0x40}, "gpu0-clocks", "fail"),
        ({"throttle_reasons": 0x1, "power_state": 8, "clock_mhz": 210}, "gpu0-clocks", "warning"),
        ({"throttle_reasons": None}, "gpu0-clocks", "unknown"),
        ({"processes": [4711]}, "gpu0-users", "fail"),
        ({"processes": [905]}, "gpu0-users", "ok"),
    ],
)
def test_what_nvml_says_is_judged(gpu: dict[str, Any], check: str, level: str) -> None:
    assert gpu_levels(fake.FakeGpu(**gpu))[check] == level


def test_a_library_that_does_not_fit_the_driver_asks_for_a_reboot() -> None:
    mismatch = fake.NVMLError(18, "Driver/library version mismatch")
    tree, subject = good_box()
    found = finding_of(examine(tree, subject, read_gpus(fake.FakeNvml(init_error=mismatch))), "gpu-driver")
    assert found.level == "fail"
    assert found.mend == "systemctl reboot"


def test_the_fake_has_only_names_that_nvidia_ml_py_has() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = [name for name in dir(fake.FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(pynvml, name)] == []


# ---- the measurement ----


def wake_ups(p999_ns: int, problem: str = "") -> WakeUps:
    return WakeUps(3, 80, 5000, 4_000, 9_000, p999_ns, p999_ns, problem)


@pytest.mark.parametrize(
    ("p999_ns", "problem", "level"),
    [
        (GOOD_P999_NS, "", "ok"),
        (GOOD_P999_NS + 1, "", "warning"),
        (BAD_P999_NS + 1, "", "fail"),
        (GOOD_P999_NS, "SCHED_FIFO 80: Operation not permitted", "warning"),
    ],
)
def test_lateness_is_judged_by_its_tail(p999_ns: int, problem: str, level: str) -> None:
    assert judge(wake_ups(p999_ns, problem)).level == level


def test_a_short_measurement_counts_every_wake_up() -> None:
    found = measure_apart(core=0, priority=1, seconds=0.05)
    assert found.count == 50
    assert 0 < found.p50_ns <= found.p99_ns <= found.p999_ns <= found.max_ns
