"""The doctor's commands: each finding that is not ok has one that fits the machine it was found on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from taktd.daemon.doctor import wakeup
from taktd.daemon.doctor.examination import examine
from taktd.daemon.doctor.finding import Finding, Subject
from taktd.daemon.doctor.gpu import GpuReading, GpuReadings, other_users
from taktd.daemon.doctor.power import is_taktd
from taktd.daemon.doctor.tree import Tree
from taktd.daemon.doctor.unit import DROP_INS, read_unit

REPOSITORY = Path(__file__).parents[2]
SYSROOTS = Path(__file__).parents[1] / "fixtures" / "sysroots"
PACKAGED = "/usr/lib/systemd/system/taktd.service"
OLD_KERNEL = "Linux version 6.1.0-37-cloud-amd64 (Debian) #1 SMP Debian"


def box(tmp_path: Path, name: str = "good") -> Path:
    root = tmp_path / name
    shutil.copytree(SYSROOTS / name, root, symlinks=True)
    return root


def write(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.write_text(text)


def install(root: Path, *drop_ins: str) -> None:
    """The package's own unit, with its own drop-ins enabled."""
    write(root, PACKAGED, (REPOSITORY / "systemd" / "taktd.service").read_text())
    for name in drop_ins:
        write(root, f"{DROP_INS}/{name}.conf", (REPOSITORY / "systemd" / "drop-ins" / f"{name}.conf").read_text())


def find(root: Path, check: str, subject: Subject | None = None, readings: GpuReadings | None = None) -> Finding:
    examination = examine(Tree(root), subject or Subject(cores=frozenset({3})), readings)
    return next(finding for finding in examination.findings if finding.check == check)


# ---- a command for each ----


def is_command(mend: str) -> bool:
    """Whether a shell would understand it: a program's name first, no prose."""
    word = mend.split()[0]
    return bool(re.fullmatch(r"[a-z0-9][a-z0-9-]*", word)) and word not in {
        "run",
        "stop",
        "on",
        "change",
        "set",
        "cool",
    }


@pytest.mark.parametrize("name", ["good", "bad", "vm", "jetson", "nothing"])
@pytest.mark.parametrize("subject", [Subject(), Subject(cores=frozenset({1})), Subject(cores=frozenset({9}), gpu=True)])
def test_whatever_is_not_ok_has_a_command(tmp_path: Path, name: str, subject: Subject) -> None:
    root = box(tmp_path, name) if name != "nothing" else tmp_path
    untold = GpuReading(0, "GPU", None, None, None, None, None, (4711,))
    for readings in (None, GpuReadings(driver="580.95.05", gpus=(untold,))):
        for finding in examine(Tree(root), subject, readings).findings:
            assert finding.why, finding
            assert (finding.level == "ok") or is_command(finding.mend), finding


@pytest.mark.parametrize("problem", ["", "SCHED_FIFO 80: Operation not permitted"])
def test_late_wake_ups_have_a_command_too(problem: str) -> None:
    found = wakeup.WakeUps(3, 80, 5000, 4_000, 9_000, wakeup.BAD_P999_NS + 1, wakeup.BAD_P999_NS + 1, problem)
    assert is_command(wakeup.judge(found).mend)


def test_a_drop_in_is_linked_into_a_folder_that_is_made_first(tmp_path: Path) -> None:
    found = find(box(tmp_path, "bad"), "idle-states", Subject(cores=frozenset({1})))
    assert found.mend.startswith(f"mkdir -p {DROP_INS} && ln -s /usr/share/taktd/drop-ins/cpu-dma-latency.conf ")


# ---- kernels ----


def test_a_machine_with_a_gpu_is_never_told_to_install_a_real_time_kernel(tmp_path: Path) -> None:
    root = box(tmp_path)
    write(root, "/proc/version", OLD_KERNEL)
    assert "linux-image-rt" in find(root, "preemption").mend
    with_gpu = find(root, "preemption", Subject(gpu=True))
    assert with_gpu.level == "fail"
    assert "rt" not in re.split(r"[- ]", with_gpu.mend)
    assert "preempt=full" in with_gpu.mend


def test_a_jetson_boots_by_extlinux_and_may_have_a_real_time_kernel(tmp_path: Path) -> None:
    root = box(tmp_path, "jetson")
    write(root, "/sys/devices/system/cpu/isolated", "")
    found = find(root, "isolation", Subject(cores=frozenset({5})))
    assert found.level == "warning"
    assert "/boot/extlinux/extlinux.conf" in found.mend
    assert "isolcpus=managed_irq,domain,5" in found.mend
    assert "grub" not in found.mend
    write(root, "/proc/version", "Linux version 5.15.148-rt-tegra #1 SMP PREEMPT_RT")
    assert find(root, "preemption", Subject(gpu=True)).level == "ok"
    write(root, "/proc/version", "Linux version 5.15.148-tegra #1 SMP")
    assert "nvidia-l4t-rt-kernel" in find(root, "preemption", Subject(gpu=True)).mend


