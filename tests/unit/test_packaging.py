"""What the packages are made from: complete, consistent, and the shipped files are usable as they are."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from taktd.daemon.config.configuration import load, settings
from taktd.daemon.supervisor import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_HANDED_OVER

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
UNIT = (ROOT / "systemd" / "taktd.service").read_text(encoding="utf-8")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: str = "lock.txt") -> dict[str, str]:
    text = (PACKAGING / lock).read_text(encoding="utf-8")
    return {normal(name): version for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)}


def test_the_lock_has_every_dependency_of_the_daemon() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    names = [normal(name) for name in re.findall(r'^\s*"([A-Za-z0-9._-]+)', block[1], re.MULTILINE)]
    assert names
    assert [name for name in names if name not in locked()] == [], "run packaging/lock.py"


@pytest.mark.parametrize("lock", ["lock.txt", "gpu-lock.txt"])
def test_the_lock_and_the_constraints_name_the_same_versions(lock: str) -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE):
        pinned.setdefault(normal(name), set()).add(version)
    different = {name: version for name, version in locked(lock).items() if version not in pinned.get(name, {version})}
    assert different == {}, "run packaging/lock.py"


@pytest.mark.parametrize("lock", ["lock.txt", "gpu-lock.txt"])
def test_each_locked_library_has_a_hash(lock: str) -> None:
    text = (PACKAGING / lock).read_text(encoding="utf-8")
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_all_that_pip_brings_for_gpus_is_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^gpu = \[(.*?)\]", text, re.MULTILINE)
    assert block is not None
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in re.findall(r'"([A-Za-z0-9._-]+)', block[1]):
        assert re.search(rf"^{re.escape(name)}==", pinned, re.MULTILINE), name


# ---- what comes first on the path ----


@pytest.fixture
def launch(tmp_path: Path) -> Callable[[str | None], subprocess.CompletedProcess[str]]:
    """Starts the packages' launcher over folders of its own; it prints what comes first for it and for its children."""
    for folder in ("vendor", "gpu", "onnxruntime-gpu"):
        (tmp_path / folder).mkdir()
    told = "import os, sys\ndef main():\n    print(sys.path[:3])\n    print(os.environ['PYTHONPATH'].split(':'))\n"
    (tmp_path / "vendor" / "stub.py").write_text(told)
    text = (PACKAGING / "launcher.in").read_text(encoding="utf-8")
    (tmp_path / "taktd").write_text(text.replace("@MODULE@", "stub").replace("/usr/lib/taktd", str(tmp_path)))

    def run(asked: str | None) -> subprocess.CompletedProcess[str]:
        environment = {} if asked is None else {"TAKTD_ONNXRUNTIME": asked}
        command = [sys.executable, "-Es", tmp_path / "taktd"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return subprocess.CompletedProcess([], 0, done.stdout.replace(f"{tmp_path}/", ""), done.stderr)

    return run


def test_the_gpu_package_s_onnx_runtime_comes_first_only_where_it_is_enabled(
    launch: Callable[[str | None], subprocess.CompletedProcess[str]],
) -> None:
    usual, enabled = (launch(asked).stdout.splitlines() for asked in (None, "gpu"))
    assert usual[0].startswith("['gpu', 'vendor', ")
    assert usual[1] == "['gpu', 'vendor']"
    assert enabled == ["['onnxruntime-gpu', 'gpu', 'vendor']"] * 2
    assert launch("gpu").stderr == ""


def test_where_it_is_enabled_and_not_installed_ours_is_used_and_that_is_said(
    launch: Callable[[str | None], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "onnxruntime-gpu").rmdir()
    done = launch("gpu")
    assert done.stdout.splitlines()[1] == "['gpu', 'vendor']"
    assert "apt install taktd-gpu; the ONNX Runtime that taktd brings is used" in done.stderr
    assert "TAKTD_ONNXRUNTIME=yes: allowed is gpu" in launch("yes").stderr


def test_the_gpu_package_depends_on_the_numpy_that_taktd_says_it_has() -> None:
    provides = (PACKAGING / "debian" / "rules").read_text(encoding="utf-8")
    depends = (PACKAGING / "debian-gpu" / "rules").read_text(encoding="utf-8")
    assert 'numpy:Provides="taktd-numpy (= ' in provides
    assert 'numpy:Depends="taktd-numpy (= ' in depends


# ---- the shipped configuration ----


def test_the_shipped_configuration_is_one_and_asks_for_nothing() -> None:
    configuration = load(PACKAGING / "taktd.yaml")
    assert list(configuration.devices) == ["cpu0"]
    assert configuration.loops == {}


def test_its_commented_lines_are_a_configuration_too(tmp_path: Path) -> None:
    text = (PACKAGING / "taktd.yaml").read_text(encoding="utf-8")
    header, _, body = text.partition("devices:")
    file = tmp_path / "taktd.yaml"
    file.write_text(
        header + "devices:" + re.sub(r"^( *)# (?=\S)", r"\1", body, flags=re.MULTILINE).replace("#   ", "  # ")
    )
    text = re.sub(r"^#( {3}\S)", r" \1", file.read_text(), flags=re.MULTILINE)
    file.write_text(re.sub(r"^  # (pendulum|balance):", r"  \1:", text, flags=re.MULTILINE))
    assert list(load(file).loops) == ["balance"]


def test_the_manual_s_example_is_accepted() -> None:
    assert list(load(PACKAGING / "example.yaml").loops) == ["balance"]


def test_the_loop_in_the_installation_guide_is_accepted(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert found is not None
    (tmp_path / "taktd.yaml").write_text(found[1])
    assert list(load(tmp_path / "taktd.yaml").loops) == ["balance"]


# ---- pages, changelog ----


@pytest.mark.parametrize("page", ["taktd.yaml.5", "taktctl.1", "takt.3"])
def test_each_generated_manual_page_is_well_formed(tmp_path: Path, page: str) -> None:
    subprocess.run([sys.executable, PACKAGING / "manual.py", page, tmp_path], check=True, timeout=120)
    text = (tmp_path / page).read_text(encoding="utf-8")
    assert text.startswith(".TH ")
    assert not re.search(r"[^\n]\.(SH|TP|PP|SS)\b", text.replace("\\&", ""))
    if page == "taktd.yaml.5":
        assert [s.key for s in settings() if s.key.replace("-", "\\-") not in text] == []
    if page == "takt.3":
        header = (ROOT / "ipc" / "core" / "takt.h").read_text(encoding="utf-8")
        names = set(re.findall(r"^TAKT_API [^;(]*?(takt_\w+)\(", header, re.MULTILINE))
        assert [name for name in names if f"{name}(" not in text] == []
    if shutil.which("mandoc"):
        told = subprocess.run(["mandoc", "-Tlint", "-Werror", tmp_path / page], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout


def test_the_daemon_s_page_names_each_drop_in_and_each_exit_code() -> None:
    page = (PACKAGING / "man" / "taktd.8").read_text(encoding="utf-8").replace("\\-", "-")
    shipped = [*(ROOT / "systemd" / "drop-ins").glob("*.conf"), *(PACKAGING / "debian-gpu").glob("*.conf")]
    drop_ins = [file.name for file in shipped]
    codes = [str(code) for code in (EXIT_FAILED, EXIT_HANDED_OVER, EXIT_CONFIGURATION)]
    assert [name for name in drop_ins if f".B {name}" not in page] == []
    assert [code for code in codes if f"\n.B {code}\n" not in page] == []


def test_the_debian_changelog_follows_from_the_changes() -> None:
    done = subprocess.run(
        [sys.executable, PACKAGING / "changelog.py", "+x"], capture_output=True, text=True, check=True
    )
    assert re.match(r"taktd \(\d+\.\d+\.\d+\+x\) unstable; urgency=medium\n\n  \* ", done.stdout)
    assert re.search(r"^ -- .+ <\S+>  \w{3}, \d\d \w{3} \d{4} ", done.stdout, re.MULTILINE)
    assert [line for line in done.stdout.splitlines() if line.startswith("  ") and len(line) > 80] == []


# ---- the unit ----


@pytest.mark.parametrize(
    "directive",
    ["RestrictRealtime=yes", "PrivateUsers=yes", "PrivateDevices=yes", "DynamicUser=yes", "RuntimeDirectory="],
)
def test_nothing_takes_the_real_time_rights_or_the_sockets_away(directive: str) -> None:
    assert not re.search(rf"^{re.escape(directive)}", UNIT, re.MULTILINE)


def test_the_unit_turns_telemetry_off_before_anything_is_imported() -> None:
    assert re.search(r"^Environment=.*\bORT_DISABLE_TELEMETRY=1\b", UNIT, re.MULTILINE)


def test_one_process_without_memory_does_not_end_the_others() -> None:
    assert re.search(r"^OOMPolicy=continue$", UNIT, re.MULTILINE)


def test_only_what_fails_at_once_uses_the_starts_up() -> None:
    """docs/operations.md says that the watchdog's restarts never reach the limit, and ten quick ones do."""
    number = {key: int(value) for key, value in re.findall(r"^(\w+)=(\d+)$", UNIT, re.MULTILINE)}
    assert number["StartLimitBurst"] * number["WatchdogSec"] > number["StartLimitIntervalSec"]
    assert number["StartLimitBurst"] * 0.2 < number["StartLimitIntervalSec"]
    assert "RestartSec=200ms\n" in UNIT


@pytest.mark.parametrize("file", sorted((PACKAGING / "debian").glob("*.lintian-overrides")), ids=lambda file: file.name)
def test_each_override_has_its_reason_above_it(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    bare = [line for above, line in pairwise(["", *lines]) if not line.startswith("#") and not above.startswith("#")]
    assert bare == []


def test_drop_ins_say_how_they_are_enabled() -> None:
    for file in (ROOT / "systemd" / "drop-ins").glob("*.conf"):
        text = file.read_text(encoding="utf-8")
        assert "/etc/systemd/system/taktd.service.d" in text, file.name
        assert "daemon-reload" in text, file.name


CRASHES = [("signal", "KILL"), ("core-dump", "SEGV"), ("exit-code", "1"), ("exit-code", str(EXIT_HANDED_OVER))]
ENDS = [("success", "0"), ("timeout", "KILL"), ("watchdog", "ABRT"), ("exit-code", str(EXIT_CONFIGURATION)), ("", "")]


def clear(monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes], result: str, status: str) -> None:
    """Run ExecStopPost in this process, as if the bystander were all that is left in the unit's control group."""
    file = str(ROOT / "systemd" / "clear-executors")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # not beside what is shipped
    spec = importlib.util.spec_from_loader("script", importlib.machinery.SourceFileLoader("script", file))
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "leftovers", lambda: {bystander.pid})
    monkeypatch.setattr(script, "PATIENCE_S", 0.2)
    monkeypatch.setenv("SERVICE_RESULT", result)
    monkeypatch.setenv("EXIT_STATUS", status)
    assert script.main() == 0


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    """An executor that does not hear SIGTERM."""
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(("result", "status"), CRASHES)
def test_executors_are_left_alone_after_a_crash(
    monkeypatch: pytest.MonkeyPatch, stubborn: subprocess.Popen[bytes], result: str, status: str
) -> None:
    clear(monkeypatch, stubborn, result, status)
    with pytest.raises(subprocess.TimeoutExpired):  # a SIGKILL would have landed by then
        stubborn.wait(0.5)


@pytest.mark.parametrize(("result", "status"), ENDS)
def test_executors_are_ended_after_anything_else_whether_they_listen_or_not(
    monkeypatch: pytest.MonkeyPatch, stubborn: subprocess.Popen[bytes], result: str, status: str
) -> None:
    clear(monkeypatch, stubborn, result, status)
    assert stubborn.wait(5) == -signal.SIGKILL


def test_nothing_is_ended_where_there_is_no_unit() -> None:
    """Started by hand, its control group is the session's: it must end nobody."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        if any(line.rstrip().endswith(".service") for line in file):
            pytest.skip("these tests run inside a systemd service")
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        environment = {**os.environ, "SERVICE_RESULT": "success"}
        done = subprocess.run([ROOT / "systemd" / "clear-executors"], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr, bystander.poll()) == (0, "", None)
    finally:
        bystander.kill()
        bystander.wait()
