"""Where built engines (plans) are kept: ``DIGEST.plan`` and its manifest ``DIGEST.json`` in one folder.

The digest is an engine's identity: model, library, device and driver, precision (which is the model's own) and shapes.
A plan's bytes are no identity: two builds of one network differ. What is in the folder is believed only if owner,
permissions, checksum and manifest agree; anything else is reported with its reason and built anew.

Each file is made durable beside its place and renamed. A plan that takes the place of another one waits as
``DIGEST.plan.new`` until the manifest, which has its checksum, is there: so at every instant, whatever fails or is
killed, the folder holds the old pair or the new one.

Everything here is system calls from ``os``, one by one, so that a test can let each of them fail in turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["CachedPlan", "PlanCache", "PlanIdentity", "PlanRejected"]

FORMAT: Final = 1
PLAN_BYTES_MAX: Final = 16 << 30
MANIFEST_BYTES_MAX: Final = 1 << 20
WRITE_BYTES: Final = 1 << 24


class PlanRejected(Exception):
    """A plan in the cache that must not be used, and why. It is built anew."""


@dataclass(frozen=True, slots=True)
class PlanIdentity:
    """All that a plan depends on."""

    model_digest: str
    library: str  # "tensorrt 10.16.1.11"
    device: str  # the card's name; "any" for TensorRT-RTX, whose plans are finished on the card
    compute: tuple[int, int]
    driver: int
    shapes: dict[str, list[list[int]]]  # input → [least, optimal, most]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CachedPlan:
    plan: bytes
    manifest: dict[str, Any]


class PlanCache:
    """A folder of plans. Used by one build at a time per digest; readers need no lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self, identity: PlanIdentity) -> tuple[Path, Path]:
        digest = identity.digest
        return self.folder / f"{digest}.plan", self.folder / f"{digest}.json"

    def load(self, identity: PlanIdentity) -> CachedPlan | None:
        """None if there is no such plan. Raises ``PlanRejected`` if there is one that can't be trusted."""
        plan_path, manifest_path = self.paths(identity)
        waiting_path = _waiting(plan_path)  # without a manifest it is none yet
        if not manifest_path.exists() and not plan_path.exists():
            return None
        manifest = _manifest(_read(manifest_path, MANIFEST_BYTES_MAX))
        if manifest["identity"] != json.loads(json.dumps(asdict(identity))):
            raise PlanRejected(f"{manifest_path} describes another plan: {_difference(manifest['identity'], identity)}")
        try:
            return CachedPlan(_read_plan(plan_path, manifest["plan_sha256"]), manifest)
        except PlanRejected:
            if not waiting_path.exists():
                raise
        return CachedPlan(_read_plan(waiting_path, manifest["plan_sha256"]), manifest)

    def store(self, identity: PlanIdentity, plan: bytes, **facts: Any) -> CachedPlan:
        """``facts``: what else is known of it (golden result, measured cost, build time). Raises ``OSError``: then what
        was there before is found, or, where only the last steps have failed, the new plan."""
        plan_path, manifest_path = self.paths(identity)
        manifest = {
            "format": FORMAT,
            "identity": json.loads(json.dumps(asdict(identity))),
            "plan_sha256": hashlib.sha256(plan).hexdigest(),
            "plan_bytes": len(plan),
            **facts,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting_path = _waiting(plan_path)
        try:
            _write(waiting_path, plan)
            _write(manifest_path, json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n")
        except BaseException:
            if not _describes(manifest_path, manifest["plan_sha256"]):
                _unlink(waiting_path)  # its room may be what is missing
            raise
        os.replace(waiting_path, plan_path)
        _sync_folder(self.folder)
        return CachedPlan(plan, manifest)

    def annotate(self, identity: PlanIdentity, **facts: Any) -> None:
        """Adds facts to the manifest of a plan that is there. Raises ``PlanRejected``, ``OSError``."""
        _, manifest_path = self.paths(identity)
        manifest = _manifest(_read(manifest_path, MANIFEST_BYTES_MAX))
        _write(manifest_path, json.dumps({**manifest, **facts}, indent=1, sort_keys=True).encode() + b"\n")

    def remove(self, identity: PlanIdentity) -> None:
        plan_path, manifest_path = self.paths(identity)
        for path in (manifest_path, plan_path, _waiting(plan_path)):
            path.unlink(missing_ok=True)


def _waiting(plan_path: Path) -> Path:
    return plan_path.with_name(f"{plan_path.name}.new")


def _read_plan(path: Path, sha256: str) -> bytes:
    plan = _read(path, PLAN_BYTES_MAX)
    if hashlib.sha256(plan).hexdigest() != sha256:
        raise PlanRejected(f"{path} is damaged: {len(plan)} bytes that don't match its checksum")
    return plan


def _describes(manifest_path: Path, sha256: str) -> bool:
    """Whether the manifest that is there belongs to this plan; True where that can't be known."""
    try:
        return bool(_manifest(_read(manifest_path, MANIFEST_BYTES_MAX))["plan_sha256"] == sha256)
    except PlanRejected:
        return manifest_path.exists()


def _unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # the next one that is stored takes its place


def _read(path: Path, most: int) -> bytes:
    """The file's bytes, if nobody but us (or root) could have written them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PlanRejected(f"{path} can't be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PlanRejected(f"{path} is no regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise PlanRejected(f"{path} belongs to user {status.st_uid}, allowed are root and {os.geteuid()}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PlanRejected(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o})")
        if status.st_size > most:
            raise PlanRejected(f"{path} has {status.st_size} bytes, allowed {most}")
        return file.read()


def _manifest(text: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise PlanRejected(f"a manifest is no JSON: {error}") from error
    wanted = {"format": int, "identity": dict, "plan_sha256": str}
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(k), t) for k, t in wanted.items()):
        raise PlanRejected("a manifest lacks what every manifest has")
    if manifest["format"] != FORMAT:
        raise PlanRejected(f"a manifest has format {manifest['format']}, this is {FORMAT}")
    return manifest


def _difference(found: dict[str, Any], identity: PlanIdentity) -> str:
    ours = json.loads(json.dumps(asdict(identity)))
    return ", ".join(f"{k} {found.get(k)!r} instead of {v!r}" for k, v in ours.items() if found.get(k) != v)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view[:WRITE_BYTES]) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
