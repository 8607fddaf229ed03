"""libtakt as C and C++ programs get it: built, installed, found by pkg-config, compiled against, run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ipc" / "core"
STRICT = ["-Wall", "-Wextra", "-Werror"]

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "c++", "make", "pkg-config"))), reason="needs cc, c++, make and pkg-config"
)


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=170, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DESTDIR with libtakt in /opt/takt."""
    folder = tmp_path_factory.mktemp("libtakt")
    run(
        "make", "-s", "-C", CORE, "install", f"BUILD={folder}/build", f"DESTDIR={folder}/root", "PREFIX=/opt/takt",
        "LIBDIR=/opt/takt/lib64",
    )  # fmt: skip
    return folder / "root"


@pytest.fixture(scope="module")
def flags(installed: Path) -> list[str]:
    environment = {
        "PKG_CONFIG_PATH": f"{installed}/opt/takt/lib64/pkgconfig",
        "PKG_CONFIG_SYSROOT_DIR": str(installed),
    }
    return run("pkg-config", "--cflags", "--libs", "takt", **environment).split()


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    path = f"{tmp_path}/lanes.sock"
    daemon = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/fakes/echo_daemon.py"), "--socket", path, "--until-eof"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert daemon.stdin
    assert daemon.stdout
    assert daemon.stdout.readline() == b"ready\n"
    yield path
    daemon.stdin.close()
    assert daemon.wait(10) == 0
    daemon.stdout.close()


def test_the_library_has_its_soname_and_exports_the_public_names_only(installed: Path) -> None:
    library = installed / "opt/takt/lib64/libtakt.so.1"
    assert "soname: [libtakt.so.1]" in run("readelf", "-d", library)
    exported = re.findall(r" [TDBR] (\w+)@@TAKT_1", run("nm", "-D", "--defined-only", library))
    assert exported == re.findall(r"^\s+(takt_\w+);", (CORE / "takt.map").read_text(), re.MULTILINE)
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library))
    assert set(needed) <= {"libc.so.6", "libpthread.so.0"}


def test_installing_leaves_headers_static_library_and_pkg_config(installed: Path) -> None:
    prefix = installed / "opt/takt"
    names = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    assert names == {
        "include/takt.h", "include/takt.hpp", "lib64/libtakt.a", "lib64/libtakt.so", "lib64/libtakt.so.1",
        "lib64/libtakt.so.0.1.0", "lib64/pkgconfig/takt.pc",
    }  # fmt: skip
    assert "prefix=/opt/takt\n" in (prefix / "lib64/pkgconfig/takt.pc").read_text()


def test_the_headers_are_clean_in_c99_and_cpp17() -> None:
    run("make", "-s", "-C", CORE, "headers")


def test_the_c_example_runs_against_a_daemon(installed: Path, flags: list[str], echo: str, tmp_path: Path) -> None:
    run("cc", *STRICT, ROOT / "examples/c/loop.c", *flags, "-o", tmp_path / "loop")
    environment = {"LD_LIBRARY_PATH": f"{installed}/opt/takt/lib64", "TAKTD_SOCKET": echo}
    printed = run(tmp_path / "loop", "echo", "0.3", **environment)
    cycles = int(re.findall(r"cycles (\d+)", printed)[0])
    assert 0 < cycles <= 301
    assert "without answer 0" in printed


def test_the_c_example_explains_what_is_wrong(installed: Path, flags: list[str], echo: str, tmp_path: Path) -> None:
    run("cc", *STRICT, ROOT / "examples/c/loop.c", *flags, "-o", tmp_path / "loop")
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{installed}/opt/takt/lib64", "TAKTD_SOCKET": echo}
    done = subprocess.run([tmp_path / "loop", "walk"], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert 'no loop or model "walk"' in done.stderr
    environment["TAKTD_SOCKET"] = f"{tmp_path}/absent"
    done = subprocess.run([tmp_path / "loop", "walk"], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert f"{tmp_path}/absent" in done.stderr
    assert "is taktd running?" in done.stderr


CPP = """
#include <takt.hpp>
#include <cstdio>
int main()
{
    takt::Node node;
    takt::Lane lane = node.attach("echo", takt::Wait::block);
    takt::Lane moved = std::move(lane);
    for (int i = 0; i < 10; i++) {
        auto x = moved.input<float>("x");
        for (float &value : x)
            value = static_cast<float>(i);
        takt_reply reply = moved.infer(0, std::chrono::seconds(5));
        if (reply.status != TAKT_OK || moved.output<float>("y")[3] != static_cast<float>(i))
            return 1;
    }
    try {
        moved.input<std::int64_t>("x");
        return 2;
    } catch (const takt::Error &error) {
        std::puts(error.what());
    }
    try {
        node.attach("walk");
        return 3;
    } catch (const takt::Error &error) {
        std::puts(error.what());
        return error.code() == 2 ? 0 : 4;
    }
}
"""


def test_the_cpp_header_works(installed: Path, flags: list[str], echo: str, tmp_path: Path) -> None:
    (tmp_path / "program.cpp").write_text(CPP)
    run("c++", "-std=c++17", *STRICT, "-pedantic", tmp_path / "program.cpp", *flags, "-o", tmp_path / "program")
    printed = run(tmp_path / "program", LD_LIBRARY_PATH=f"{installed}/opt/takt/lib64", TAKTD_SOCKET=echo)
    assert "tensor x holds FP32, asked for INT64" in printed
    assert 'no loop or model "walk"' in printed


def test_the_python_example_runs_against_a_daemon(echo: str) -> None:
    printed = run(sys.executable, ROOT / "examples/python/loop.py", "echo", "0.3", TAKTD_SOCKET=echo)
    assert "without answer 0" in printed


def test_the_c_tests_pass(tmp_path: Path) -> None:
    run("make", "-s", "-C", CORE, "check", f"BUILD={tmp_path}/build", TMPDIR=str(tmp_path))
