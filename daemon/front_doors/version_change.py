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
OUTCOMES: Final = {"unknown": Outcome.UNKNOWN, "pinned": Outcome.INVALID}  # by the kind of a no; else FAILED


def activate(runtime: Path, model: str, version: int) -> None:
    """Returns when that version is served. Waits; raises Refusal, then what served before serves on."""
    environment = {"TAKTD_RUNTIME_DIR": str(runtime)}
    try:
        ask("model.activate", environment, answer_s_max=CHANGE_S_MAX, name=model, version=version)
    except AnswerNo as no:
        raise Refusal(OUTCOMES.get(no.kind, Outcome.FAILED), f"{no}: {no.hint}" if no.hint else str(no)) from None
    except NobodyThere as nobody:
        raise Refusal(Outcome.FAILED, f"model {model} can't be changed now: {nobody}") from None
