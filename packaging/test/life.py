"""The life of the packages on one Debian release: installed, used, abused, upgraded, downgraded, removed, purged.

Usage: life.py SUITE FOLDER_OF_PACKAGES [STEP...]   (bookworm build/deb/debian12). One line a check, then their count.
The steps build on each other, in order, in one machine; a step that raises is a failure and the next one is tried.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from belongings import Belongings
from checks import (
    CONFIG,
    DROP_INS,
    EDITED,
    EXPOSURE_MAX,
    HANG_GAP_MS_MAX,
    INSTALLED_KIB_MAX,
    LOOP_FILE,
    LOOPS,
    PACKAGE_BYTES_MAX,
    READY_S_GOAL,
    READY_S_MAX,
    WATCHDOG_S,
)  # fmt: skip
from machine import Machine, wait_until
from trouble import Trouble


class Life(Trouble, Belongings):
    """The steps from a fresh machine to a clean one."""

    # ---- a fresh machine ----

    def install(self) -> None:
        """A fresh machine: the packages install and the service runs"""
        self.check("the machine boots to running", self.box.state == "running", self.box.state)
        for deb in self.folder.glob("*.deb"):
            self.box.copy(deb, f"/srv/{deb.name}")
        self.box.copy(Path(__file__).with_name("client.py"), "/srv/client.py")
        self.before = self.box.files()
        size = self.package("taktd").stat().st_size
        self.check("package taktd is at most 60 MB", size <= PACKAGE_BYTES_MAX, size)
        done = self.apt("install", *(f"/srv/{deb.name}" for deb in self.folder.glob("*.deb")))
        self.check("apt installs all four", done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:])
        kib = int(self.box.says("du", "-sk", "/usr/lib/taktd").split()[0])
        self.check("installed, with byte code, it takes at most 200 MB", kib <= INSTALLED_KIB_MAX, f"{kib} KiB")
        self.note(f"package {size / 1e6:.1f} MB, installed {kib / 1024:.0f} MiB")
        self.check("the service is enabled", self.box.says("systemctl", "is-enabled", "taktd.service") == "enabled")
        self.check("the service becomes active", self.until(lambda: self.box.active), self.box.journal("-n", "20"))
        self.check("no unit has failed", self.box.failed_units() == "", self.box.failed_units())
        self.check("the user came from sysusers", bool(self.box.says("getent", "passwd", "taktd")))
        first = self.box.ready_after_s()
        self.check("it is ready in time", 0 < first <= READY_S_MAX, f"{first:.2f} s")
        self.goal("first start to READY", first, READY_S_GOAL)
        for user, groups in (("pilot", "taktd"), ("admin", "taktd-admin"), ("stranger", "")):
            self.box.run("useradd", "-m", *(["-G", groups] if groups else []), user)

    def units(self) -> None:
        """Units: well formed, tight, each drop-in starts"""
        units = ["taktd.service", "taktd.socket", "takt.slice"]
        verified = self.box.run("systemd-analyze", "verify", "--man=no", *units)
        self.check(
            "systemd-analyze verify has nothing to say", verified.stdout + verified.stderr == "", verified.stderr
        )
        scored = self.box.says("systemd-analyze", "security", "--no-pager", "taktd.service").splitlines()
        exposure = float(next((line.split(":")[1].split()[0] for line in scored if "exposure" in line), "10"))
        self.check(f"systemd-analyze security is at most {EXPOSURE_MAX}", exposure <= EXPOSURE_MAX, exposure)
        self.note(f"exposure {exposure}")
        self.check("a process without memory ends alone", self.box.show("OOMPolicy") == "continue")
        self.box.run("groupadd", "--system", "render")  # udev makes this group, and the box has no udev
        for name in ("gpu", "tcp", "isolated-cores", "cpu-dma-latency"):
            link = f"{DROP_INS}/{name}.conf"
            self.box.run("mkdir", "-p", DROP_INS)
            self.box.run("ln", "-s", f"/usr/share/taktd/drop-ins/{name}.conf", link)
            self.box.systemctl("daemon-reload")
            self.check(f"it runs with drop-in {name}", self.restart(), self.box.journal("-n", "10"))
            if name == "cpu-dma-latency":
                self._holds_latency()
            self.box.run("rm", link)
        self.box.systemctl("daemon-reload")
        self.restart()

    def _holds_latency(self) -> None:
        if not (self.box.root / "dev/cpu_dma_latency").exists() and not self.box.says("ls", "/dev/cpu_dma_latency"):
            self.note("no /dev/cpu_dma_latency on this host")
            return
        held = self.box.says("sh", "-c", f"ls -l /proc/{self.box.supervisor()}/fd")
        self.check("the daemon holds /dev/cpu_dma_latency", "cpu_dma_latency" in held, held)

    # ---- a loop ----

    def loop(self) -> None:
        """A loop: members of the group run the bundled policy at 1 kHz, others are refused"""
        self.box.write(CONFIG, EDITED)
        self.box.write(LOOPS, LOOP_FILE)
        self.check("it restarts with a loop", self.restart(), self.box.journal("-n", "20"))
        status = self.box.says("systemctl", "status", "--no-pager", "taktd.service")
        self.check("systemctl status says what it serves", "1 loop" in status, status)
        self.note(f"start to READY with a loop, measured anew: {self.box.ready_after_s():.2f} s")
        self.check("and restarts with what it has measured", self.restart(), self.box.journal("-n", "20"))
        self.goal("start to READY with a loop, measured before", self.box.ready_after_s(), READY_S_GOAL)
        found = self.client(4)
        self.check("a supplementary member of group taktd runs at 1 kHz", found.get("ok", 0) > 3000, found)
        self.note(f"client: {json.dumps(found)}")
        refused = self.client(1, user="stranger")
        self.check("a non-member is refused", refused.get("error", "").startswith("Denied"), refused)
        measured = self.box.asks("taktctl", "bench", "--loop", "balance", "--seconds", "2", "--json", user="pilot")
        self.check(
            "taktctl bench measures it", measured.get("jobs", 0) > 1500 and measured.get("failed") == 0, measured
        )
        self.note(f"bench: {json.dumps(measured)}")

    def rights(self) -> None:
        """Real-time rights: what /proc says, not what the daemon says"""
        pids = self.box.executors()
        self.check("one executor runs", len(pids) == 1, pids)
        for pid in pids:
            fields = self.box.read(f"/proc/{pid}/stat") or self.box.says("cat", f"/proc/{pid}/stat")
            numbers = fields.rpartition(")")[2].split()
            self.check("it has SCHED_FIFO 80", numbers[37:39] == ["80", "1"], numbers[37:39])
            status = dict(line.split(":", 1) for line in self.box.says("cat", f"/proc/{pid}/status").splitlines())
            self.check("it may run on core 1 only", status["Cpus_allowed_list"].strip() == "1", status)
            self.check("its memory is locked", int(status["VmLck"].split()[0]) > 0, status["VmLck"])
            held = int(status["CapEff"], 16)
            self.check("it has two capabilities and no more", held == (1 << 14 | 1 << 23), hex(held))
        report = self.box.asks("taktctl", "doctor", "--json", "--seconds", "1")
        levels = {finding["check"]: finding["level"] for finding in report.get("findings", [])}
        self.check("the doctor sees the same", levels.get("real-time") == "ok" and "wake-up" in levels, levels)

    # ---- deaths ----

    def kills(self) -> None:
        """kill -9 of each process: answered and recovered"""
        running = self.loop_client()
        victim, begun = self.box.executors()[0], time.monotonic()
        self.box.run("kill", "-9", str(victim))
        back = self.until(lambda: bool(self.box.executors()) and victim not in self.box.executors())
        self.check("an executor that was killed is replaced", back, self.box.journal("-n", "15"))
        self.note(f"executor back after {time.monotonic() - begun:.1f} s")
        self.answered_again(running)

        running = self.loop_client()
        victim, begun = self.box.supervisor(), time.monotonic()
        self.box.run("kill", "-9", str(victim))
        back = self.until(lambda: self.box.supervisor() not in (0, victim) and self.serving())
        self.check("a supervisor that was killed is restarted", back, self.box.journal("-n", "15"))
        self.note(f"supervisor back after {time.monotonic() - begun:.1f} s")
        self.answered_again(running, all_the_time=True)
        kept = self.box.asks("taktctl", "status", "--json").get("executors", [{}])[0].get("switches", {})
        self.check("its executor was adopted", kept.get("adopted") == 1, kept)
        left = [line.split("taktd.daemon.")[-1].split()[0] for line in self.box.daemon_processes()]
        self.check("each process is there once", len(left) == len(set(left)), self.box.daemon_processes())

        gateways = self.gateways()
        self.box.run("kill", "-9", *gateways)
        back = self.until(lambda: bool(self.gateways()) and not self.gateways() & gateways)
        self.check("a gateway that was killed is replaced", back, self.box.daemon_processes())

        serving, victim = self.box.executors()[0], self.box.supervisor()
        self.box.run("kill", "-9", str(victim))
        self.until(lambda: self.box.supervisor() not in (0, victim))
        alive = bool(self.box.says("ps", "-p", str(serving), "-o", "pid="))
        self.check("after a crash executors are left to the next supervisor", alive, self.box.daemon_processes())
        self.until(self.serving)
        self.box.run("kill", "-STOP", *map(str, self.box.executors()))
        self.box.run("systemctl", "stop", "taktd.socket", "taktd.service")
        self.check("a stop ends those that hang, too", self.box.daemon_processes() == [], self.box.daemon_processes())
        self.check("and it starts again", self.restart(), self.box.journal("-n", "20"))
        both = f"kill -9 {self.box.supervisor()}; systemctl stop taktd.socket taktd.service"
        self.box.run("sh", "-c", both)
        left = wait_until(lambda: self.box.daemon_processes() == [], 5)
        self.check("a stop right after a crash leaves nobody either", left, self.box.daemon_processes())
        self.check("and it starts after that", self.restart(), self.box.journal("-n", "20"))

    def watchdog(self) -> None:
        """The watchdog: a supervisor that hangs, and one that can't make anybody serve"""
        running, executor, victim = self.loop_client(), self.box.executors()[0], self.box.supervisor()
        self.box.run("kill", "-STOP", str(victim))
        back = self.until(lambda: self.box.supervisor() not in (0, victim) and self.serving())
        self.check("a hanging supervisor is replaced", back, self.box.journal("-n", "15"))
        lanes = self.answered_again(running).get("lanes", [])
        self.note(f"lanes: {lanes}")
        served = len(lanes) == 2 and lanes[0]["seconds"] > WATCHDOG_S - 1 and lanes[0]["gap_ms"] < HANG_GAP_MS_MAX
        self.check("while it hung, its executor served on without a gap", served, lanes)
        self.check("its successor has a new one", executor not in self.box.executors(), self.box.executors())

        stuck, victim = self.box.executors()[0], self.box.supervisor()
        self.box.run("kill", "-STOP", str(victim), str(stuck))
        back = self.until(lambda: self.box.supervisor() not in (0, victim) and self.serving())
        self.check("one that hangs together with its executor is replaced, too", back, self.box.journal("-n", "15"))
        self.check("by the watchdog", "watchdog timeout" in self.box.journal("-n", "60").lower())
        gone = not self.box.says("ps", "-p", str(stuck), "-o", "pid=")
        self.check("its executors are cleared away first", gone, self.box.daemon_processes())

        library, victim = "/usr/lib/taktd/vendor/onnxruntime", self.box.supervisor()
        restarts = int(self.box.show("NRestarts") or 0)
        self.box.run("mv", library, f"{library}.away")
        for pid in self.box.executors():
            self.box.run("kill", "-9", str(pid))
        starved = wait_until(lambda: int(self.box.show("NRestarts") or 0) > restarts, 120)
        self.check("when no executor can serve, systemd restarts the service", starved, self.box.journal("-n", "20"))
        self.box.run("mv", f"{library}.away", library)
        self.check(
            "and once that is mended it serves by itself", self.until(self.serving), self.box.journal("-n", "20")
        )
        self.restart()

    # ---- configuration ----

    def bad_configuration(self) -> None:
        """A refused configuration: exit code 78, a message with line and key, no restart loop"""
        self.box.write(CONFIG, EDITED.replace("priority", "priorty"))
        self.box.run("systemctl", "restart", "taktd.service")
        self.until(lambda: self.box.show("ActiveState") == "failed")
        restarts = self.box.show("NRestarts")
        self.check("the unit has failed", self.box.show("ActiveState") == "failed", self.box.show("ActiveState"))
        self.check("with exit code 78", self.box.show("ExecMainStatus") == "78", self.box.show("ExecMainStatus"))
        said = self.box.journal("-n", "30")
        self.check("the journal names file, line and key", "taktd.yaml:3" in said and "priorty" in said, said)
        time.sleep(2)
        self.check("it isn't restarted", self.box.show("NRestarts") == restarts and not self.box.active)
        self.check("nobody is left", self.box.daemon_processes() == [], self.box.daemon_processes())
        self.box.write(CONFIG, EDITED)
        self.check("mended, it serves", self.restart(), self.box.journal("-n", "20"))

    def reload(self) -> None:
        """Reload: what can be changed is, what is refused leaves everything as it was"""
        pid = self.box.supervisor()
        self.box.write(
            LOOPS, LOOP_FILE.replace("period: 1ms", "period: 1ms, allow: {groups: [taktd], users: [stranger]}")
        )
        self.check("systemctl reload works", self.box.systemctl("reload", "taktd.service"))
        allowed = wait_until(lambda: self.client(0.5, user="stranger").get("ok", 0) > 0, 10)
        self.check("the new rule holds", allowed, self.box.journal("-n", "10"))
        self.check("in the same process", self.box.supervisor() == pid)
        self.box.write(CONFIG, "devices: nonsense\n")
        self.box.systemctl("reload", "taktd.service")
        refused = wait_until(lambda: "refused" in self.box.journal("-n", "20"), 10)
        self.check("a refused reload is said in the journal", refused, self.box.journal("-n", "10"))
        self.check("and the service goes on", self.serving() and self.client(0.5).get("ok", 0) > 0)
        self.box.write(CONFIG, EDITED)
        self.box.write(LOOPS, LOOP_FILE)
        asked = self.box.run("taktctl", "reload", "--json", user="admin")
        self.check("a member of taktd-admin may reload", asked.returncode == 0, asked.stdout + asked.stderr)
        asked = self.box.run("taktctl", "reload", "--json", user="pilot")
        self.check("a member of taktd may not", asked.returncode == 1, asked.stdout + asked.stderr)

    def journal_fields(self) -> None:
        """The journal: structured fields and message ids"""
        lines = self.box.says("journalctl", "--no-pager", "-u", "taktd.service", "-o", "json").splitlines()
        entries = [json.loads(line) for line in lines]
        fields = {name for entry in entries for name in entry if name.startswith("TAKT_")}
        wanted = {"TAKT_EPOCH", "TAKT_DEVICE", "TAKT_CAUSE", "TAKT_LOOP"}
        self.check("entries carry TAKT_ fields", wanted <= fields, sorted(fields))
        one_loop = self.box.journal("TAKT_LOOP=balance")
        self.check("one loop's switches are found by its name", "is served by executor cpu0" in one_loop, one_loop)
        identified = [
            entry for entry in entries if "MESSAGE_ID" in entry and entry.get("_COMM", "").startswith("taktd")
        ]
        self.check("and message ids", bool(identified), sorted(fields))

    def stop(self) -> None:
        """Stop: nobody is left behind"""
        begun = time.monotonic()
        self.box.run("systemctl", "stop", "taktd.socket", "taktd.service")
        self.note(f"stopped after {time.monotonic() - begun:.1f} s")
        self.check("no process is left", self.box.daemon_processes() == [], self.box.daemon_processes())
        self.check("no socket is left", self.box.says("ls", "/run/taktd").split() in ([], ["taktd.lock"]))
        result = self.box.show("Result")
        self.check("the stop was a success", result == "success", result)
        self.box.systemctl("start", "taktd.socket")
        woken = self.client(2)
        self.check("the socket wakes it for the first client", woken.get("ok", 0) > 0, woken)
        self._left_over()

    def _left_over(self) -> None:
        """Socket files that nobody listens at, as a machine leaves them that loses its power, are in nobody's way."""
        self.box.run("systemctl", "stop", "taktd.socket", "taktd.service")
        names = ("lanes.sock", "control.sock", "executors.sock", "grpc.sock", "zmq.sock", "events.sock")
        make = "import socket, sys; [socket.socket(socket.AF_UNIX).bind('/run/taktd/' + name) for name in sys.argv[1:]]"
        made = self.box.run("python3", "-c", make, *names, user="taktd")
        self.check("socket files are left over", made.returncode == 0, made.stderr)
        self.check("taktd starts with them", self.restart(), self.box.journal("-n", "20"))
        self.check("and serves the loop", self.client(1).get("ok", 0) > 300, self.box.says("taktctl", "status"))
        stopped = self.box.run("systemctl", "stop", "taktd.socket", "taktd.service")
        left = self.box.says("ls", "/run/taktd").split()
        clean = stopped.returncode == 0 and set(left) <= {"taktd.lock"} and self.box.show("Result") == "success"
        self.check("a stop is a stop, and takes them along", clean, f"{left} {self.box.show('Result')}")
        self.check("nobody is left behind", self.box.daemon_processes() == [], self.box.daemon_processes())
        self.check("and it starts again", self.restart(), self.box.journal("-n", "20"))

    # ---- versions ----

    def upgrade(self) -> None:
        """Upgrade N to N+1 under a running loop, and back"""
        edited = self.box.read(CONFIG)
        with tempfile.TemporaryDirectory() as scratch:
            self.newer = next_version(self.package("taktd"), Path(scratch))
            self.box.copy(self.newer, f"/srv/{self.newer.name}")
        running = self.loop_client()
        self._other_version("apt upgrades it", running, f"/srv/{self.newer.name}")
        self.check("the edited conffile stays", self.box.read(CONFIG) == edited)
        self.check("the new default lies beside it", bool(self.box.read(f"{CONFIG}.dpkg-dist")))
        self.check("state was kept", bool(self.box.says("ls", "/var/lib/taktd")))
        older = f"/srv/{self.package('taktd').name}"
        self._other_version("apt downgrades it", self.loop_client(), "--allow-downgrades", older)
        self.box.write(CONFIG, EDITED + "future: {key: 1}\n")
        self.box.run("systemctl", "restart", "taktd.service")
        self.until(lambda: self.box.show("ActiveState") == "failed")
        ended = self.box.show("ExecMainStatus"), self.box.journal("-n", "10")
        named = ended[0] == "78" and "taktd.yaml:4" in ended[1] and "future" in ended[1]
        self.check("a key that only a newer version knows is refused, with its line", named, ended)
        self.box.write(CONFIG, EDITED)
        self.restart()

    def _other_version(self, sentence: str, client: subprocess.Popen[str], *words: str) -> None:
        """Check that apt puts another version in place of the running one, which hands its loops over."""
        supervisor, executors, begun = self.box.supervisor(), self.box.executors(), time.monotonic()
        done = self.apt("install", *words)
        self.check(sentence, done.returncode == 0, done.stderr[-1000:])
        self.check("the new supervisor runs", self.box.supervisor() not in (0, supervisor) and self.until(self.serving))
        replaced = self.until(lambda: bool(self.box.executors()) and not set(self.box.executors()) & set(executors))
        self.check("and new executors", replaced, self.box.daemon_processes())
        self.note(f"after {time.monotonic() - begun:.1f} s")
        self.answered_again(client, all_the_time=True)
        self.check(
            "nobody of the old version is left", len(self.box.daemon_processes()) == 3, self.box.daemon_processes()
        )