def test_the_command_for_extlinux_adds_the_options_to_each_entry_once(tmp_path: Path) -> None:

    root = box(tmp_path, "jetson")
    write(root, "/sys/devices/system/cpu/isolated", "")
    file = tmp_path / "extlinux.conf"
    file.write_text("LABEL primary\n      LINUX /boot/Image\n      APPEND ${cbootargs} quiet\n")
    mend = find(root, "isolation", Subject(cores=frozenset({5}))).mend
    command = mend.split(" && ")[0].replace("/boot/extlinux/extlinux.conf", str(file))
    subprocess.run(command, shell=True, check=True)
    assert file.read_text().splitlines()[2] == (
        "      APPEND ${cbootargs} quiet isolcpus=managed_irq,domain,5 nohz_full=5 rcu_nocbs=5"
    )


# ---- rights ----


def stopped(tmp_path: Path) -> Path:
    root = box(tmp_path)
    for pid in ("900", "905"):
        shutil.rmtree(root / "proc" / pid)
    return root


def test_the_packages_own_unit_grants_the_rights(tmp_path: Path) -> None:
    root = stopped(tmp_path)
    install(root, "gpu", "tcp", "isolated-cores", "cpu-dma-latency")
    assert find(root, "rights").level == "ok"


def test_a_drop_in_that_takes_the_rights_away_is_named_and_taken_out(tmp_path: Path) -> None:
    root = stopped(tmp_path)
    install(root)
    write(root, f"{DROP_INS}/poor.conf", "[Service]\nAmbientCapabilities=\n")
    found = find(root, "rights")
    assert found.level == "fail"
    assert f"{DROP_INS}/poor.conf" in found.evidence
    assert found.mend.startswith(f"rm {DROP_INS}/poor.conf && systemctl daemon-reload")


def test_a_unit_of_the_owners_without_the_rights_is_reverted(tmp_path: Path) -> None:
    root = stopped(tmp_path)
    install(root)
    write(root, "/etc/systemd/system/taktd.service", "[Service]\nAmbientCapabilities=CAP_SYS_NICE\n")
    found = find(root, "rights")
    assert found.level == "fail"
    assert found.mend.startswith("systemctl revert taktd.service")


@pytest.mark.parametrize(
    ("priority", "memory", "level"),
    [("unlimited", "unlimited", "ok"), ("95", "unlimited", "ok"), ("50", "unlimited", "fail"), ("95", "65536", "fail")],
)
def test_without_capabilities_the_limits_count_and_unlimited_is_enough(
    tmp_path: Path, priority: str, memory: str, level: str
) -> None:
    root = box(tmp_path)
    for pid in ("900", "905"):
        status = (root / "proc" / pid / "status").read_text()
        write(root, f"/proc/{pid}/status", re.sub(r"CapEff:.*", "CapEff:\t0000000000000000", status))
        limits = f"Max locked memory         {memory:21}{memory:21}bytes\n"
        write(root, f"/proc/{pid}/limits", limits + f"Max realtime priority     {priority:21}{priority:21}\n")
    found = find(root, "rights")
    assert found.level == level
    assert level == "ok" or is_command(found.mend)


# ---- the unit as systemd reads it ----


def test_a_drop_in_of_etc_hides_one_of_its_name_and_they_are_read_by_name(tmp_path: Path) -> None:
    write(tmp_path, PACKAGED, "[Service]\nSupplementaryGroups=audio \\\n  dialout\n[Install]\nSupplementaryGroups=no\n")
    write(tmp_path, f"{PACKAGED}.d/20-b.conf", "[Service]\nSupplementaryGroups=hidden\n")
    write(tmp_path, f"{DROP_INS}/20-b.conf", "[Service]\nSupplementaryGroups=video\n")
    write(tmp_path, f"{DROP_INS}/10-a.conf", "[Service]\n SupplementaryGroups = ~audio\n# SupplementaryGroups=\n")
    write(tmp_path, f"{DROP_INS}/30-c.txt", "[Service]\nSupplementaryGroups=\n")
    unit = read_unit(Tree(tmp_path))
    assert unit is not None
    assert unit.path == PACKAGED
    assert unit.words("SupplementaryGroups") == ["dialout", "video"]
    assert unit.who_sets("SupplementaryGroups") == f"{DROP_INS}/20-b.conf"
    write(tmp_path, f"{DROP_INS}/40-d.conf", "[Service]\nSupplementaryGroups=\n")
    unit = read_unit(Tree(tmp_path))
    assert unit is not None
    assert unit.words("SupplementaryGroups") == []


