"""What everybody agreed on, held by a test: linters, layering, links, forbidden constructs, living documents.

`make lint` runs this file alone. No test here starts a daemon.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ipc", "drivers", "engines", "daemon")
MAY_IMPORT = {
    "ipc": set(),
    "drivers": set(),
    "engines": {"drivers"},
    "daemon": {"ipc", "drivers", "engines"},
}
# Inside daemon/: what these lean on, besides the small modules in SHARED. The rest is one process and knows itself.
SHARED = {"child_process", "durable_file", "journal", "logbook", "own_process", "runtime_folder"}
DAEMON_MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "schedule": set(),
    "scheduler": {"schedule"},
    "admission": {"config", "schedule"},
    "doctor": set(),
    "certification": {"admission", "config", "doctor", "schedule"},
    "recording": {"config", "schedule", "scheduler"},
    "simulation": {"admission", "certification", "config", "schedule", "scheduler"},
    "execution": {"recording", "schedule", "scheduler"},
    "executor": {"execution", "recording", "schedule", "scheduler"},
    "limits": {"config"},
    "front_doors": {"config", "limits", "control_client"},
}
PURE = ("schedule", "scheduler", "admission")  # no clock, no process, no memory: nothing of these may come in
IMPURE_MODULES = {"asyncio", "mmap", "os", "pathlib", "random", "socket", "subprocess", "threading", "time"}
LINES_MAX = 600

FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_YAML = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}


def ours(*folders: str) -> list[Path]:
    """Python files under the folders; byte code, build leavings and what a compiler wrote aside."""
    found = (p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return sorted(p for p in found if "build" not in p.parts and "_pb2" not in p.name)


SOURCES = ours(*PACKAGES)
EVERYTHING = [*SOURCES, *ours("bench", "examples", "packaging")]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted module) of each import in a file of ours; relative ones are made absolute."""
    package = ["taktd", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_ruff_is_content() -> None:
    done = run(sys.executable, "-m", "ruff", "check", "--output-format", "concise", ".")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_mypy_strict_is_content() -> None:
    done = run(sys.executable, "-m", "mypy")
    assert done.returncode == 0, done.stdout + done.stderr


def test_source_folder_holds_four_relative_links_and_nothing_else() -> None:
    folder = ROOT / "src" / "taktd"
    assert sorted(p.name for p in folder.iterdir()) == sorted(PACKAGES)
    for package in PACKAGES:
        assert os.readlink(folder / package) == f"../../{package}"
        assert (ROOT / package / "py.typed").is_file()
    assert [p.name for p in (ROOT / "src").iterdir() if not p.name.endswith(".egg-info")] == ["taktd"]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_only_point_downward(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[package] | {package}
    wrong = [
        f"{name(path)}:{line}: {package} imports {module}"
        for line, module in imports(path)
        if module.startswith("taktd.") and module.split(".")[1] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def daemon_part(path: Path) -> str:
    """The folder of daemon/ that a file is in, or the module that it is."""
    parts = path.relative_to(ROOT / "daemon").parts
    return parts[0].removesuffix(".py")


DAEMON_PARTS = [path for path in ours("daemon") if daemon_part(path) in DAEMON_MAY_IMPORT]


@pytest.mark.parametrize("path", DAEMON_PARTS, ids=name)
def test_the_daemons_parts_lean_on_nothing_but_what_is_below_them(path: Path) -> None:
    part = daemon_part(path)
    allowed = DAEMON_MAY_IMPORT[part] | SHARED | {part}
    wrong = [
        f"{name(path)}:{line}: {part} imports {module}"
        for line, module in imports(path)
        if module.startswith("taktd.daemon.") and module.split(".")[2] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in DAEMON_PARTS if daemon_part(p) in PURE], ids=name)
def test_what_decides_about_time_sees_no_clock_no_process_and_no_chance(path: Path) -> None:
    wrong = [f"{name(path)}:{line}: {module}" for line, module in imports(path)
             if module.split(".")[0] in IMPURE_MODULES or module.startswith("taktd.ipc")]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_the_client_package_needs_numpy_only() -> None:
    """`import taktd.ipc` must work on a robot that has numpy and nothing else of ours."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import numpy\n"
        "import taktd.ipc\n"
        "heavy = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(*sorted(heavy - {'numpy', 'taktd'}))\n"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    found = [m for m in done.stdout.split() if not m.startswith(("_", "mkl"))]
    assert found == [], f"import taktd.ipc also imports {found}"


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_no_language_native_serialisation_and_nothing_evaluated(path: Path) -> None:
    wrong = [
        f"line {line}: imports {module}" for line, module in imports(path) if module.split(".")[0] in FORBIDDEN_MODULES
    ]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in FORBIDDEN_CALLS:
            wrong.append(f"line {node.lineno}: calls {called.id}()")
        if isinstance(called, ast.Attribute) and called.attr in FORBIDDEN_YAML and ast.unparse(called.value) == "yaml":
            wrong.append(f"line {node.lineno}: calls yaml.{called.attr}()")
        if any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords):
            wrong.append(f"line {node.lineno}: allow_pickle")
    assert not wrong, "\n".join([name(path), *wrong])


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_telemetry_is_off_before_onnxruntime_is_imported(path: Path) -> None:
    """ONNX Runtime reads ORT_DISABLE_TELEMETRY at import; a module that imports it sets it above."""
    lines = [line for line, module in imports(path) if module.split(".")[0] == "onnxruntime"]
    if not lines:
        return
    above = path.read_text(encoding="utf-8").splitlines()[: min(lines) - 1]
    assert any("ORT_DISABLE_TELEMETRY" in line and "environ" in line for line in above), (
        f"{name(path)}:{min(lines)} imports onnxruntime without os.environ['ORT_DISABLE_TELEMETRY'] = '1' above it"
    )


def test_telemetry_is_off_in_the_tests_and_units() -> None:
    assert os.environ.get("ORT_DISABLE_TELEMETRY") == "1"
    for unit in sorted((ROOT / "systemd").rglob("*.service")):
        text = unit.read_text(encoding="utf-8")
        if "ExecStart=" in text:
            assert "ORT_DISABLE_TELEMETRY=1" in text, f"{name(unit)} does not set ORT_DISABLE_TELEMETRY=1"


def test_shared_memory_has_no_names() -> None:
    c_sources = [p for p in (ROOT / "ipc").rglob("*") if p.suffix in {".c", ".h", ".hpp"}]
    pattern = re.compile(r"shm_open|/dev/shm|multiprocessing.*shared_memory|SharedMemory\(|posix_ipc|shmget")
    wrong = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in [*SOURCES, *c_sources]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := pattern.search(line)) and found.group() not in line.partition("#")[2]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_stay_short() -> None:
    paths = [*EVERYTHING, *ours("tests"), *(p for p in (ROOT / "ipc").rglob("*") if p.suffix in {".c", ".h", ".hpp"})]
    lengths = {name(p): p.read_text(encoding="utf-8").count("\n") for p in paths if "build" not in p.parts}
    long = {path: lines for path, lines in lengths.items() if lines > LINES_MAX}
    assert not long, f"more than {LINES_MAX} lines: {long}"


def test_module_names_are_nouns_of_the_field() -> None:
    vague = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
    assert not [name(p) for p in EVERYTHING if p.stem in vague]


def test_every_module_says_what_it_is() -> None:
    silent = [
        name(p)
        for p in EVERYTHING
        if p.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not silent, f"no docstring at the top: {silent}"


def test_public_names_of_the_client_are_a_list_that_holds() -> None:
    """`taktd.ipc.__all__` is the one list, and each entry has its own documentation."""
    import taktd.ipc as ipc

    listed = list(ipc.__all__)
    assert len(listed) == len(set(listed))
    for expected in ("connect", "Lane", "Node", "Reply", "TaktError"):
        assert expected in listed, f"taktd.ipc.__all__ lacks {expected}"
    for public in listed:
        found = getattr(ipc, public)
        if callable(found):
            assert found.__doc__, f"taktd.ipc.{public} has no docstring"


# Documents ---------------------------------------------------------------------------------------------------------

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(p for folder in ("docs", "examples", "bench", "packaging") for p in (ROOT / folder).rglob("*.md")),
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def anchors(document: Path) -> set[str]:
    """The ids that a renderer gives to the headings of a document."""
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", document.read_text(encoding="utf-8"), re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_in_documents_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        to = (document.parent / path).resolve() if path else document
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            broken.append(target)
    assert not broken, f"{name(document)}: {broken}"


def test_a_forbidden_import_would_be_found(tmp_path: Path) -> None:
    """The canary: the layering check sees absolute, relative and deferred imports."""
    sample = ROOT / "engines" / "sample.py"  # never written; only its place matters
    source = "from ..daemon import scheduler\ndef f():\n    import taktd.ipc\nfrom taktd import drivers\n"
    written = tmp_path / "sample.py"
    written.write_text(source, encoding="utf-8")

    class Placed(type(sample)):  # type: ignore[misc]
        def read_text(self, *args: object, **kwargs: object) -> str:
            return written.read_text(encoding="utf-8")

    found = {module for _, module in imports(Placed(sample))}
    assert found == {"taktd.daemon.scheduler", "taktd.ipc", "taktd.drivers"}


def test_every_target_that_make_help_names_is_there_down_to_what_it_calls() -> None:
    told = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^make ([a-z-]+)", told, re.MULTILINE)
    assert {"demo", "test", "fuzz"} <= set(targets)
    for target in targets:
        dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0, f"make {target}: {dry.stderr}"
