"""What RepositoryModelLoad and RepositoryModelUnload ask for, in the words of Triton's clients. See docs/grpc.md.

tritonclient has no argument for a version: it sends `config`, a model configuration in JSON, whose `version_policy` may
name one. A plain parameter `version` says the same. The rest of such a configuration is taktd's own configuration's
business, where the loops are admitted together with it, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from taktd.ipc.inference import Outcome, Refusal

CONFIG_BYTES_MAX: Final = 64 << 10
VERSION_MAX: Final = 999_999_999


def version_asked(model: str, parameters: Mapping[str, Any]) -> int | None:
    """The version that a load names; None for the one that is active. Raises Refusal."""
    version: int | None = None
    for name, parameter in parameters.items():
        value = getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)
        if name == "version":
            version = _number(value)
        elif name == "config":
            version = _from_config(model, value)
        elif name.startswith("file:"):
            text = "model files are not taken over gRPC: copy the file to this machine and run taktctl model add"
            raise Refusal(Outcome.UNSUPPORTED, text)
        else:
            text = f'parameter "{name[:64]}" does not exist; there are version and config'
            raise Refusal(Outcome.INVALID, text)
    return version


def _from_config(model: str, value: object) -> int | None:
    if not isinstance(value, str) or len(value) > CONFIG_BYTES_MAX:
        raise Refusal(Outcome.INVALID, f'"config" is no JSON text of at most {CONFIG_BYTES_MAX} bytes')
    try:
        config = json.loads(value)
    except (ValueError, RecursionError):
        raise Refusal(Outcome.INVALID, '"config" is not JSON') from None
    if not isinstance(config, dict):
        raise Refusal(Outcome.INVALID, f'"config" is a {type(config).__name__}; an object is expected')
    if config.get("name", model) != model:
        raise Refusal(Outcome.INVALID, f'"config" is of model {str(config["name"])[:64]!r}; {model} is to be loaded')
    others = sorted(set(config) - {"name", "version_policy"})
    if others:
        text = (
            f'"config" has {", ".join(others)[:96]}: only version_policy can be given here, the rest is in taktd.yaml'
        )
        raise Refusal(Outcome.UNSUPPORTED, text)
    if "version_policy" not in config:
        return None
    policy = config["version_policy"]
    specific = policy.get("specific") if isinstance(policy, dict) and len(policy) == 1 else None
    versions = specific.get("versions") if isinstance(specific, dict) else None
    if not isinstance(versions, list) or len(versions) != 1:
        text = 'one version of a model is served: {"version_policy": {"specific": {"versions": [N]}}} is expected'
        raise Refusal(Outcome.UNSUPPORTED, text)
    return _number(versions[0])


def _number(value: object) -> int:
    """64-bit numbers are text in protobuf's JSON."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(VERSION_MAX)):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= VERSION_MAX:
        raise Refusal(Outcome.INVALID, f"version {str(value)[:32]!r}; a number from 1 to {VERSION_MAX} is expected")
    return value
