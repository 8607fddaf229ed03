"""The declaration of a GPU: which card a device of `driver: cuda` is, and how engines are built for it.

Used by configuration.py. Whether the card is there is found out by its executor at each start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from taktd.daemon.config.values import Duration, Name, Problem, Section, Size, distinct, refuse, refuse_all
from taktd.daemon.config.yamltree import ConfigError, Tree, shown

__all__ = ["Gpu", "GpuSetting", "gpu_errors"]

FORM = "a UUID as `nvidia-smi -L` prints it, a PCI address such as 0000:01:00.0, or an index"


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise refuse("is not an absolute path", "the whole path, beginning with /")
    return value


Whole = Annotated[str, Field(max_length=4096), AfterValidator(_absolute)]


class Gpu(Section):
    """One GPU. Just a UUID is enough: `gpu: GPU-…`."""

    device: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="The card: its UUID (`nvidia-smi -L`), PCI address or index. An index can change at a reboot."
    )
    runtime: Literal["tensorrt", "onnxruntime"] = Field(
        default="tensorrt", description="What runs the models: TensorRT, or ONNX Runtime's CUDA provider."
    )
    workspace_bytes: Size = Field(
        default=1 << 30, alias="workspace", description="Device memory that building an engine may try out."
    )
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = Field(
        default=None, description="How long TensorRT searches, 0 to 5. Default: the library's own."
    )
    plugins: Annotated[tuple[Whole, ...], AfterValidator(distinct)] = Field(
        default=(), description="Shared libraries with TensorRT plugins, by absolute path. No others are loaded."
    )
    plans: dict[Name, Whole] = Field(
        default_factory=dict,
        description="Per model: a TensorRT plan built elsewhere, by absolute path, instead of a build from its ONNX"
        " file (which it is still checked and compared with).",
    )
    timing_cache: Whole | None = Field(
        default=None, description="File where builds keep what TensorRT measured, so that the next one is quicker."
    )
    pin_tactics: bool = Field(
        default=False,
        description="Build only with the kernels that timing_cache holds, and fail where one is missing (TensorRT 10.13"
        " or newer): two builds then choose alike.",
    )
    build_limit_ns: Duration = Field(
        default=600_000_000_000, alias="build_limit", description="An engine that is not built by then is given up."
    )
    run_limit_ns: Duration | None = Field(
        default=None,
        alias="run_limit",
        description="A run that takes longer hangs, and its process is given up. Default: ten times the shortest budget"
        " or deadline of the model's loops, from 50ms to 2s; without a loop, and for batches, 2s.",
    )

    @model_validator(mode="after")
    def _pinned(self) -> Gpu:
        if self.pin_tactics and self.timing_cache is None:
            raise refuse("has nothing to pin", "with timing_cache", "add `timing_cache`", key="pin_tactics")
        if self.runtime != "tensorrt":
            problems = [
                Problem(key, "has no meaning here", "", "only with runtime: tensorrt", "remove it")
                for key in ("optimization_level", "plugins", "plans", "timing_cache", "pin_tactics")
                if key in self.model_fields_set
            ]
            if problems:
                raise refuse_all(problems)
        return self


def _gpu(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        return {"device": value}
    if value is None or isinstance(value, (dict, Gpu)):
        return value
    raise refuse("is not understood", FORM)


GpuSetting = Annotated[Gpu | None, BeforeValidator(_gpu)]


def gpu_errors(tree: Tree, devices: dict[str, Any], models: Iterable[str]) -> Iterable[ConfigError]:
    """Two devices that say they are the same GPU; plans of models that there are none.

    That a UUID and an index are one card is not seen here (daemon/supervision/gpu_twins.py).
    """
    owners: dict[str, str] = {}
    known = list(models)
    for name, item in devices.items():
        gpu = item.get("gpu") if isinstance(item, dict) else None
        plans = gpu.get("plans") if isinstance(gpu, dict) else None
        for model in plans if isinstance(plans, dict) else ():
            if model not in known:
                allowed = ", ".join(known[:8]) or "nothing: there are no models"
                yield tree.error(("devices", name, "gpu", "plans", model), "is no model", allowed=allowed)
        wanted = gpu.get("device") if isinstance(gpu, dict) else gpu
        if wanted is None:
            continue
        key = str(wanted).lower()
        if key in owners:
            place = ("devices", name, "gpu")
            what = f"is the same GPU as that of {owners[key]}"
            allowed = "one device for one GPU"
            yield tree.error(place, what, found=shown(wanted), allowed=allowed, hint="remove one of them")
        owners.setdefault(key, name)
