"""The declaration of a GPU: which card a device of `driver: cuda` is, and how engines are built for it.

Used by configuration.py. Whether the card is there is found out by its executor at each start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from taktd.daemon.config.values import Duration, Section, Size, distinct, refuse
from taktd.daemon.config.yamltree import ConfigError, Tree, shown

__all__ = ["Gpu", "GpuSetting", "gpu_errors"]

FORM = "a UUID as `nvidia-smi -L` prints it, a PCI address such as 0000:01:00.0, or an index"


def _plugin(value: str) -> str:
    if not value.startswith("/"):
        raise refuse("is not an absolute path", "the whole path of a shared library with TensorRT plugins")
    return value


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
    plugins: Annotated[
        tuple[Annotated[str, Field(max_length=4096), AfterValidator(_plugin)], ...], AfterValidator(distinct)
    ] = Field(default=(), description="Shared libraries with TensorRT plugins, by absolute path. No others are loaded.")
    build_limit_ns: Duration = Field(
        default=600_000_000_000, alias="build_limit", description="An engine that is not built by then is given up."
    )


def _gpu(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        return {"device": value}
    if value is None or isinstance(value, (dict, Gpu)):
        return value
    raise refuse("is not understood", FORM)


GpuSetting = Annotated[Gpu | None, BeforeValidator(_gpu)]


def gpu_errors(tree: Tree, devices: dict[str, Any]) -> Iterable[ConfigError]:
    """Two devices that say they are the same GPU. That a UUID and an index are one card is not seen here."""
    owners: dict[str, str] = {}
    for name, item in devices.items():
        gpu = item.get("gpu") if isinstance(item, dict) else None
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
