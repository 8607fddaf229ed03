"""Models as versions: ``FOLDER/<N>/model.onnx`` with its external data, and which of them is active.

A version is imported beside its place, hashed, made durable, and renamed: it is there whole or not at all, and it never
changes, nor is its number used again. ``manifest.json`` in it has the hash of every file; a version that was put there
by hand has none and is taken as it is. ``active.json`` says what was activated, the last one being the active version.
A folder without it has its highest version active, and importing another one first writes down what is active, so that
an import alone never changes what is served.

One at a time may change a folder: it is locked (flock) meanwhile, and what a change that was cut off has left behind is
cleared away by the next one. Called by the supervisor, outside its event loop: everything here may wait for a disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from taktd.daemon.config.configuration import Configuration, Model
from taktd.daemon.durable_file import SealBroken, read_sealed, sync_folder, write_all, write_sealed

__all__ = ["ModelStore", "Staged", "StoreError", "Version", "resolved", "version_of"]

MODEL_FILE: Final = "model.onnx"
MANIFEST: Final = "manifest.json"
ACTIVE: Final = "active.json"
MANIFEST_KEY: Final = "taktd model version 1"
ACTIVE_KEY: Final = "taktd active version 1"
VERSIONS_MAX: Final = 1000
FILES_MAX: Final = 256  # of one version
IMPORT_BYTES_MAX: Final = 16 << 30
HISTORY_MAX: Final = 64
BLOCK_BYTES: Final = 1 << 20

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_UNWRITTEN = re.compile(r"\.active\.json\.[0-9]+\.tmp")
_UNFINISHED = re.compile(r"\.(import|remove)-[0-9]+-[0-9a-f]+")


class StoreError(Exception):
    """A store says no: what, and what to do. kind: "unknown" where it has no such version (control_door.py)."""

    def __init__(self, what: str, hint: str = "", kind: str = "") -> None:
        super().__init__(what)
        self.hint, self.kind = hint, kind


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    path: Path  # of its model.onnx


@dataclass(slots=True)
class Staged:
    """An import on its way: everything is copied, nothing is visible yet. End it by ``commit`` or ``abort``."""

    folder: Path
    files: dict[str, str]  # name → SHA-256
    source: str
    lock: int

    @property
    def model(self) -> Path:
        return self.folder / MODEL_FILE


def version_of(model: Model) -> int | None:
    """The version that a resolved model runs; None for a model that is a plain file."""
    return None if model.version is None else int(Path(model.path).parent.name)


def resolved(configuration: Configuration, chosen: Mapping[str, int] | None = None) -> Configuration:
    """The same, each model's path being its file. ``chosen``: versions for the active ones. Raises StoreError."""
    models = {}
    for name, model in configuration.models.items():
        if model.version is None and Path(model.path).is_dir():
            raise StoreError(
                f"model {name}: {model.path} is a folder, and no version is named",
                "write `version: latest` or a number beside the path",
            )
        if model.version is not None and Path(model.path).is_file():
            raise StoreError(
                f"model {name}: {model.path} is a file, and a version is named",
                "remove `version`, or name the folder that holds the versions",
            )
        if model.version is not None:
            store = ModelStore(Path(model.path), name)
            wanted = (chosen or {}).get(name, model.version)
            model = model.model_copy(update={"path": str(store.resolve(wanted).path)})
        models[name] = model
    return configuration.model_copy(update={"models": models})


