"""The life of the package taktd-gpu on one Debian release, on a simulated driver: no GPU is needed, none is used.

Usage: gpu_life.py SUITE FOLDER_OF_PACKAGES FOLDER_OF_TAKTD_GPU [STEP...]   One line a check, then their count.
The steps build on each other, in order, in one machine. The driver is the simulated libcuda.so.1 of the tests, TensorRT
their stand-in, put where NVIDIA's packages put the real ones: neither can be shipped or downloaded here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import CONFIG, DROP_INS, EDITED, LOOP_FILE, LOOPS, MODEL, Checks
from machine import Machine

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "fakes"
VENDOR, PYCUDA, RUNTIME = (f"/usr/lib/taktd/{name}" for name in ("vendor", "gpu", "onnxruntime-gpu"))
LIBCUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
DEVICES = EDITED.rstrip() + '\n  gpu0: {driver: cuda, gpu: "0"}\n'
ONNX_DEVICES = EDITED.rstrip() + '\n  gpu0: {driver: cuda, gpu: {device: "0", runtime: onnxruntime}}\n'
GPU_LOOP = LOOP_FILE.replace(
    "device: cpu0, period: 1ms", "device: gpu0, period: 10ms, fallback: [cpu0], fallback_uncertified: true"
)
MINIMUM_MB, MAXIMUM_MB = 150, 260  # the package: CUDA's kernels are in it, its libraries are not
# Tried with the packages' own libraries, in their order: what is imported from where, and what it answers.
ANSWERS = f"""
import hashlib, json, numpy, onnxruntime
session = onnxruntime.InferenceSession({MODEL!r}, providers=["CPUExecutionProvider"])
(wanted,) = session.get_inputs()
dims = [d if isinstance(d, int) else 1 for d in wanted.shape]
draw = numpy.random.default_rng(7)
inputs = [draw.standard_normal(dims).astype("f4") for _ in range(1000)]
outputs = [session.run(None, {{wanted.name: x}})[0] for x in inputs]
print(json.dumps([onnxruntime.__version__, onnxruntime.__file__, session.get_providers(),
                  hashlib.sha256(b"".join(o.tobytes() for o in outputs)).hexdigest()]))
