"""YAML files as a plain tree in which every key still knows its file and line.

The file is composed to nodes and never constructed by PyYAML: no tag makes an object, a key that is there twice is
refused instead of overwritten, a number is kept exactly (int or Decimal). Called by configuration.py only; it knows
nothing of what the keys mean.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import yaml

FILE_BYTES_MAX: Final = 1 << 20
# Aliases let a small file unfold into a huge tree; this bounds the tree, not the text.
NODES_MAX: Final = 50_000
DEPTH_MAX: Final = 32
FOUND_CHARACTERS_MAX: Final = 80
NOT_TEXT_HINT: Final = "is this the right file? a configuration is text"

KeyPath = tuple[str | int, ...]
Mark = tuple[str, int]  # file, line counted from 1

_DECIMAL_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_DECIMAL_FRACTION = re.compile(r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]{1,2})?|[-+]?\.[0-9_]+")
_TRUE: Final = frozenset({"yes", "true", "on"})
_TAG: Final = "tag:yaml.org,2002:"
# The C parser is the same grammar, 20 times as fast; both bound or survive deep nesting.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigError(Exception):
    """One thing wrong in a configuration: where, what was found, what is allowed, what to do.

    line is counted from 1, 0 where there is none; key is the dotted path ("loops.walk.period"), "" for the whole file.
    """

    def __init__(
        self, file: str, line: int, key: str, what: str, *, found: str = "", allowed: str = "", hint: str = ""
    ) -> None:
        super().__init__(what)
        self.file, self.line, self.key, self.what = file, line, key, what
        self.found, self.allowed, self.hint = found, allowed, hint

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        parts = [f"{place}: {self.key}: {self.what}" if self.key else f"{place}: {self.what}"]
        parts += [f"  {label}: {text}" for label, text in self._details() if text]
        return "\n".join(parts)

    def _details(self) -> tuple[tuple[str, str], ...]:
        return (("found", self.found), ("allowed", self.allowed), ("to do", self.hint))

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "file": self.file, "line": self.line, "key": self.key, "what": self.what,
            "found": self.found, "allowed": self.allowed, "hint": self.hint,
        }  # fmt: skip


def dotted(path: KeyPath) -> str:
    """("loops", "walk", "mk", 0) as "loops.walk.mk[0]"."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def shown(value: Any) -> str:
    """A value as a person wrote it, cut to a length that fits a message."""
    if isinstance(value, dict):
        return f"a mapping with {len(value)} keys"
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{printable(value)}"' if isinstance(value, str) else str(value)
    return text if len(text) <= FOUND_CHARACTERS_MAX else text[: FOUND_CHARACTERS_MAX - 1] + "…"


def printable(text: str) -> str:
    """Nothing in a file writes to a terminal but what can be read: a NUL is shown as \\x00."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass
class Tree:
    """root: mappings as dict, lists as tuple, scalars as str, int, Decimal, bool, None. marks: place of every path."""

    root: dict[str, Any] = field(default_factory=dict)
    marks: dict[KeyPath, Mark] = field(default_factory=dict)

    def mark(self, path: KeyPath) -> Mark:
        """The place of a path, or of the nearest one above it that is in a file."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.marks:
                return self.marks[path[:length]]
        return ("", 0)

    def error(self, path: KeyPath, what: str, *, found: str = "", allowed: str = "", hint: str = "") -> ConfigError:
        """A ConfigError placed at a path."""
        file, line = self.mark(path)
        return ConfigError(file, line, dotted(path), what, found=found, allowed=allowed, hint=hint)

    def merge(self, other: Tree, depth: int) -> list[ConfigError]:
        """Take over another file's keys. Mappings unite down to `depth` levels; a key that both have is an error."""
        return self._merge_mapping(self.root, other.root, other, (), depth)

    def _merge_mapping(
        self, mine: dict[str, Any], theirs: dict[str, Any], other: Tree, path: KeyPath, depth: int
    ) -> list[ConfigError]:
        errors: list[ConfigError] = []
        for key, value in theirs.items():
            here = (*path, key)
            if key not in mine:
                mine[key] = value
                self.marks.update({p: m for p, m in other.marks.items() if p[: len(here)] == here})
            elif depth > 1 and isinstance(mine[key], dict) and isinstance(value, dict):
                errors += self._merge_mapping(mine[key], value, other, here, depth - 1)
            else:
                file, line = self.mark(here)
                errors.append(
                    other.error(
                        here,
                        "is set twice",
                        found=f"{shown(value)} here, {shown(mine[key])} at {file}:{line}",
                        allowed="each key once, over the main file and conf.d together",
                        hint="remove one of the two",
                    )
                )
        return errors


def read_tree(file: Path, *, may_be_empty: bool = False) -> tuple[Tree, list[ConfigError]]:
    """Read one file. What is wrong comes back as a list; the tree then holds what could be understood."""
    try:
        text = _read_text(file)
    except ConfigError as error:
        return Tree(), [error]
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        return Tree(), [_syntax_error(str(file), text, error)]
    except RecursionError:
        what = f"is nested more deeply than {DEPTH_MAX} levels"
        return Tree(), [ConfigError(str(file), 0, "", what, allowed=f"at most {DEPTH_MAX} levels")]
    finally:
        if loader is not None:
            loader.dispose()
    if node is None and may_be_empty:
        return Tree(), []
    if node is None:
        hint = "`taktd` without arguments prints a first one"
        return Tree(), [ConfigError(str(file), 0, "", "is empty", allowed="a configuration", hint=hint)]
    reader = _NodeReader(str(file))
    value = reader.value(node, ())
    if not isinstance(value, dict):
        reader.refuse(node, (), "is not a mapping", found=shown(value), allowed="key: value pairs at the top level")
        value = {}
    return Tree(value, reader.marks), reader.errors