class ModelStore:
    """The versions of one model. Every method raises ``StoreError``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name

    # ---- looking ----

    def versions(self) -> list[Version]:
        """All of them, in order of their numbers."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._no(f"{self.folder} can't be read: {_reason(error)}") from None
        numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
        found = [Version(number, self.folder / str(number) / MODEL_FILE) for number in numbers]
        try:
            return [v for v in found if v.path.is_file() and not v.path.parent.is_symlink()]
        except OSError as error:
            raise self._no(f"a version in {self.folder} can't be read: {_reason(error)}", _hint(error)) from None

    def _state(self) -> dict[str, Any]:
        """{"history": what was activated, the last one last; "highest": a number given away already}."""
        try:
            body = read_sealed(self.folder / ACTIVE, ACTIVE_KEY)
        except SealBroken as broken:
            raise self._no(
                f"which version is active is not known: {broken}",
                f"name a number in the configuration, or remove {self.folder / ACTIVE}: then the highest is active",
            ) from None
        return dict(body) if body else {"history": [], "highest": 0}

    def _history(self) -> list[int]:
        return list(self._state()["history"])

    def active(self) -> int | None:
        """The version that ``latest`` means, None in an empty store."""
        if history := self._history():
            return history[-1]
        versions = self.versions()
        return versions[-1].number if versions else None

    def find(self, number: int) -> Version:
        versions = self.versions()
        for version in versions:
            if version.number == number:
                return version
        known = ", ".join(str(v.number) for v in versions[-8:])
        hint = f"there are {known}" if known else self._empty_hint()
        raise self._no(f"there is no version {number}", hint, "unknown")

    def resolve(self, wanted: str | int) -> Version:
        """``latest`` or a number, checked against its manifest."""
        if wanted == "latest":
            active = self.active()
            if active is None:
                raise self._no(f"{self.folder} holds no version", self._empty_hint())
            wanted = active
        version = self.find(int(wanted))
        self.check(version)
        return version

    def check(self, version: Version) -> None:
        """Every file is what was imported."""
        manifest = self.manifest(version)
        for name, expected in (manifest["files"] if manifest else {}).items():
            try:
                found = _hash_file(version.path.parent / name)
            except OSError as error:
                raise self._no(f"{name} of version {version.number} can't be read: {_reason(error)}",
                               "activate another version, remove this one, add it again") from None  # fmt: skip
            if found != expected:
                raise self._no(
                    f"{name} of version {version.number} is not what was imported: its hash is {found[:12]}…, "
                    f"{expected[:12]}… is expected",
                    "activate another version, remove this one, add it again",
                )

    def manifest(self, version: Version) -> dict[str, Any] | None:
        """{"files", "source"}, None for a version put there by hand."""
        try:
            body: dict[str, Any] | None = read_sealed(version.path.parent / MANIFEST, MANIFEST_KEY)
        except SealBroken as broken:
            raise self._no(
                f"version {version.number} can't be trusted: {broken}", "remove it and add it again"
            ) from None
        return body

    def listing(self) -> list[dict[str, Any]]:
        """For a person or a program: every version, which is active, and what is wrong with it, if anything."""
        active = self.active()
        result = []
        for version in self.versions():
            problem, manifest = "", None
            try:
                manifest = self.manifest(version)
            except StoreError as error:
                problem = str(error)
            result.append({
                "version": version.number, "active": version.number == active, "path": str(version.path),
                "source": manifest["source"] if manifest else "", "bytes": _bytes_of(version.path.parent),
                "sha256": manifest["files"][MODEL_FILE] if manifest else "", "problem": problem,
            })  # fmt: skip
        return result

    # ---- changing ----

    def stage(self, source: Path, external: Sequence[str]) -> Staged:
        """Copies a model and its external data (paths relative to it) beside the versions."""
        if len(external) + 1 > FILES_MAX or MODEL_FILE in external or MANIFEST in external:
            raise self._no(f"{source} has data in files that can't be imported",
                           f"at most {FILES_MAX} files, none called {MODEL_FILE} or {MANIFEST}")  # fmt: skip
        self._make_folder()
        lock = self._lock()
        staging = self.folder / f".import-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._clear_unfinished()
            os.mkdir(staging, 0o750)
            room = IMPORT_BYTES_MAX
            files = {}
            for name, path in [(MODEL_FILE, source), *((name, source.parent / name) for name in external)]:
                files[name], size = _copy(path, staging / name, room)
                room -= size
            for folder, _, _ in os.walk(staging, topdown=False):
                sync_folder(Path(folder))
        except BaseException as error:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(lock)
            if isinstance(error, OSError):
                raise self._no(f"{source} can't be imported: {_reason(error)}", _hint(error)) from None
            raise
        return Staged(staging, files, source.name, lock)

    def commit(self, staged: Staged) -> tuple[int, bool]:
        """Makes it visible: (its number, True), or (the number of a version with the same content, False)."""
        try:
            versions = self.versions()
            for version in versions:
                if self._files(version) == staged.files:
                    return version.number, False
            if len(versions) >= VERSIONS_MAX:
                raise self._no(f"there are {len(versions)} versions already, at most {VERSIONS_MAX}", "remove old ones")
            history = self._history()
            if versions and not history:
                self._remember([versions[-1].number])
            number = max([self._state()["highest"], *history, *(v.number for v in versions)]) + 1
            write_sealed(staged.folder / MANIFEST, MANIFEST_KEY, {"files": staged.files, "source": staged.source})
            os.rename(staged.folder, self.folder / str(number))
            sync_folder(self.folder)
            return number, True
        except OSError as error:
            raise self._no(f"the version can't be written: {_reason(error)}", _hint(error)) from None
        finally:
            self.abort(staged)

    def abort(self, staged: Staged) -> None:
        """Leaves nothing of it. Also after ``commit``: then there is nothing left to do."""
        if staged.lock >= 0:
            shutil.rmtree(staged.folder, ignore_errors=True)
            os.close(staged.lock)
            staged.lock = -1

    def rehearse(self) -> None:
        """Writes anew what is active, as it is: whoever is about to switch learns whether that can be remembered."""
        with self._locked():
            self._remember(self._history())

    def activate(self, number: int) -> None:
        """From now on ``latest`` means this one."""
        with self._locked():
            self.find(number)
            history = [*self._history(), number]
            if not history[:-1]:  # what was active without being chosen can be gone back to
                history = [v.number for v in self.versions()[-1:] if v.number != number] + history
            self._remember(history)

    def rolled_back(self) -> int:
        """The version that a rollback would make active."""
        history, there = self._history(), {v.number for v in self.versions()}
        for number in reversed(history[:-1]):
            if number in there and number != history[-1]:
                return number
        raise self._no("there is no version to go back to", "activate one by its number")

    def rollback(self) -> int:
        """The version before the active one becomes active again; its number."""
        with self._locked():
            number = self.rolled_back()
            history = self._history()
            last = max(place for place, value in enumerate(history[:-1]) if value == number)
            self._remember(history[: last + 1])
            return number

    def remove(self, number: int, used: Sequence[int] = ()) -> None:
        """Not the active one, nor one that is ``used``."""
        with self._locked():
            version = self.find(number)
            if number == self.active() or number in used:
                raise self._no(f"version {number} is in use", "activate another one first")
            self._remember(self._history(), number)
            doomed = self.folder / f".remove-{os.getpid()}-{secrets.token_hex(8)}"
            try:
                os.rename(version.path.parent, doomed)
                sync_folder(self.folder)
            except OSError as error:
                raise self._no(f"version {number} can't be removed: {_reason(error)}", _hint(error)) from None
            shutil.rmtree(doomed, ignore_errors=True)

    # ---- inside ----

    def _no(self, what: str, hint: str = "", kind: str = "") -> StoreError:
        return StoreError(f"model {self.name}: {what}", hint, kind)

    def _empty_hint(self) -> str:
        # Not `taktctl model add`: it asks a taktd that runs, and none starts without a version.
        return f"put the first one at {self.folder}/1/{MODEL_FILE}; later ones: taktctl model add {self.name} FILE"

    def _files(self, version: Version) -> dict[str, str]:
        try:
            manifest = self.manifest(version)
        except StoreError:
            return {}  # nobody knows what it is; it is not the same
        return dict(manifest["files"]) if manifest else _hashes(version.path.parent)

    def _remember(self, history: list[int], given_away: int = 0) -> None:
        body = {"history": history[-HISTORY_MAX:], "highest": max(self._state()["highest"], given_away)}
        try:
            write_sealed(self.folder / ACTIVE, ACTIVE_KEY, body)
        except OSError as error:
            raise self._no(f"which version is active can't be written: {_reason(error)}", _hint(error)) from None

    def _make_folder(self) -> None:
        try:
            if self.folder.is_dir():
                return
            self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            sync_folder(self.folder.parent)
        except OSError as error:
            raise self._no(f"{self.folder} can't be made: {_reason(error)}", _hint(error)) from None

    def _lock(self) -> int:
        try:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._no(f"{self.folder} can't be read: {_reason(error)}", self._empty_hint()) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise self._no("another change of it is under way", "wait until it is done") from None
        except OSError as error:
            os.close(descriptor)
            raise self._no(f"{self.folder} can't be locked: {_reason(error)}", _hint(error)) from None
        return descriptor

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._lock()
        try:
            self._clear_unfinished()
            yield
        finally:
            os.close(lock)

    def _clear_unfinished(self) -> None:
        """What a change that was cut off has left; nobody else can be at it while we have the lock."""
        try:
            for name in os.listdir(self.folder):
                if _UNFINISHED.fullmatch(name):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                elif _UNWRITTEN.fullmatch(name):
                    (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            what = f"what an earlier change left in {self.folder} can't be cleared away: {_reason(error)}"
            raise self._no(what, _hint(error)) from None


def _copy(source: Path, target: Path, room: int) -> tuple[str, int]:
    """Hash and size of what was copied and made durable."""
    digest, size = hashlib.sha256(), 0
    target.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            while block := os.read(reading, BLOCK_BYTES):
                size += len(block)
                if size > room:
                    raise OSError(errno.EFBIG, f"more than {IMPORT_BYTES_MAX} bytes")
                digest.update(block)
                write_all(writing, block)
            os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return digest.hexdigest(), size


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _regular_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def _hashes(folder: Path) -> dict[str, str]:
    try:
        return {str(p.relative_to(folder)): _hash_file(p) for p in _regular_files(folder)}
    except OSError:
        return {}


def _bytes_of(folder: Path) -> int:
    try:
        return sum(p.stat().st_size for p in _regular_files(folder))
    except OSError:
        return 0


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room on that disk: remove old versions with taktctl model remove"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"taktd runs as uid {os.geteuid()}: it must be able to read the file and to write the store's folder"
    if error.errno == errno.EROFS:
        return "the store lies on a file system that can't be written: move it, or mount it for writing"
    if error.errno == errno.ENOENT:
        return "is the path complete, and on the machine that taktd runs on?"
    return ""
