"""docs/wire.md says what the C compiler made of the structs, and what Python believes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from taktd.ipc import _core
from taktd.ipc.client import _NUMPY

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
SIZES = {"u16": 2, "u32": 4, "u64": 8, "i32": 4, "i64": 8, "char": 1}


def section(heading: str) -> str:
    """The text between a heading and the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}.*?\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"docs/wire.md has no section {heading!r}"
    return found.group(1)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0].isdigit()]


STRUCTS = {
    name: (int(size), rows(body))
    for name, size, body in re.findall(
        r"^### [^\n]*?`(takt_\w+)`, (\d+) bytes\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL
    )
}


def test_every_struct_of_the_wire_is_documented() -> None:
    assert set(STRUCTS) == {name for name in _core.WIRE if "." not in name}


@pytest.mark.parametrize("struct", STRUCTS)
def test_offsets_and_sizes_are_those_of_the_compiler(struct: str) -> None:
    size, fields = STRUCTS[struct]
    assert size == _core.WIRE[struct]
    documented = {f"{struct}.{row[2]}": int(row[0]) for row in fields if row[2] in _fields(struct)}
    assert documented == {key: value for key, value in _core.WIRE.items() if key.startswith(f"{struct}.")}


def _fields(struct: str) -> set[str]:
    return {key.split(".")[1] for key in _core.WIRE if key.startswith(f"{struct}.")}


@pytest.mark.parametrize("struct", STRUCTS)
def test_fields_do_not_overlap_and_end_inside(struct: str) -> None:
    size, fields = STRUCTS[struct]
    end = 0
    for offset, kind, name, *_ in (row for row in fields if row[1].split("[")[0] in SIZES):
        base, _, count = kind.partition("[")
        assert int(offset) >= end, f"{struct}.{name} overlaps the field before it"
        assert int(offset) % SIZES[base] == 0, f"{struct}.{name} is not aligned"
        end = int(offset) + SIZES[base] * int(count.rstrip("]") or 1)
    assert end <= size


@pytest.mark.parametrize(
    ("heading", "table"),
    [("Statuses", _core.STATUSES), ("Paths", _core.PATHS), ("Causes", _core.CAUSES), ("Element types", _core.DTYPES)],
)
def test_numbers_and_names_are_the_same_everywhere(heading: str, table: dict[str, int]) -> None:
    assert {row[1]: int(row[0]) for row in rows(section(heading))} == table


def test_element_types_have_the_documented_size_and_a_numpy_type() -> None:
    bits = {int(row[0]): int(row[2]) for row in rows(section("Element types"))}
    assert bits == _core.DTYPE_BITS
    assert set(_NUMPY) == set(_core.DTYPES)


def test_message_types_are_those_of_the_header() -> None:
    source = (ROOT / "ipc" / "core" / "message.h").read_text(encoding="utf-8")
    in_c = {name: int(number) for name, number in re.findall(r"TAKT_MSG_(\w+) = (\d+)", source)}
    documented = {row[1]: int(row[0]) for row in STRUCTS["takt_message"][1] if row[1].isupper()}
    assert documented == in_c


def test_numbers_of_the_c_header_are_those_of_the_tables() -> None:
    source = (ROOT / "ipc" / "core" / "takt.h").read_text(encoding="utf-8")
    constants = {name: int(value) for name, value in re.findall(r"TAKT_(\w+) = (\d+)", source)}
    for name, number in _core.STATUSES.items():
        assert constants[name.upper()] == number
    for name, number in _core.DTYPES.items():
        assert constants[name] == number
    for prefix, table in (("PATH", _core.PATHS), ("CAUSE", _core.CAUSES)):
        for name, number in table.items():
            assert constants[f"{prefix}_{(name or 'none').upper().replace('-', '_')}"] == number


def test_the_public_c_api_is_one_list() -> None:
    """takt.map exports exactly what takt.h declares."""
    header = (ROOT / "ipc" / "core" / "takt.h").read_text(encoding="utf-8")
    exported = (ROOT / "ipc" / "core" / "takt.map").read_text(encoding="utf-8")
    declared = re.findall(r"^TAKT_API [^(;]*?\**(takt_\w+)\(", header, re.MULTILINE)
    assert len(declared) > 30
    assert sorted(declared) == re.findall(r"^\s+(takt_\w+);", exported, re.MULTILINE)


def test_the_stub_of_the_module_is_true() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "taktd.ipc._core", "--mypy-config-file", "pyproject.toml"]
    environment = {**os.environ, "MYPYPATH": "src"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout
