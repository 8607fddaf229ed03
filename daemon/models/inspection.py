"""What a model is, asked from a process that may die of the answer, and remembered by the model's content.

Runs `python -m taktd.engines.inspect`; the result is cached in the state folder. Called by the supervisor at start and
at reload.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from taktd.daemon.child_process import child_environment, python_command
from taktd.daemon.config.configuration import Model
from taktd.daemon.durable_file import SealBroken, read_sealed, write_sealed
from taktd.daemon.logbook import log
from taktd.engines.onnx_version import onnxruntime_build

INSPECTION_S_MAX: Final = 120
CACHE_VERSION: Final = 2
ANSWER_BYTES_MAX: Final = 1 << 20
# Tensors in other files are named under this key; a digest of the .onnx file alone does not cover them.
_EXTERNAL_DATA_KEY: Final = b"location"


class ModelRefused(Exception):
    """A model that can't be served: which, and what was found, allowed and to be done."""

    def __init__(self, model: Model, refusal: Mapping[str, str]) -> None:
        self.model, self.refusal = model, dict(refusal)
        super().__init__(refusal["what"])

    @property
    def hint(self) -> str:
        """What to do; "" where nobody knows."""
        return self.refusal.get("hint", "")

    @property
    def finding(self) -> str:
        """All but what to do, for answers that have a place of their own for that."""
        lines = [f"model {self.model.name} ({self.model.path}): {self.refusal['what']}"]
        lines += [f"  {key}: {self.refusal[key]}" for key in ("found", "allowed") if self.refusal.get(key)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.finding}\n  to do: {self.hint}" if self.hint else self.finding


@dataclass(frozen=True)
class Inspector:
    """Inspects models; cache_folder may be unusable, then every start inspects anew."""

    cache_folder: Path

    async def inspect(self, model: Model) -> dict[str, Any]:
        """The inspection of a model; raises ModelRefused."""
        key = await asyncio.to_thread(_cache_key, model)
        if key is not None:
            known = _read_cache(self.cache_folder / f"{key}.json", key)
            if known is not None:
                return known
        found = await self._ask(model)
        if key is not None:
            _write_cache(self.cache_folder / f"{key}.json", key, found)
        return found

    async def _ask(self, model: Model) -> dict[str, Any]:
        shapes = json.dumps({name: list(dims) for name, dims in model.shapes.items()})
        process = await asyncio.create_subprocess_exec(
            *python_command("taktd.engines.inspect"), model.path, "--shapes", shapes,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=child_environment(os.environ), cwd="/", start_new_session=True, limit=ANSWER_BYTES_MAX,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), INSPECTION_S_MAX)
        except asyncio.TimeoutError:
            raise ModelRefused(model, _too_slow()) from None
        finally:
            # Also on cancellation, when the daemon is told to stop while it looks at a model.
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            answer = json.loads(out)
        except ValueError:
            raise ModelRefused(model, _died(process.returncode, err)) from None
        if "error" in answer:
            raise ModelRefused(model, answer["error"])
        result: dict[str, Any] = answer
        return result


def _too_slow() -> dict[str, str]:
    return {
        "what": "the model could not be inspected in time",
        "found": f"no answer after {INSPECTION_S_MAX} s",
        "allowed": f"at most {INSPECTION_S_MAX} s",
        "hint": "is the file readable and the machine not overloaded?",
    }


def _died(code: int | None, err: bytes) -> dict[str, str]:
    last = err.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return {
        "what": "the process that looked at the model died",
        "found": f"{how}: {last[0]}" if last[0] else how,
        "allowed": "a model that ONNX Runtime can load",
        "hint": "export the model again; a file that kills the parser is broken or hostile",
    }


def _cache_key(model: Model) -> str | None:
    """A digest over everything the inspection depends on; None where it can't be known from the file alone."""
    digest = hashlib.sha256()
    tail = b""
    try:
        with open(model.path, "rb") as file:
            while block := file.read(1 << 20):
                if _EXTERNAL_DATA_KEY in tail + block:
                    return None
                tail = block[-len(_EXTERNAL_DATA_KEY) :]
                digest.update(block)
    except OSError:
        return None
    runtime = onnxruntime_build()
    shapes = sorted((name, list(dims)) for name, dims in model.shapes.items())
    # The name goes into the model's own digest, so it belongs to the key.
    about = {"cache": CACHE_VERSION, "file": Path(model.path).name, "shapes": shapes, "onnxruntime": runtime}
    digest.update(json.dumps(about, sort_keys=True).encode())
    return digest.hexdigest()


def _read_cache(path: Path, key: str) -> dict[str, Any] | None:
    """What an earlier start found, None when there is nothing; what is not believed is announced."""
    try:
        found: dict[str, Any] | None = read_sealed(path, key)
    except SealBroken as broken:
        log("warning", f"a stored inspection is not used, the model is looked at again: {broken}",
            event="cache-rejected")  # fmt: skip
        return None
    return found


def _write_cache(path: Path, key: str, found: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        write_sealed(path, key, found)
    except OSError:
        pass  # a cache that can't be written costs the next start half a second, nothing else
