"""Whose is what: programs against the installed library, no trace of the build, and what removing and purging leave."""

from __future__ import annotations

import math
import re
from pathlib import Path

from checks import CONFIG, DROP_INS, EDITED, LOOPS, MODEL, Checks

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
PACKAGES = ("taktd", "libtakt1", "libtakt-dev", "python3-taktd-client")
STORE = "/var/lib/taktd/store/pendulum"
STORE_FILE = f"""\
models:
  pendulum: {{path: {STORE}, version: latest}}
loops:
  balance: {{model: pendulum, device: cpu0, period: 1ms}}
"""
# Folders in which software is built; none of ours may name one. What the wheels' makers left in theirs is not ours.
BUILD_FOLDERS = r"/(home|root|builds?|work|usr/src)/|/tmp/(pip|tmp|build)|site-packages|wheelhouse"


class Belongings(Checks):
    """Steps with the packages' files, and with the owner's."""

    # ---- programs ----

    def c_program(self) -> None:
        """A program in C against libtakt-dev: compiled, run, and its figures held against the daemon's"""
        source = "/usr/share/doc/libtakt-dev/examples/loop.c"
        static = "-Wl,-Bstatic $(pkg-config --libs takt) -Wl,-Bdynamic -pthread"
        for kind, link in (("shared", "$(pkg-config --libs takt)"), ("static", static)):
            command = f"cc -Wall -Wextra -Werror -o /srv/loop {source} $(pkg-config --cflags takt) {link}"
            built = self.box.run("sh", "-c", command)
            self.check(f"the example compiles without a warning, {kind}", built.returncode == 0, built.stderr[-800:])
            needed = self.box.says("ldd", "/srv/loop")
            self.check(
                "with the library where it should be", ("libtakt.so.1 => /" in needed) == (kind == "shared"), needed
            )
            self._runs()
        refused = self.box.run("/srv/loop", "balance", "1", user="stranger")
        told = refused.returncode == 1 and "balance" in refused.stderr
        self.check("a non-member's run ends with the reason", told, f"{refused.returncode} {refused.stderr}")

    def _runs(self) -> None:
        before = self._jobs()
        ran = self.box.run("/srv/loop", "balance", "3", user="pilot")
        self.check("it runs to its end", ran.returncode == 0, f"{ran.returncode} {ran.stderr[-500:]}")
        told = re.search(r"cycles (\d+), missed (\d+), late (\d+), without answer (\d+)", ran.stdout)
        cycles, missed, late, unanswered = map(int, told.groups()) if told else (0, 0, 0, 0)
        jobs = self._jobs() - before
        self.check("at 1 kHz, for 3 s", 2900 <= cycles + missed <= 3010, ran.stdout)
        self.check("most cycles have their action in time", (late + unanswered) * 2 < cycles, ran.stdout)
        self.check("each with one of the daemon's jobs", cycles - unanswered <= jobs <= cycles, f"{jobs} {ran.stdout}")
        acted = re.search(r"checksum of the actions (\S+)", ran.stdout)
        checksum = float(acted[1]) if acted else 0.0
        self.check("and actions are numbers", checksum != 0 and math.isfinite(checksum), ran.stdout)
        self.note("; ".join(ran.stdout.splitlines()[1:3]))

    def _jobs(self) -> int:
        """Jobs of the loop that the daemon has counted."""
        loops = self.box.asks("taktctl", "loops", "--json").get("loops", [])
        return sum(int(loop["statistics"]["submitted"]) for loop in loops if loop["name"] == "balance")

    # ---- the packages' files ----

    def paths(self) -> None:
        """No file tells where it was built"""
        listed = f"dpkg -L {' '.join(PACKAGES)} | sort -u; find /usr/lib/taktd -name '*.pyc'"
        count = int(self.box.says("sh", "-c", f"({listed}) | wc -l"))
        self.check("there are files to look into", count > 1000, count)
        here = f"-e {ROOT} -e /build/deb/ -e /build/tools- -e /build/wheelhouse"
        found = self.box.run("sh", "-c", f"({listed}) | xargs -d '\\n' grep -d skip -laF {here}")
        self.check("no file names a folder of this build", (found.returncode, found.stdout) == (123, ""), found.stdout)
        zipped = f"dpkg -L {' '.join(PACKAGES)} | grep '\\.gz$'"
        found = self.box.run("sh", "-c", f"{zipped} | xargs -d '\\n' zgrep -la -E '{BUILD_FOLDERS}'")
        self.check("nor does a packed page or document", found.stdout == "", found.stdout[:1000])
        ours = f"({listed}) | awk '!/^.usr.lib.taktd.vendor./ || /^.usr.lib.taktd.vendor.taktd./'"
        found = self.box.run("sh", "-c", f"{ours} | xargs -d '\\n' grep -d skip -laE '{BUILD_FOLDERS}'")
        self.check("and none of our own any folder of a build", found.stdout == "", found.stdout[:1000])
        modules = "find /usr/lib/taktd/vendor/taktd /usr/lib/python3/dist-packages/taktd -name '*.so'"
        debug = self.box.run("sh", "-c", f"{modules} | xargs -d '\\n' grep -la -e '\\.debug_' -e 'GCC: ('")
        self.check("our modules carry neither debugging nor compiler's notes", debug.stdout == "", debug.stdout)

    # ---- the owner's files ----

    def leave(self) -> None:
        """Remove keeps what is the owner's, a backup brings it back after a purge, and purging leaves nothing"""
        self._import_a_version()
        kept = self._owned()
        self.check("there is something to keep", len(kept) > 6 and f"{STORE}/2/model.onnx" in kept, sorted(kept))
        done = self.apt("remove", "taktd")
        self.check("apt removes it", done.returncode == 0, done.stderr[-500:])
        changed = self._differences(kept)
        self.check("configuration, versions of models and measurements stay as they were", changed == [], changed)
        self.check("no process is left", self.box.daemon_processes() == [], self.box.daemon_processes())
        sockets = self.box.says("find", "/run", "-name", "*.sock", "-path", "*taktd*")
        self.check("nor a socket", sockets == "", sockets)

        self._install_again()
        self.check("installed again it serves the version that was active", self._active() == 2, self._active())
        commands = re.search(r"```sh\n(sudo tar [^`]*)```", OPERATIONS.read_text(encoding="utf-8"))
        backup = commands[1].replace("sudo ", "").strip() if commands else "false"
        saved = self.box.run("sh", "-c", f"cd /srv && {backup}")
        self.check("the backup of operations.md is made", saved.returncode == 0, backup + saved.stderr)
        kept = {path: text for path, text in self._owned().items() if path.startswith(("/etc/", STORE))}
        self._purge("taktd")

        self._install_again(serving=False)
        self.box.run("systemctl", "stop", "taktd.socket", "taktd.service")
        self.box.run("tar", "-C", "/", "-xzf", "/srv/taktd-backup.tgz")
        self.box.run("chown", "-R", "taktd:taktd", "/var/lib/taktd/store")
        self.box.systemctl("daemon-reload")
        self.check("with the backup unpacked it starts", self.restart(), self.box.journal("-n", "20"))
        changed = self._differences(kept)
        self.check("and has what was saved", changed == [] and self._active() == 2, changed)
        self.check("a loop runs on it", self.client(1).get("ok", 0) > 500)

        self._purge(*PACKAGES)
        homes = ("/home/", "/var/spool/mail/", "/var/mail/")
        left = sorted(path for path in self.box.files() - self.before if not path.startswith(homes))
        account = {"/etc/group-", "/etc/passwd-", "/etc/shadow-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-"}
        left = [path for path in left if path not in account and path != "/home"]
        self.check("purging leaves nothing", left == [], left[:20])
        self.check("nothing is left in /run", self.box.says("ls", "/run/taktd") == "")
        self.check("no unit has failed", self.box.failed_units() == "", self.box.failed_units())

    def _import_a_version(self) -> None:
        """As install.md says: the first version by hand, another one by taktctl, activated; and a drop-in."""
        self.box.run("runuser", "-u", "taktd", "--", "mkdir", "-p", f"{STORE}/1")
        self.box.run("install", "-o", "taktd", "-m", "640", MODEL, f"{STORE}/1/model.onnx")
        self.box.run("mkdir", "-p", DROP_INS)
        self.box.run("ln", "-s", "/usr/share/taktd/drop-ins/tcp.conf", f"{DROP_INS}/tcp.conf")
        self.box.systemctl("daemon-reload")
        self.box.write(CONFIG, EDITED)
        self.box.write(LOOPS, STORE_FILE)
        self.check("it serves from the store of versions", self.restart(), self.box.journal("-n", "20"))
        # Another file with the same network: an ONNX file may end in a field that nobody reads.
        self.box.run("sh", "-c", f"(cat {MODEL}; printf '\\032\\003new') >/srv/newer.onnx; chmod 644 /srv/newer.onnx")
        for words in (("add", "pendulum", "/srv/newer.onnx"), ("activate", "pendulum", "2")):
            done = self.box.run("taktctl", "model", *words)
            self.check(f"taktctl model {words[0]} works", done.returncode == 0, done.stdout + done.stderr)

    def _active(self) -> int:
        """Which version of the model is served."""
        models = self.box.asks("taktctl", "model", "list", "pendulum", "--json").get("models", [{}])
        return int(models[0].get("serving") or 0)

    def _owned(self) -> dict[str, str]:
        """What the owner made or the daemon remembers: path → hash."""
        listed = self.box.run(
            "sh", "-c", "find /etc/taktd /etc/systemd/system/taktd.service.d /var/lib/taktd/store "
            "/var/lib/taktd/measurements /var/lib/taktd/inspections -type f -print0 -o -type l -print0 | "
            "xargs -0 sha256sum"
        ).stdout  # fmt: skip
        return {line.split(maxsplit=1)[1]: line.split()[0] for line in listed.splitlines()}

    def _differences(self, kept: dict[str, str]) -> list[str]:
        now = self._owned()
        # A link to the package's drop-in leads nowhere while the package is away; that it is there is what counts.
        links = {path for path in kept if path.startswith(DROP_INS) and self.box.says("readlink", path)}
        return sorted(path for path, content in kept.items() if path not in links and now.get(path) != content)

    def _install_again(self, *, serving: bool = True) -> None:
        done = self.apt("install", f"/srv/{self.package('taktd').name}")
        self.check("apt installs it again", done.returncode == 0, done.stderr[-500:])
        if serving:
            self.check("and it serves", self.until(self.serving), self.box.journal("-n", "20"))

    def _purge(self, *packages: str) -> None:
        done = self.apt("purge", *packages)
        self.check("apt purges it", done.returncode == 0, done.stderr[-500:])
        left = self.box.says("sh", "-c", "ls -d /etc/taktd /var/lib/taktd /run/taktd 2>/dev/null || true")
        self.check("configuration and state are gone", left == "", left)
