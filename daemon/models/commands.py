"""`model.add`, `list`, `activate`, `rollback`, `remove` of control.sock: versions of the configured models.

Only models that the configuration keeps as versions (`version: latest`) are changed; one that is pinned to a number, or
is a plain file, is changed in the configuration. What is added is inspected twice, in a process that may die of it: at
its source, to learn which files belong to it, and as the copy that would be served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from taktd.daemon.config.configuration import Configuration, Model
from taktd.daemon.doors.control_door import ControlError, Operation
from taktd.daemon.logbook import log
from taktd.daemon.models.inspection import ModelRefused
from taktd.daemon.models.store import ModelStore, StoreError, version_of

__all__ = ["Host", "ModelCommands", "inspected_version", "kept_model", "store_of", "version_number"]

T = TypeVar("T")


class Host(Protocol):
    """What the commands need of the supervisor."""

    @property
    def configuration(self) -> Configuration:
        """The one that applies now, resolved: a model's path is the file that is served."""

    async def inspect_model(self, model: Model) -> dict[str, Any]:
        """Raises inspection.ModelRefused."""

    async def change_model(self, name: str, version: int) -> str:
        """Serve this version instead; a sentence on what was done. Raises ControlError: then the old one is served."""


def store_of(model: Model) -> ModelStore:
    """The store of a resolved model that is kept as versions."""
    return ModelStore(Path(model.path).parent.parent, model.name)


def kept_model(configuration: Configuration, name: object) -> Model:
    """The model of that name, which is kept as versions. Raises ControlError."""
    model = _model(configuration, name)
    if model.version is None:
        raise ControlError(
            f"model {model.name} is the file {model.path}, and has no versions",
            "write `path: FOLDER, version: latest` for it in the configuration",
            "unknown",
        )
    return model