def test_a_masked_unit_is_none(tmp_path: Path) -> None:
    write(tmp_path, PACKAGED, "[Service]\n")
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    (folder / "taktd.service").symlink_to("/dev/null")
    assert read_unit(Tree(tmp_path)) is None


# ---- GPUs ----


def gpu_box(tmp_path: Path) -> Path:
    """The good box, whose nodes belong to group video (44), with user taktd not in it by /etc/group."""
    root = box(tmp_path)
    write(root, "/etc/group", "root:x:0:\nvideo:x:44:\nrender:x:105:\ntaktd:x:990:\n")
    return root


def test_the_groups_of_the_gpu_drop_in_open_the_nodes(tmp_path: Path) -> None:
    root = gpu_box(tmp_path)
    install(root, "gpu")
    assert find(root, "gpu-nodes", Subject(gpu=True)).level == "ok"


def test_without_the_drop_in_the_service_has_no_gpu_and_the_doctor_enables_it(tmp_path: Path) -> None:
    root = gpu_box(tmp_path)
    install(root)
    found = find(root, "gpu-nodes", Subject(gpu=True))
    assert found.level == "fail"
    assert "DevicePolicy=closed" in found.evidence
    assert "drop-ins/gpu.conf" in found.mend
    # Group video alone does not help while the unit shuts the nodes off.
    write(root, "/etc/group", "video:x:44:taktd\n")
    assert find(root, "gpu-nodes", Subject(gpu=True)).level == "fail"


def test_without_a_unit_the_users_groups_count(tmp_path: Path) -> None:
    root = gpu_box(tmp_path)
    found = find(root, "gpu-nodes", Subject(gpu=True))
    assert found.level == "fail"
    assert found.mend.startswith("usermod -aG video")


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ("/usr/bin/python3 -m taktd.daemon.executor --control-fd 5", True),
        ("/usr/bin/python3 -Es /usr/bin/taktd --config /etc/taktd/taktd.yaml", True),
        ("/opt/venv/bin/python3.11 .venv/bin/taktd --config taktd.yaml", True),
        ("/usr/bin/python3 -X faulthandler -Im taktd.daemon.gateway", True),
        ("/usr/bin/python3 /home/me/taktd/train.py", False),
        ("/usr/bin/python3 train.py --log taktd.daemon.executor", False),
        ("/usr/bin/python3 -m mytaktd.daemon", False),
        ("/usr/bin/vim taktd.yaml", False),
        ("/opt/taktd/bin/render", False),
        ("", False),
    ],
)
def test_who_is_taktds_is_told_by_what_runs_not_by_the_word(tmp_path: Path, command: str, ours: bool) -> None:
    words = tuple(command.split())
    assert is_taktd(words) == ours
    write(tmp_path, "/proc/4711/cmdline", "\0".join(words) + "\0")
    gpu = GpuReading(0, "GPU", True, 1560, 3105, 1, 0, (4711,))
    assert (other_users(Tree(tmp_path), gpu) == []) == ours


def test_taktctl_and_processes_of_the_service_may_use_the_gpu_and_are_no_daemon(tmp_path: Path) -> None:
    gpu = GpuReading(0, "GPU", True, 1560, 3105, 1, 0, (4711,))
    write(tmp_path, "/proc/4711/cmdline", "/usr/bin/python3\0-Es\0/usr/bin/taktctl\0selftest\0")
    assert other_users(Tree(tmp_path), gpu) == []
    assert not is_taktd(("/usr/bin/python3", "-Es", "/usr/bin/taktctl"))
    assert not is_taktd(("/usr/bin/python3", "-m", "taktd.daemon.cli"))
    write(tmp_path, "/proc/4711/cmdline", "/usr/bin/ptxas\0")
    assert other_users(Tree(tmp_path), gpu) == [(4711, "/usr/bin/ptxas")]
    write(tmp_path, "/proc/4711/cgroup", "0::/takt.slice/taktd.service\n")
    assert other_users(Tree(tmp_path), gpu) == []


def test_another_user_is_stopped_and_taktds_own_second_executor_not_locked_out(tmp_path: Path) -> None:
    write(tmp_path, "/proc/4711/cmdline", "/usr/bin/python3\0train.py\0")
    gpu = GpuReading(0, "GPU", True, 1560, 3105, 1, 0, (4711, 4712))
    found = find(tmp_path, "gpu0-users", readings=GpuReadings(driver="580.95.05", gpus=(gpu,)))
    assert found.level == "fail"
    assert found.mend.startswith("kill 4711 4712 ")