"""
DRIVER = """
import json, numpy, pycuda, pycuda.driver as driver
driver.init()
context = driver.Device(0).retain_primary_context()
context.push()
sent = numpy.arange(1000, dtype=numpy.float32)
block = driver.to_device(sent)
back = driver.from_device(block, sent.shape, sent.dtype)
pinned = driver.pagelocked_empty(16, numpy.float32)
told = [pycuda.VERSION_TEXT, pycuda.__file__, numpy.__version__, numpy.__file__, bool((back == sent).all())]
block.free()
context.pop()
print(json.dumps(told))
"""


class GpuLife(Checks):
    def __init__(self, machine: Machine, folder: Path, gpu_folder: Path) -> None:
        super().__init__(machine, folder)
        self.gpu = next(gpu_folder.glob("taktd-gpu_*.deb"))

    def python(self, program: str, *folders: str) -> subprocess.CompletedProcess[str]:
        path = "PYTHONPATH=" + ":".join(folders)
        return self.box.run("env", path, "ORT_DISABLE_TELEMETRY=1", "python3", "-s", "-c", program)

    def selftest(self, *words: str) -> subprocess.CompletedProcess[str]:
        lazy = "FAKE_CUDA_LAZY_QUERIES=0"  # the simulated driver's streams run by themselves, as a card's do
        return self.box.run("env", lazy, "taktctl", "selftest", "--device", "gpu0", *words)

    def loaded(self) -> str:
        """Where the ONNX Runtime of the executors is mapped from."""
        pids = " ".join(f"/proc/{pid}/maps" for pid in self.box.executors())
        return self.box.says("sh", "-c", f"cat {pids} | grep -o '/usr.*onnxruntime_pybind11_state.*' | sort -u")

    def configure(self, devices: str, loops: str) -> bool:
        self.box.write(CONFIG, devices)
        self.box.write(LOOPS, loops)
        return self.restart()

    def drop_in(self, name: str, text: str = "") -> None:
        if text:
            self.box.write(f"{DROP_INS}/{name}.conf", text)
        else:
            self.box.run("mkdir", "-p", DROP_INS)
            self.box.run("ln", "-sf", f"/usr/share/taktd/drop-ins/{name}.conf", DROP_INS)
        self.box.systemctl("daemon-reload")

    # ---- steps ----

    def install(self) -> None:
        """A fresh machine: taktd and taktd-gpu install together"""
        debs = [*self.folder.glob("*.deb"), self.gpu]
        for deb in debs:
            self.box.copy(deb, f"/srv/{deb.name}")
        self.box.copy(Path(__file__).with_name("client.py"), "/srv/client.py")
        self.before = self.box.files()
        done = self.apt("install", *(f"/srv/{deb.name}" for deb in debs))
        self.check("apt installs them", done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:])
        size = self.gpu.stat().st_size / 1e6
        self.check(f"taktd-gpu has {MINIMUM_MB} to {MAXIMUM_MB} MB", MINIMUM_MB < size < MAXIMUM_MB, size)
        kib = sum(int(self.box.says("du", "-sk", folder).split()[0]) for folder in (PYCUDA, RUNTIME))
        self.note(f"package {size:.0f} MB, installed {kib / 1024:.0f} MiB")
        libraries = self.box.says("sh", "-c", f"find {PYCUDA} {RUNTIME} -name '*.so*' -printf '%f\\n'").split()
        nvidia = [n for n in libraries if n.startswith(("libcu", "libnv"))]
        self.check("no library of NVIDIA's is in it", nvidia == [] and len(libraries) > 3, libraries)
        self.check("the service becomes active", self.until(lambda: self.box.active), self.box.journal("-n", "20"))
        self.check("no unit has failed", self.box.failed_units() == "", self.box.failed_units())
        for user, groups in (("pilot", "taktd"), ("admin", "taktd-admin")):
            self.box.run("useradd", "-m", "-G", groups, user)
        self.box.run("groupadd", "--system", "render")  # udev makes this group, and the box has no udev
        told = self.box.read("/usr/share/doc/taktd-gpu/copyright").lower().replace("onnx runtime", "onnxruntime-gpu")
        names = self.box.says(
            "sh", "-c", f"cd {PYCUDA} && ls -d *.dist-info && cd {RUNTIME} && ls -d *.dist-info"
        ).split()
        unnamed = [name for name in names if name.split("-")[0].lower().replace("_", "-") not in told]
        built = self.box.run(
            "grep", "-rlaF", "-e", str(ROOT), "-e", "/build/deb/", "-e", "/tmp/taktd-gpu", PYCUDA, RUNTIME
        )
        self.check("no build path in any file", built.stdout == "", built.stdout[:500])
        self.check("the copyright file names each library", unnamed == [] and len(names) > 5, unnamed)

    def no_driver(self) -> None:
        """Without a driver: nothing of it is needed, and what is missing is said"""
        done = self.selftest()
        told = done.returncode == 3 and done.stdout.startswith("skipped: no CUDA device")
        self.check("the self-test is skipped, exit code 3", told, f"{done.returncode} {done.stdout}{done.stderr}")
        done = self.python("import pycuda.driver", PYCUDA, VENDOR)
        self.check("pycuda asks for libcuda.so.1", "libcuda.so.1" in done.stderr, done.stderr[-500:])
        self.check("the daemon serves a loop", self.configure(EDITED, LOOP_FILE), self.box.journal("-n", "20"))
        self.check("at 1 kHz", self.client(2).get("ok", 0) > 1000)
        self.check("with the ONNX Runtime that taktd brings", self.loaded().startswith(VENDOR), self.loaded())

    def driver(self) -> None:
        """A (simulated) driver: pycuda works with taktd's numpy, and the self-test with pycuda"""
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["make", "-s", "-C", FAKES / "cuda", f"OUT={scratch}"], check=True)
            self.box.copy(Path(scratch, "libcuda.so.1"), LIBCUDA)
        done = self.python(DRIVER, PYCUDA, VENDOR)
        self.check("pycuda.driver is imported and copies", done.returncode == 0, done.stderr[-800:])
        version, at, numpy, numpy_at, same = json.loads(done.stdout or "[0, 0, 0, 0, 0]")
        right = str(at).startswith(PYCUDA) and str(numpy_at).startswith(VENDOR) and same is True
        self.check("its own, with taktd's numpy", right, done.stdout)
        wanted = self.box.says("dpkg-query", "-W", "-f", "${Depends}", "taktd-gpu")
        self.check("the numpy that the package was made for", f"taktd-numpy (= {numpy})" in wanted, wanted)
        self.note(f"pycuda {version}, numpy {numpy}")
        done = self.selftest("--json", "--runs", "200")
        report = json.loads(done.stdout or "{}")
        outcomes = {step["name"]: (step["outcome"], step["text"]) for step in report.get("steps", [])}
        self.check("the self-test fails nowhere", done.returncode == 0, done.stdout + done.stderr)
        runtime = report.get("device", {}).get("runtime", "")
        self.check("and allocates by pycuda", f"pycuda {version}" in runtime, report.get("device"))
        self.check(
            "the driver's conformance suite passes", outcomes.get("driver conformance", "")[0] == "passed", outcomes
        )
        engine = outcomes.get("build and load the bundled model", ("", ""))
        told = engine[0] == "skipped" and "python3-libnvinfer" in engine[1]
        self.check("TensorRT is missing: which, and how to get it", told, engine)

    def tensorrt(self) -> None:
        """TensorRT (a stand-in) where the distribution's packages put it: found behind taktd's own libraries"""
        for file in sorted((FAKES / "tensorrt").rglob("*")):
            if file.is_file() and file.suffix in (".py", ".json"):
                self.box.copy(file, f"/srv/fakes/tensorrt/{file.relative_to(FAKES / 'tensorrt')}")
        self.box.run("ln", "-s", "/srv/fakes/tensorrt/site/tensorrt", "/usr/lib/python3/dist-packages/tensorrt")
        done = self.selftest("--json", "--runs", "200")
        steps = json.loads(done.stdout or "{}").get("steps", [])
        passed = done.returncode == 0 and len(steps) > 7 and all(step["outcome"] == "passed" for step in steps)
        self.check("every step of the self-test passes", passed, done.stdout + done.stderr)
        self.drop_in("gpu")
        self.drop_in("simulated", "[Service]\nEnvironment=FAKE_CUDA_LAZY_QUERIES=0\n")
        self.check("the service serves a loop on gpu0", self.configure(DEVICES, GPU_LOOP), self.box.journal("-n", "30"))
        primary = self.until(lambda: self.role() == "primary")
        self.check("by the GPU, not by its stand-in", primary, self.box.says("taktctl", "status"))
        self.check("and answers", self.client(2).get("ok", 0) > 100, self.box.journal("-n", "20"))

    def role(self) -> str:
        loops = self.box.asks("taktctl", "status", "--json").get("loops", [])
        return next((str(loop["role"]) for loop in loops), "")

    def enable(self) -> None:
        """ONNX Runtime with CUDA: first on the path once it is enabled, and honest without CUDA's libraries"""
        ours, theirs = (
            json.loads(self.python(ANSWERS, *p).stdout or "[0, 0, 0, 0]") for p in ((VENDOR,), (RUNTIME, VENDOR))
        )
        self.check("it is imported from its own folder", str(theirs[1]).startswith(RUNTIME), theirs)
        self.check("and runs on the CPU: providers read back", theirs[2] == ["CPUExecutionProvider"], theirs)
        self.check(
            "its answers on the CPU are those of taktd's, bit for bit", ours[3] == theirs[3] != 0, [ours, theirs]
        )
        self.note(f"onnxruntime {ours[0]}, onnxruntime-gpu {theirs[0]}")
        self.drop_in("onnxruntime-gpu")
        self.check("enabled, the service serves", self.configure(EDITED, LOOP_FILE), self.box.journal("-n", "20"))
        self.check("with it", self.loaded().startswith(RUNTIME), self.loaded())
        self.check("at 1 kHz", self.client(2).get("ok", 0) > 1000)
        self.configure(ONNX_DEVICES, GPU_LOOP)
        answered = self.until(lambda: self.client(1).get("ok", 0) > 50)
        self.check("a GPU device with it: the stand-in answers", answered, self.box.journal("-n", "20"))
        said = self.until(lambda: "libcublasLt.so.13" in self.box.journal("-n", "40"))
        self.check("and the journal names the library that is missing", said, self.box.journal("-n", "20"))
        self.check(
            "with it on the CPU all is as before", self.configure(EDITED, LOOP_FILE), self.box.journal("-n", "20")
        )

    def disable(self) -> None:
        """Disabled again; a switch that means nothing is said"""
        self.box.run("rm", f"{DROP_INS}/onnxruntime-gpu.conf")
        self.box.systemctl("daemon-reload")
        self.check("disabled, the service serves", self.restart(), self.box.journal("-n", "20"))
        self.check("with what taktd brings", self.loaded().startswith(VENDOR), self.loaded())
        wrong = self.box.run("env", "TAKTD_ONNXRUNTIME=cuda", "taktctl", "--version")
        told = wrong.returncode == 0 and "allowed is gpu" in wrong.stderr
        self.check("another value is refused in words", told, wrong.stdout + wrong.stderr)

    def remove(self) -> None:
        """Removed under a running loop that uses it, and back: the client notices nothing"""
        self.drop_in("onnxruntime-gpu")
        self.restart()
        self.exchanged("apt removes it", VENDOR, "remove", "taktd-gpu")
        said = self.box.journal("-n", "40")
        self.check("the journal says that it isn't there", f"{RUNTIME} is not there" in said, said)
        self.exchanged("apt installs it again", RUNTIME, "install", f"/srv/{self.gpu.name}")

    def exchanged(self, sentence: str, place: str, *words: str) -> None:
        client, executors = self.loop_client(), set(self.box.executors())
        done = self.apt(*words)
        self.check(sentence, done.returncode == 0, done.stdout[-500:] + done.stderr[-800:])
        new = self.until(lambda: bool(self.box.executors()) and not set(self.box.executors()) & executors)
        failed = self.failed
        self.answered_again(client, all_the_time=True)
        if self.failed > failed:
            self.note(self.box.journal("-n", "60"))
        if not new and "was taken back" in self.box.journal("-n", "20"):
            # Its first seconds had more misses than the old one's: that happens on a busy machine, and is right.
            self.note("what is installed now was taken back: this machine is busy; restarted")
            new = self.restart()
        self.check("new executors take over", new, self.box.journal("-n", "20"))
        self.check(f"with the ONNX Runtime of {place}", self.loaded().startswith(place), self.loaded())

    def upgrade(self) -> None:
        """Other versions of taktd: one with the same numpy, one with another"""
        with tempfile.TemporaryDirectory() as scratch:
            for name, old, new in (("same", "", ""), ("other", "taktd-numpy (= ", "taktd-numpy (= 9.")):
                made = next_version(self.package("taktd"), Path(scratch, name), name, old, new)
                self.box.copy(made, f"/srv/{made.name}")
        same, other = (next(self.box.root.glob(f"srv/taktd_*next{name}*")).name for name in ("same", "other"))
        self.exchanged("apt upgrades taktd alone", RUNTIME, "install", f"/srv/{same}")
        there = self.box.says("dpkg-query", "-W", "-f", "${db:Status-Abbrev}", "taktd-gpu")
        self.check("taktd-gpu stays", there.startswith("ii"), there)
        done = self.python(DRIVER, PYCUDA, VENDOR)
        self.check("and its pycuda works", done.returncode == 0, done.stderr[-500:])
        compiled = self.box.says(
            "sh", "-c", f"ls {PYCUDA}/pycuda/__pycache__ {RUNTIME}/onnxruntime/__pycache__ | wc -l"
        )
        self.check("its byte code is still there", int(compiled or 0) > 4, compiled)
        done = self.apt("install", "--no-remove", f"/srv/{other}")
        there = self.box.says("dpkg-query", "-W", "-f", "${Version}", "taktd")
        refused = done.returncode != 0 and there.endswith("+nextsame")
        self.check("apt refuses a taktd with another numpy beside it", refused, done.stdout + done.stderr)
        self.check("and the loop is served all the same", self.serving() and self.client(1).get("ok", 0) > 0)
        older = f"/srv/{self.package('taktd').name}"
        self.exchanged("apt downgrades it", RUNTIME, "install", "--allow-downgrades", older)

    def leave(self) -> None:
        """Purged: nothing is left"""
        done = self.apt("purge", "taktd-gpu")
        self.check("apt purges taktd-gpu", done.returncode == 0, done.stderr[-500:])
        link = self.box.run("test", "-L", f"{DROP_INS}/onnxruntime-gpu.conf").returncode
        self.check("the link that enabled it is gone", link == 1)
        for path in (LIBCUDA, "/usr/lib/python3/dist-packages/tensorrt"):
            self.box.run("rm", path)
        self.check("taktd serves", self.until(self.serving), self.box.journal("-n", "20"))
        self.box.run("rm", f"{DROP_INS}/simulated.conf")
        done = self.apt("purge", "taktd", "libtakt1", "libtakt-dev", "python3-taktd-client")
        self.check("apt purges the others", done.returncode == 0, done.stderr[-500:])
        ours = ("/usr/lib/taktd", "/usr/share/taktd", "/usr/share/doc/taktd", "/etc/taktd", "/etc/systemd/system/taktd")
        left = sorted(path for path in self.box.files() - self.before if path.startswith(ours))
        self.check("nothing is left", left == [], left[:20])