def version_number(value: object) -> int:
    """What a request calls a version. Raises ControlError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ControlError(f"{str(value)[:40]!r} is no version", "give its number: taktctl model list")
    return value


async def inspected_version(host: Host, model: Model, number: int) -> tuple[Model, dict[str, Any]]:
    """The model as that version of it, and its inspection. Raises ControlError."""
    version = await _answered(asyncio.to_thread(store_of(model).resolve, number))
    return await _inspected(host, model, str(version.path))


class ModelCommands:
    """shadow_of: what a version that ran beside a model has shown, None where there was none (shadow/commands.py)."""

    def __init__(self, host: Host, shadow_of: Callable[[str], dict[str, Any] | None] = lambda name: None) -> None:
        self._host, self._shadow_of = host, shadow_of
        self._changing = asyncio.Lock()

    @property
    def asking(self) -> dict[str, Operation]:
        return {"model.list": self.list}

    @property
    def changing(self) -> dict[str, Operation]:
        return {
            "model.add": self.add, "model.activate": self.activate, "model.rollback": self.rollback,
            "model.remove": self.remove,
        }  # fmt: skip

    # ---- operations ----

    async def list(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"name"?}"""
        names = [request["name"]] if "name" in request else list(self._host.configuration.models)
        result = []
        for name in names:
            model = _model(self._host.configuration, name)
            entry: dict[str, Any] = {
                "name": model.name, "path": model.path, "configured": model.version, "serving": version_of(model),
                "versions": [], "shadow": self._shadow_of(model.name),
            }  # fmt: skip
            if model.version is not None:
                entry["versions"] = await _answered(asyncio.to_thread(store_of(model).listing))
            result.append(entry)
        return {"models": result}

    async def add(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"name", "file": absolute path}: imports it. What is served does not change."""
        model = kept_model(self._host.configuration, request.get("name"))
        file = request.get("file")
        if not isinstance(file, str) or not file.startswith("/") or "\0" in file:
            raise ControlError(f"{str(file)[:80]!r} is no path", "give the model's file by its absolute path")
        store = store_of(model)
        _, found = await _inspected(self._host, model, file)
        staged = await _answered(asyncio.to_thread(store.stage, Path(file), found.get("external", [])))
        try:
            await _inspected(self._host, model, str(staged.model))
        except BaseException:
            store.abort(staged)
            raise
        number, new = await _answered(asyncio.to_thread(store.commit, staged))
        if new:
            log("notice", f"model {model.name}: version {number} was added", event="model-added", model=model.name)
        told = f"added as version {number}" if new else f"is there already, as version {number}"
        return {
            "name": model.name, "version": number, "new": new,
            "message": f"{model.name}: {told}; serve it with taktctl model activate {model.name} {number}",
        }  # fmt: skip

    async def activate(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"name", "version"}: serves it, and remembers that."""
        model = self._changeable(request)
        number = version_number(request.get("version"))
        async with self._alone(model):
            store = store_of(model)
            await _answered(asyncio.to_thread(store.resolve, number))
            return await self._switch(model, number, lambda: store.activate(number))

    async def rollback(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"name"}: serves the version that was active before."""
        model = self._changeable(request)
        async with self._alone(model):
            store = store_of(model)
            number = await _answered(asyncio.to_thread(store.rolled_back))
            await _answered(asyncio.to_thread(store.resolve, number))
            return await self._switch(model, number, lambda: store.rollback())

    async def remove(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"name", "version"}"""
        model = kept_model(self._host.configuration, request.get("name"))
        number = version_number(request.get("version"))
        async with self._alone(model):
            store = store_of(model)
            used = [v for m in self._host.configuration.models.values() if m.version is not None
                    and store_of(m).folder == store.folder and (v := version_of(m)) is not None]  # fmt: skip
            await _answered(asyncio.to_thread(store.remove, number, used))
        log("notice", f"model {model.name}: version {number} was removed", event="model-removed", model=model.name)
        return {"name": model.name, "version": number, "message": f"{model.name}: version {number} is removed"}

    # ---- inside ----

    async def _switch(self, model: Model, number: int, remember: Callable[[], object]) -> dict[str, Any]:
        """Serve it first, then remember it: a version that can't serve must not be what the next start begins with."""
        store, before = store_of(model), version_of(model)
        await _answered(asyncio.to_thread(store.rehearse))  # a disk that is full now is no reason to switch twice
        told = f"{model.name}: version {number} is served already"
        if before != number:
            told = await self._host.change_model(model.name, number)
        try:
            await asyncio.to_thread(remember)
        except StoreError as error:
            told = await self._unremembered(store, number, before, told, error)
        log("notice", f"model {model.name}: version {number} is active", event="model-activated", model=model.name)
        return {"name": model.name, "version": number, "message": told}

    async def _unremembered(
        self, store: ModelStore, number: int, before: int | None, told: str, error: StoreError
    ) -> str:
        """What to tell where it was written and is not durable. Else it goes back, and raises ControlError."""
        try:
            written = await asyncio.to_thread(store.active) == number
        except StoreError:
            written = False
        if written:
            log("warning", f"{error}: version {number} is active, and may not be after a power cut", model=store.name)
            return f"{told}; it may not be remembered after a power cut: {error}"
        if before is None or before == number:
            raise ControlError(str(error), error.hint, error.kind)
        why = f"{error}; version {number} was served meanwhile"
        try:
            await self._host.change_model(store.name, before)
        except ControlError as stays:
            now = f"and can't be exchanged for version {before} again ({stays}): until the next start it stays"
            raise ControlError(f"{why}, {now}", error.hint or stays.hint) from None
        raise ControlError(f"{why}, version {before} is served again", error.hint, error.kind)

    def _changeable(self, request: dict[str, Any]) -> Model:
        model = kept_model(self._host.configuration, request.get("name"))
        if model.version != "latest":
            raise ControlError(
                f"model {model.name} is pinned to version {model.version} by the configuration",
                "write `version: latest` there, or change the number and reload",
                "pinned",
            )
        return model

    def _alone(self, model: Model) -> asyncio.Lock:
        if self._changing.locked():
            raise ControlError(f"model {model.name}: another change of a model is under way", "wait until it is done")
        return self._changing


def _model(configuration: Configuration, name: object) -> Model:
    models = configuration.models
    if not isinstance(name, str) or name not in models:
        known = ", ".join(list(models)[:8])
        raise ControlError(f"there is no model {str(name)[:64]!r}", f"there are {known}" if known else "", "unknown")
    return models[name]


async def _inspected(host: Host, model: Model, path: str) -> tuple[Model, dict[str, Any]]:
    model = model.model_copy(update={"path": path})
    try:
        return model, await host.inspect_model(model)
    except ModelRefused as refused:
        raise ControlError(refused.finding, refused.hint) from None


async def _answered(work: Awaitable[T]) -> T:
    try:
        return await work
    except StoreError as error:
        raise ControlError(str(error), error.hint, error.kind) from None
