"""Bad days for the daemon: what it wants and does not get, what others have taken, what isn't there."""

from __future__ import annotations

from checks import CONFIG, DROP_INS, EDITED, LOOP_FILE, LOOPS, MODEL, Checks
from machine import wait_until

GPU_FILE = f"""\
models:
  pendulum: {{path: {MODEL}}}
loops:
  balance: {{model: pendulum, device: gpu0, period: 1ms, fallback: [cpu0], fallback_uncertified: true}}
"""


class Trouble(Checks):
    """Steps that leave the machine as they found it: with one loop, served."""

    def want(self) -> None:
        """Want: no capabilities, no disk, no folder of one's own"""
        rights = "[Service]\nAmbientCapabilities=\nCapabilityBoundingSet=\nLimitRTPRIO=0\nLimitMEMLOCK=65536\n"
        self.box.write(f"{DROP_INS}/poor.conf", rights)
        self.box.systemctl("daemon-reload")
        self.check("without capabilities it runs", self.restart(), self.box.journal("-n", "20"))
        status = self.box.says("systemctl", "status", "--no-pager", "taktd.service")
        self.check("and is not certified", "not certified" in status, status)
        said = self.box.journal("-n", "40").lower()
        self.check("and says that it isn't real-time", "real-time" in said, said)
        self.box.run("rm", f"{DROP_INS}/poor.conf")
        self.box.systemctl("daemon-reload")

        self.box.run("mount", "-t", "tmpfs", "-o", "size=4k,mode=0755", "full", "/var/lib/taktd")
        self.box.run("chown", "taktd:taktd", "/var/lib/taktd")
        self.box.run("sh", "-c", "head -c 1M /dev/zero >/var/lib/taktd/filler")
        self.check("with a full disk it serves", self.restart(), self.box.journal("-n", "20"))
        self.check("a loop too", self.client(0.5).get("ok", 0) > 0)
        self.box.run("rm", "/var/lib/taktd/filler")
        self.check("with room again it serves", self.restart(), self.box.journal("-n", "20"))
        self.box.run("sh", "-c", "head -c 1M /dev/zero >/var/lib/taktd/filler")
        self.check("and goes on when the disk fills up meanwhile", self.client(2).get("ok", 0) > 1000)
        self.check("with each part of it serving", self.serving(), self.box.says("taktctl", "status"))
        self.box.run("systemctl", "stop", "taktd.socket", "taktd.service")
        self.box.run("umount", "/var/lib/taktd")
        self.check("on its own disk it starts again", self.restart(), self.box.journal("-n", "20"))

        self.box.write(f"{DROP_INS}/locked.conf", "[Service]\nReadOnlyPaths=/var/lib/taktd\n")
        self.box.systemctl("daemon-reload")
        self.check("with a state folder it can't write it serves", self.restart(), self.box.journal("-n", "20"))
        self.box.run("rm", f"{DROP_INS}/locked.conf")
        self.box.systemctl("daemon-reload")
        self.restart()

        elsewhere = ("env", "TAKTD_RUNTIME_DIR=/run/taktd", "taktd", "--config", CONFIG)
        second = self.box.run(*elsewhere, user="taktd", seconds=60)
        told = second.returncode == 1 and f"(pid {self.box.supervisor()})" in second.stderr
        self.check("a second taktd on the same sockets refuses and names the first", told, second.stderr)
        self.check("which goes on", self.serving() and self.client(0.5).get("ok", 0) > 0)

    def taken(self) -> None:
        """Taken: a TCP port that another program has"""
        self.box.run("ln", "-s", "/usr/share/taktd/drop-ins/tcp.conf", f"{DROP_INS}/tcp.conf")
        self.box.systemctl("daemon-reload")
        self.box.write(CONFIG, EDITED + 'http: {listen: "127.0.0.1:9464"}\n')
        somebody = self.box.start("python3", "-m", "http.server", "9464", "--bind", "127.0.0.1", "--directory", "/srv")
        fetch = ("python3", "-c", "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/').status)")
        self.check("another program listens", wait_until(lambda: self.box.says(*fetch) == "200", 20))
        self.box.systemctl("reset-failed")
        started = self.box.systemctl("restart", "taktd.service")
        self.check("taktd starts all the same", started and self.box.active, self.box.journal("-n", "10"))
        self.check("and serves the loop", self.client(1).get("ok", 0) > 500)
        said = self.box.journal("-n", "30")
        self.check("and says which address it can't have", "HTTP can't listen at 127.0.0.1:9464" in said, said)
        self.check("taktctl status doesn't call that ready", self.box.run("taktctl", "status").returncode == 1)
        self.box.run("pkill", "-TERM", "-f", "http.server 9464")
        somebody.communicate(timeout=20)
        self.check("it listens as soon as it can", wait_until(self.serving, 20), self.box.says("taktctl", "status"))
        self.box.run("rm", f"{DROP_INS}/tcp.conf")
        self.box.write(CONFIG, EDITED)
        self.box.systemctl("daemon-reload")
        self.check("without the port it serves as before", self.restart(), self.box.journal("-n", "20"))

    def no_gpu(self) -> None:
        """A GPU that isn't there (yet): no driver, no device node"""
        self.box.write(CONFIG, EDITED.rstrip() + "\n  gpu0: {driver: cuda, gpu: 0}\n")
        self.box.write(LOOPS, GPU_FILE)
        self.box.systemctl("reset-failed")
        self.box.systemctl("restart", "taktd.service")
        self.check("taktd runs", self.until(lambda: self.box.active), self.box.journal("-n", "20"))
        answered = self.until(lambda: self.client(1).get("ok", 0) > 100)
        self.check("the loop is answered by its stand-in", answered, self.box.says("taktctl", "status"))
        status = self.box.says("systemctl", "status", "--no-pager", "taktd.service")
        self.check("it isn't certified", "not certified" in status, status)
        said = self.box.journal("-n", "60")
        self.check("the journal names the device and what is missing", "gpu0" in said and "CUDA" in said, said)
        self.check("it isn't restarted for that", self.box.show("NRestarts") == "0", self.box.show("NRestarts"))
        report = self.box.asks("taktctl", "doctor", "--json", "--seconds", "0")
        levels = {finding["check"]: finding["level"] for finding in report.get("findings", [])}
        self.check("the doctor finds no driver and no node", levels.get("gpu-driver") == "fail", levels)
        self.box.write(CONFIG, EDITED)
        self.box.write(LOOPS, LOOP_FILE)
        self.check("and without it all is as before", self.restart(), self.box.journal("-n", "20"))