def next_version(package: Path, scratch: Path, name: str, old: str, new: str) -> Path:
    """The same package under a later version, with other code, and `new` in place of `old` in its control file."""
    scratch.mkdir()
    tree = scratch / "tree"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    control = tree / "DEBIAN" / "control"
    text = control.read_text()
    version = next(line.split()[1] for line in text.splitlines() if line.startswith("Version:"))
    text = text.replace(f"Version: {version}", f"Version: {version}+next{name}")
    control.write_text(text.replace(old, new) if old else text)
    program = tree / "usr/lib/taktd/vendor/taktd/daemon/executor.py"
    program.write_text(program.read_text() + "# a new version\n")
    newer = scratch / f"taktd_{version}+next{name}_amd64.deb"
    pack = ["dpkg-deb", "-Zzstd", "-z1", "--root-owner-group", "-b", tree, newer]
    subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
    return newer


def main() -> int:
    suite, folder, gpu_folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    only = set(sys.argv[4:])
    with Machine(f"gpu-{suite}", suite) as machine:
        life = GpuLife(machine, folder, gpu_folder)
        for step in (
            life.install, life.no_driver, life.driver, life.tensorrt, life.enable, life.disable, life.remove,
            life.upgrade, life.leave,
        ):  # fmt: skip
            if not only or step.__name__ in only | {"install"}:
                life.step(step)
    print(f"{life.passed} passed, {life.failed} failed")
    return 1 if life.failed else 0


if __name__ == "__main__":
    sys.exit(main())