def _read_text(file: Path) -> str:
    """The file's text; ConfigError when it can't be read, is too large, or is no text."""
    name = str(file)
    try:
        # stat before open: opening a FIFO under this name would hang the start.
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(name, 0, "", "is not a regular file", allowed="a YAML file")
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else "check the file's owner and mode"
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(name, 0, "", f"can't be read: {reason}", hint=hint) from None
    if len(data) > FILE_BYTES_MAX:
        found, allowed = f"{max(status.st_size, len(data))} bytes", f"at most {FILE_BYTES_MAX} bytes"
        raise ConfigError(name, 0, "", "is too large for a configuration", found=found, allowed=allowed)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        hint = "is this the right file? a configuration is text"
        raise ConfigError(name, line, "", "is not text", found=found, allowed="YAML in UTF-8", hint=hint) from None
    return text


def _syntax_error(file: str, text: str, error: yaml.YAMLError) -> ConfigError:
    if isinstance(error, yaml.reader.ReaderError):
        position = error.position
        found = f"character U+{error.character:04X} at offset {position}" if isinstance(error.character, int) else ""
        line = text.count("\n", 0, position) + 1
        return ConfigError(file, line, "", "is not text", found=found, allowed="YAML in UTF-8", hint=NOT_TEXT_HINT)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    lines = text.splitlines() or [""]
    # A parser that wants more stands behind the last line; a person looks at the last one there is.
    line = min(mark.line + 1, len(lines)) if mark is not None else 0
    at_end = mark is not None and mark.line + 1 >= len(lines)
    problem = getattr(error, "problem", None) or str(error).split("\n")[0]
    found = shown(lines[line - 1].strip()) if line else "the file as a whole"
    if line and "\t" in lines[line - 1]:
        what = "has a tab where YAML allows spaces only"
        return ConfigError(file, line, "", what, found=found, allowed="spaces", hint="indent with spaces")
    hint = "is the file cut off?" if at_end else "check indentation, colons and brackets near this line"
    return ConfigError(file, line, "", f"is not valid YAML: {problem}", found=found, allowed="YAML", hint=hint)


class _NodeReader:
    """Nodes to plain values, noting the place of every path and refusing what has no place in a configuration."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.marks: dict[KeyPath, Mark] = {}
        self.errors: list[ConfigError] = []
        self.nodes = 0

    def refuse(
        self, node: yaml.Node, path: KeyPath, what: str, found: str = "", allowed: str = "", hint: str = ""
    ) -> None:
        line = node.start_mark.line + 1
        error = ConfigError(self.file, line, dotted(path), what, found=found, allowed=allowed, hint=hint)
        self.errors.append(error)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes += 1
        if path not in self.marks:
            self.marks[path] = (self.file, node.start_mark.line + 1)
        if self.nodes > NODES_MAX or len(path) > DEPTH_MAX:
            if self.nodes <= NODES_MAX + 1:
                self.nodes = NODES_MAX + 1  # one message is enough
                allowed = f"at most {NODES_MAX} values, {DEPTH_MAX} levels"
                self.refuse(node, path, "unfolds into too large a tree", allowed=allowed, hint="avoid nested aliases")
                self.nodes += 1
            return None
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return tuple(self.value(item, (*path, index)) for index, item in enumerate(node.value))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self.refuse(node, path, "has a tag", found=shown(node.tag), allowed="plain YAML without tags")
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.refuse(key_node, path, "has a key that is no plain text", allowed="a name as key")
                continue
            if not key_node.value.isprintable():  # no file reaches the keys that begin with a NUL (engines.py)
                self.refuse(key_node, path, "has a key that is no plain text", shown(key_node.value), "a name as key")
                continue
            # Whatever YAML takes a bare key for (`on`, `7`), here it is the text that was written.
            key = key_node.value
            here = (*path, key)
            if key in result:
                found = f"a second {shown(key)}; the first is on line {lines[key]}"
                self.refuse(key_node, here, "is set twice", found, "each key once", "remove one of the two")
                continue
            lines[key] = line
            self.marks[here] = (self.file, line)
            result[key] = self.value(value_node, here)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> str | int | Decimal | bool | None:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        if tag in ("str", "timestamp", "value"):
            return str(text)
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() in _TRUE
        if tag == "int" and len(text) <= FOUND_CHARACTERS_MAX and _DECIMAL_INTEGER.fullmatch(text):
            return int(text.replace("_", ""))
        if tag == "float" and len(text) <= FOUND_CHARACTERS_MAX and _DECIMAL_FRACTION.fullmatch(text):
            return Decimal(text.replace("_", ""))
        if tag in ("int", "float"):
            hint = "put it in quotes if it is a name"
            self.refuse(
                node, path, "is not a plain number", shown(text), "a finite decimal number such as 5 or 0.1", hint
            )
        else:
            self.refuse(node, path, "has a tag", found=shown(node.tag), allowed="plain YAML without tags")
        return None