def next_version(package: Path, scratch: Path) -> Path:
    """The same package under the next version, with another default configuration and other code."""
    tree = scratch / "tree"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    control = tree / "DEBIAN" / "control"
    text = control.read_text()
    version = next(line.split()[1] for line in text.splitlines() if line.startswith("Version:"))
    control.write_text(text.replace(f"Version: {version}", f"Version: {version}+next"))
    conffile = tree / CONFIG.lstrip("/")
    conffile.write_text(conffile.read_text() + "# a new default\n")
    program = tree / "usr/lib/taktd/vendor/taktd/daemon/executor.py"
    program.write_text(program.read_text() + "# a new version\n")
    newer = scratch / f"taktd_{version}+next_amd64.deb"
    subprocess.run(
        ["dpkg-deb", "-Zzstd", "-z1", "--root-owner-group", "-b", tree, newer], check=True, stdout=subprocess.DEVNULL
    )
    return newer


def main() -> int:
    suite, folder = sys.argv[1], Path(sys.argv[2])
    only = set(sys.argv[3:])
    with Machine(f"life-{suite}", suite) as machine:
        life = Life(machine, folder)
        steps = [
            life.install, life.units, life.loop, life.rights, life.c_program, life.kills, life.watchdog,
            life.bad_configuration, life.reload, life.journal_fields, life.want, life.taken, life.no_gpu, life.stop,
            life.upgrade, life.paths, life.leave,
        ]  # fmt: skip
        for step in steps:
            if not only or step.__name__ in only | {"install"}:
                life.step(step)
    print(f"{life.passed} passed, {life.failed} failed, {life.missed} goals missed")
    return 1 if life.failed else 0


if __name__ == "__main__":
    sys.exit(main())
