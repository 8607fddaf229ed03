"""A version whose tensors are others than those of the version that is served: not while programs are attached to it.

A lane's layout never changes under a client, so such a change ends lanes: a control program would stand there with a
shape that it was not written for. Activating and rolling back refuse that, and say what differs and who is attached.
A reload may do it: it changes the contract by the file, and ends the lanes with the reason. The gateway is no obstacle:
it describes models anew to whoever asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taktd.daemon.doors.control_door import ControlError
from taktd.daemon.doors.lane_door import Connection
from taktd.daemon.models.commands import inspected_version
from taktd.daemon.models.store import version_of
from taktd.daemon.supervision.lanes import Lane, LaneState
from taktd.daemon.supervision.tensor_difference import as_a_change, tensor_difference

if TYPE_CHECKING:
    from taktd.daemon.supervisor import Supervisor

CLIENTS_NAMED_MAX: Final = 8


async def refuse_other_tensors(supervisor: Supervisor, name: str, version: int) -> None:
    """Raises ControlError where serving this version would end lanes of programs that are attached."""
    model = supervisor.configuration.models[name]
    attached = _attached(supervisor, name)
    known = [i[name] for d in supervisor.devices.values() if name in (i := d.inspections)]
    if not attached or not known:
        return
    _, new = await inspected_version(supervisor, model, version)
    if change := tensor_difference(known[0], new, as_a_change):
        clients = ", ".join(attached[:CLIENTS_NAMED_MAX])
        raise ControlError(
            f"{name}: version {version} has other tensors than version {version_of(model)}, and programs are attached: "
            f"{change}; attached: {clients}",
            f"stop those programs, then activate it; or write `version: {version}` for {name} in the configuration and "
            "reload, which ends their lanes",
        )


def _attached(supervisor: Supervisor, name: str) -> list[str]:
    gateway = supervisor.gateway.pid if supervisor.gateway is not None else None
    return [
        f"{lane.owner} on {lane.kind.name.lower()} {lane.name}"
        for device in supervisor.devices.values()
        for lane in device.lanes.lanes.values()
        if lane.model == name and lane.state is LaneState.ATTACHED and not _is(lane, gateway)
    ]


def _is(lane: Lane, pid: int | None) -> bool:
    return isinstance(lane.owner, Connection) and lane.owner.peer.pid == pid and pid is not None
