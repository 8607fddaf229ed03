"""Which configuration a taktd begins with: what its file says; where that is refused, what executors still serve.

A supervisor that dies is started again by systemd. If somebody has broken the file meanwhile, ending by that would end
the loops too, with their grace. So a refusal counts only where nobody is left: else the executors are taken over, serve
on by the configuration that they were started for, and taktd says so until the file is repaired and reloaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from taktd.daemon import runtime_folder
from taktd.daemon.config.configuration import Configuration, ConfigurationRefused, load
from taktd.daemon.doors.peers import own_uid
from taktd.daemon.handover import predecessor
from taktd.daemon.models.store import StoreError, resolved


@dataclass(frozen=True)
class Beginning:
    """refused: what is wrong with the file, "" if nothing is; then configuration is the one that executors of a taktd
    before this one serve, None where there are none."""

    configuration: Configuration | None
    refused: str = ""


def begin_with(file: Path, environment: Mapping[str, str]) -> Beginning:
    """Reads the file, and what a predecessor wrote down if that is refused."""
    try:
        return Beginning(resolved(load(file)))
    except ConfigurationRefused as error:
        refused = f"the configuration is refused:\n{error}"
    except StoreError as error:
        refused = f"{error}\n  to do: {error.hint}" if error.hint else str(error)
    return Beginning(_served(environment), refused)


def _served(environment: Mapping[str, str]) -> Configuration | None:
    """By what executors of a taktd before this one serve. Only a look: whoever goes on with it locks the folder."""
    try:
        before = predecessor.read(runtime_folder.runtime_folder(environment, own_uid()))
    except (OSError, runtime_folder.FolderRefused):
        return None
    if before is None:
        return None
    for executor in before.alive:
        os.close(executor.pidfd)
    return before.configuration if before.alive else None
