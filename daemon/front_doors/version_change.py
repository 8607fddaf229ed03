"""RepositoryModelLoad with a version: asked of the supervisor over control.sock, as taktctl does. Part of the gateway.

Only the supervisor changes what is served, with the loops admitted anew and the lanes handed over; here a gRPC client's
wish is turned into `model.activate`, and a no into a refusal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from taktd.daemon.control_client import AnswerNo, NobodyThere, ask
from taktd.ipc.inference import Outcome, Refusal

CHANGE_S_MAX: Final = 600.0  # engines are loaded, verified and measured before they serve


def activate(runtime: Path, model: str, version: int) -> None:
    """Returns when that version is served. Waits; raises Refusal, then what served before serves on."""
    environment = {"TAKTD_RUNTIME_DIR": str(runtime)}
    try:
        kept = ask("model.list", environment, name=model)["models"][0]
        _judge(model, version, kept["configured"], [entry["version"] for entry in kept["versions"]])
        ask("model.activate", environment, answer_s_max=CHANGE_S_MAX, name=model, version=version)
    except AnswerNo as no:
        raise Refusal(Outcome.FAILED, f"{no}: {no.hint}" if no.hint else str(no)) from None
    except NobodyThere as nobody:
        raise Refusal(Outcome.FAILED, f"model {model} can't be changed now: {nobody}") from None


def _judge(model: str, version: int, configured: object, versions: list[int]) -> None:
    if configured is None:
        text = (
            f"model {model} is a file and has no version {version}: write `path: FOLDER, version: latest` for it in "
            "the configuration"
        )
        raise Refusal(Outcome.UNKNOWN, text)
    if version not in versions:
        there_are = ", ".join(map(str, versions[-8:])) or "none"
        text = f"model {model} has no version {version}: there are {there_are}; add one with taktctl model add"
        raise Refusal(Outcome.UNKNOWN, text)
    if configured != "latest":
        text = (
            f"model {model} is pinned to version {configured} by the configuration: write `version: latest` there, or "
            "change the number and reload"
        )
        raise Refusal(Outcome.INVALID, text)
