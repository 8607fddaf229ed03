"""What can go wrong with a model or an engine, told to the person who has to act."""

from __future__ import annotations

from typing import TypedDict

__all__ = ["EngineFailure", "ModelRefused", "Refusal"]


class Refusal(TypedDict):
    """A refusal as it travels from the process that looked at the model to the person who configured it."""

    what: str
    found: str
    allowed: str
    hint: str


class ModelRefused(Exception):
    """The model can't be served: what is wrong, what was found, what is allowed, what to do."""

    def __init__(self, what: str, *, found: str, allowed: str, hint: str) -> None:
        super().__init__(f"{what}: found {found}; allowed: {allowed}. {hint}")
        self.refusal: Refusal = {"what": what, "found": found, "allowed": allowed, "hint": hint}


class EngineFailure(Exception):
    """A run of an engine ended without a result."""
