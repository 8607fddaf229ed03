"""model.* and fault.* of control.sock: what they do, and every way to ask for what can't be done."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from taktd.daemon.config.configuration import Configuration, Model, load
from taktd.daemon.doors.control_door import ControlError
from taktd.daemon.models.commands import ModelCommands, store_of
from taktd.daemon.models.inspection import Inspector
from taktd.daemon.models.store import StoreError, resolved, version_of
from taktd.daemon.supervision.fault_commands import FaultCommands, fault_file, forget_faults, parse_fault
from taktd.drivers.sim import UNTIL_CLEARED, FaultFile, SimFault, SimFaultKind
from tests import models
from tests.fakes.failing_calls import failing, fails

YAML = """\
devices: {{cpu0: {{driver: cpu}}, sim0: {{driver: sim}}}}
models:
  go1: {{path: store/go1, version: {version}}}
  plain: {{path: plain.onnx}}
{more}
"""


class Supervisor:
    """Changes a model at once, or fails to."""

    def __init__(self, folder: Path, version: str = "latest", more: str = "allow_faults: true") -> None:
        self.folder = folder
        (folder / "taktd.yaml").write_text(YAML.format(version=version, more=more))
        models.identity(folder / "plain.onnx")
        models.identity(folder / "store/go1/1/model.onnx", (1,))
        self.configuration: Configuration = resolved(load(folder / "taktd.yaml"))
        self.commands = ModelCommands(self)
        self.inspector = Inspector(folder / "inspections")
        self.changing: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.changes: list[tuple[str, int]] = []

    async def inspect_model(self, model: Model) -> dict[str, Any]:
        return await self.inspector.inspect(model)

    async def change_model(self, name: str, version: int) -> str:
        if self.changing is not None:
            await self.changing()
        try:
            self.configuration = resolved(load(self.folder / "taktd.yaml"), {name: version})
        except StoreError as error:
            raise ControlError(str(error), error.hint) from None
        self.changes.append((name, version))
        return f"{name} is version {version}"

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        return asyncio.run(self.asked(op, **arguments))

    async def asked(self, op: str, **arguments: Any) -> dict[str, Any]:
        operations = {**self.commands.asking, **self.commands.changing}
        return await operations[f"model.{op}"]({"op": op, **arguments})  # type: ignore[no-any-return]

    def no(self, op: str, **arguments: Any) -> ControlError:
        with pytest.raises(ControlError) as refused:
            self.ask(op, **arguments)
        assert refused.value.hint
        return refused.value

    def active(self) -> int | None:
        return store_of(self.configuration.models["go1"]).active()


@pytest.fixture
def host(tmp_path: Path) -> Supervisor:
    return Supervisor(tmp_path)


def incoming(folder: Path, size: int) -> str:
    return str(models.identity(folder / f"in{size}.onnx", (size,)))


def test_add_activate_rollback_remove(host: Supervisor, tmp_path: Path) -> None:
    added = host.ask("add", name="go1", file=incoming(tmp_path, 2))
    assert (added["version"], added["new"]) == (2, True)
    assert host.ask("add", name="go1", file=incoming(tmp_path, 2))["new"] is False
    assert (host.active(), host.changes) == (1, [])
    assert host.ask("activate", name="go1", version=2)["message"] == "go1 is version 2"
    assert (host.active(), host.changes) == (2, [("go1", 2)])
    assert host.ask("rollback", name="go1")["version"] == 1
    assert (host.active(), host.changes[-1]) == (1, ("go1", 1))
    host.ask("remove", name="go1", version=2)
    [entry] = host.ask("list", name="go1")["models"]
    assert [(v["version"], v["active"]) for v in entry["versions"]] == [(1, True)]
    assert entry["serving"] == 1


def test_what_is_served_already_is_only_remembered(host: Supervisor) -> None:
    assert "served already" in host.ask("activate", name="go1", version=1)["message"]
    assert host.changes == []


def test_a_version_that_can_t_serve_is_not_remembered(host: Supervisor, tmp_path: Path) -> None:
    host.ask("add", name="go1", file=incoming(tmp_path, 2))

    async def refuse() -> None:
        raise ControlError("it does not fit", "make it smaller")

    host.changing = refuse
    assert "does not fit" in str(host.no("activate", name="go1", version=2))
    assert host.active() == 1


def test_two_activations_at_once(host: Supervisor, tmp_path: Path) -> None:
    host.ask("add", name="go1", file=incoming(tmp_path, 2))

    async def both() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> None:
            begun.set()
            await go_on.wait()

        host.changing = slowly
        first = asyncio.create_task(host.asked("activate", name="go1", version=2))
        await begun.wait()
        for op, arguments in (("activate", {"version": 1}), ("rollback", {}), ("remove", {"version": 1})):
            with pytest.raises(ControlError, match="under way"):
                await host.asked(op, name="go1", **arguments)
        go_on.set()
        assert (await first)["version"] == 2

    asyncio.run(both())
    assert (host.active(), host.changes) == (2, [("go1", 2)])


@pytest.mark.parametrize(
    ("op", "arguments", "what"),
    [
        ("activate", {"name": "go1", "version": 9}, "no version 9"),
        ("activate", {"name": "go1", "version": 0}, "'0' is no version"),
        ("activate", {"name": "go1", "version": "1"}, "is no version"),
        ("activate", {"name": "go1", "version": True}, "is no version"),
        ("activate", {"name": "go1"}, "is no version"),
        ("activate", {"name": "go2", "version": 1}, "no model 'go2'"),
        ("activate", {"name": ["go1"], "version": 1}, "no model"),
        ("activate", {"version": 1}, "no model"),
        ("activate", {"name": "plain", "version": 1}, "has no versions"),
        ("add", {"name": "plain", "file": "/x.onnx"}, "has no versions"),
        ("add", {"name": "go1"}, "no path"),
        ("add", {"name": "go1", "file": "relative.onnx"}, "no path"),
        ("add", {"name": "go1", "file": 7}, "no path"),
        ("add", {"name": "go1", "file": "/none/there.onnx"}, "model file is missing"),
        ("remove", {"name": "go1", "version": 1}, "in use"),
        ("remove", {"name": "go1", "version": 9}, "no version 9"),
        ("rollback", {"name": "go1"}, "no version to go back to"),
        ("list", {"name": "go2"}, "no model"),
    ],
)
def test_what_can_t_be_done(host: Supervisor, op: str, arguments: dict[str, Any], what: str) -> None:
    assert what in str(host.no(op, **arguments))
    assert (host.active(), host.changes) == (1, [])


def test_a_pinned_model_is_changed_in_the_configuration(tmp_path: Path) -> None:
    host = Supervisor(tmp_path, version="1")
    host.ask("add", name="go1", file=incoming(tmp_path, 2))
    refused = host.no("activate", name="go1", version=2)
    assert ("pinned to version 1" in str(refused), refused.kind) == (True, "pinned")
    assert "pinned" in str(host.no("rollback", name="go1"))


@pytest.mark.parametrize(
    ("op", "arguments", "kind"),
    [
        ("activate", {"name": "go1", "version": 9}, "unknown"),
        ("activate", {"name": "go2", "version": 1}, "unknown"),
        ("activate", {"name": "plain", "version": 1}, "unknown"),
        ("activate", {"name": "go1", "version": 0}, ""),
        ("remove", {"name": "go1", "version": 1}, ""),
        ("rollback", {"name": "go1"}, ""),
    ],
)
def test_a_program_tells_a_thing_that_is_not_there_from_every_other_no(
    host: Supervisor, op: str, arguments: dict[str, Any], kind: str
) -> None:
    answer = host.no(op, **arguments).as_answer()
    assert answer["error"]["kind"] == kind
    assert set(answer["error"]) == {"what", "hint", "kind"}


@pytest.mark.parametrize("cut", [0, 1, 50, 99])
def test_an_import_that_is_cut_off_is_no_version(host: Supervisor, tmp_path: Path, cut: int) -> None:
    file = Path(incoming(tmp_path, 2))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * cut // 100])
    host.no("add", name="go1", file=str(file))
    assert [p.name for p in (tmp_path / "store/go1").iterdir()] == ["1"]


def test_a_file_that_changes_while_it_is_imported(
    host: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole when it was looked at, cut off when it was copied."""
    file = Path(incoming(tmp_path, 2))
    looked = host.inspector.inspect

    async def then_cut(self: Inspector, model: Model) -> dict[str, Any]:
        found = await looked(model)
        file.write_bytes(file.read_bytes()[:-3])
        return found

    monkeypatch.setattr(Inspector, "inspect", then_cut)
    monkeypatch.setattr(Supervisor, "inspect_model", lambda self, model: (
        then_cut(self.inspector, model) if model.path == str(file) else looked(model)
    ))  # fmt: skip
    host.no("add", name="go1", file=str(file))
    assert [p.name for p in (tmp_path / "store/go1").iterdir()] == ["1"]


def test_external_data_is_imported_with_it(host: Supervisor, tmp_path: Path) -> None:
    import onnx

    folder = tmp_path / "big"
    model = onnx.load(str(models.mlp(folder / "policy.onnx", (48, 512, 12))))
    (folder / "data").mkdir()
    onnx.save(model, str(folder / "policy.onnx"), save_as_external_data=True, location="data/w.bin", size_threshold=0)
    assert host.ask("add", name="go1", file=str(folder / "policy.onnx"))["version"] == 2
    assert (tmp_path / "store/go1/2/data/w.bin").stat().st_size > 48 * 512 * 4
    outside = onnx.load(str(folder / "policy.onnx"), load_external_data=False)
    for tensor in outside.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../data/w.bin"
    (folder / "evil.onnx").write_bytes(outside.SerializeToString())
    (tmp_path / "data").mkdir()
    (tmp_path / "data/w.bin").write_bytes((folder / "data/w.bin").read_bytes())
    assert "lies in another file" in str(host.no("add", name="go1", file=str(folder / "evil.onnx")))


def test_a_full_disk_during_an_import(host: Supervisor, tmp_path: Path) -> None:
    file = incoming(tmp_path, 2)
    host.ask("add", name="go1", file=incoming(tmp_path, 3))
    before = sorted(p.name for p in (tmp_path / "store/go1").iterdir())

    def stage(*arguments: Any) -> Any:
        with failing(6, fails(errno.ENOSPC)):  # the first write
            return type(store).stage(store, *arguments)

    store = store_of(host.configuration.models["go1"])
    with pytest.raises(Exception, match="no space left on device") as refused:
        stage(Path(file), ())
    assert "make room" in refused.value.hint  # type: ignore[attr-defined]
    assert sorted(p.name for p in (tmp_path / "store/go1").iterdir()) == before


# ---- a store that can't remember ----


def with_two_versions(folder: Path) -> Supervisor:
    """The first one active; both put there by hand, so that nothing has to be inspected."""
    host = Supervisor(folder)
    models.identity(folder / "store/go1/2/model.onnx", (2,))
    host.ask("activate", name="go1", version=1)
    return host


def serving(host: Supervisor) -> int | None:
    return version_of(host.configuration.models["go1"])


def tried(host: Supervisor, op: str, number: int, at: int) -> tuple[bool, str]:
    """The op while its at-th system call fails: whether it was made at all, and the refusal, "" for none."""
    arguments = {"version": 2} if op == "activate" else {}
    with failing(at, fails(number)) as seen:
        try:
            host.ask(op, name="go1", **arguments)
        except ControlError as error:
            return seen.calls >= at, str(error)
    return seen.calls >= at, ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("op", ["activate", "rollback"])
def test_what_is_served_and_what_is_remembered_never_differ(tmp_path: Path, op: str, number: int) -> None:
    """Whichever call it is that fails, from the first look at the store to the last."""
    host, at, made, refusals, switches = with_two_versions(tmp_path), 0, True, 0, 0
    while made:
        at += 1
        host.ask("activate", name="go1", version=1)
        if op == "rollback":
            host.ask("activate", name="go1", version=2)
        before, host.changes = serving(host), []
        made, refusal = tried(host, op, number, at)
        assert host.active() == serving(host), at
        refusals, switches = refusals + bool(refusal), switches + len(host.changes)
        if refusal:
            assert os.strerror(number).lower() in refusal
            assert serving(host) == before
        if serving(host) == before:
            assert tried(host, op, 0, 0) == (True, ""), "and the next try works"
        assert host.active() == serving(host) != before
    assert refusals > 6
    assert switches > at - refusals, "some were taken back"


def test_a_full_disk_is_found_before_anything_is_switched(tmp_path: Path) -> None:
    host = with_two_versions(tmp_path)
    (tmp_path / "store/go1/active.json").unlink()
    (tmp_path / "store/go1/active.json").mkdir()
    refused = host.no("activate", name="go1", version=2)
    assert "is no regular file" in str(refused)
    assert (host.changes, serving(host)) == ([], 1)


def test_a_switch_that_can_t_be_remembered_is_taken_back(tmp_path: Path) -> None:
    """Room runs out while the new version is loaded."""
    host, file = with_two_versions(tmp_path), tmp_path / "store/go1/active.json"

    async def fill() -> None:
        if not host.changes:
            file.unlink()
            file.mkdir()

    async def fill_and_refuse() -> None:
        if host.changes:
            raise ControlError("it does not fit", "make it smaller")
        await fill()

    host.changing = fill
    refused = host.no("activate", name="go1", version=2)
    assert "version 2 was served meanwhile, version 1 is served again" in str(refused)
    assert host.changes == [("go1", 2), ("go1", 1)]
    file.rmdir()
    store_of(host.configuration.models["go1"]).activate(1)
    host.changes, host.changing = [], fill_and_refuse
    refused = host.no("activate", name="go1", version=2)
    assert "can't be exchanged for version 1 again (it does not fit): until the next start it stays" in str(refused)


# ---- faults ----


def faults(host: Supervisor) -> FaultCommands:
    return FaultCommands(host.folder / "state", lambda: host.configuration)


def inject(host: Supervisor, **request: Any) -> dict[str, Any]:
    return asyncio.run(faults(host).inject(request))


def test_a_fault_reaches_the_device_s_file(host: Supervisor) -> None:
    reader = FaultFile(fault_file(host.folder / "state", "sim0"))
    assert inject(host, device="sim0", kind="slow=10x") == {"device": "sim0", "kind": "slow", "factor": 10, "runs": 0}
    assert reader.read() == SimFault(SimFaultKind.SLOW, 10, UNTIL_CLEARED)
    inject(host, device="sim0", kind="lost", runs=7)
    assert reader.read() == SimFault(SimFaultKind.LOST, 1, 7)
    assert asyncio.run(faults(host).list({}))["faults"] == [{"device": "sim0", "kind": "lost", "factor": 1, "runs": 7}]
    inject(host, device="sim0", kind="none")
    assert reader.read().kind is SimFaultKind.NONE
    forget_faults(host.folder / "state")
    assert not (host.folder / "state" / "faults").exists()


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        ({"device": "sim1", "kind": "oom"}, "no device 'sim1'"),
        ({"device": "cpu0", "kind": "oom"}, "a real device"),
        ({"device": 5, "kind": "oom"}, "no device"),
        ({"kind": "oom"}, "no device"),
        ({"device": "sim0"}, "is no fault"),
        ({"device": "sim0", "kind": "slow"}, "is no fault"),
        ({"device": "sim0", "kind": "slow=0x"}, "is no fault"),
        ({"device": "sim0", "kind": "slow=1.5x"}, "is no fault"),
        ({"device": "sim0", "kind": "slow=99999x"}, "is no fault"),
        ({"device": "sim0", "kind": ["oom"]}, "is no fault"),
        ({"device": "sim0", "kind": "oom", "runs": -1}, "no number of runs"),
        ({"device": "sim0", "kind": "oom", "runs": 65536}, "no number of runs"),
        ({"device": "sim0", "kind": "oom", "runs": "2"}, "no number of runs"),
    ],
)
def test_a_fault_that_can_t_be_injected(host: Supervisor, request_: dict[str, Any], what: str) -> None:
    with pytest.raises(ControlError, match=what) as refused:
        inject(host, **request_)
    assert refused.value.hint


def test_status_is_told_of_faults_that_last_and_makes_no_file(host: Supervisor) -> None:
    assert faults(host).lasting() == []
    assert not (host.folder / "state").exists()
    inject(host, device="sim0", kind="oom")
    assert faults(host).lasting() == [], "one run, and over"
    inject(host, device="sim0", kind="slow=3x")
    assert faults(host).lasting() == [{"device": "sim0", "kind": "slow", "factor": 3, "runs": 0}]
    inject(host, device="sim0", kind="none")
    assert faults(host).lasting() == []


def test_faults_only_where_they_are_allowed(tmp_path: Path) -> None:
    host = Supervisor(tmp_path, more="")
    with pytest.raises(ControlError, match="not allowed") as refused:
        inject(host, device="sim0", kind="oom")
    assert "allow_faults: true" in refused.value.hint
    assert asyncio.run(faults(host).list({}))["faults"] == []


def test_every_documented_fault_is_understood() -> None:
    for text in ("lost", "oom", "nan", "hang", "error"):
        assert parse_fault(text).runs == 1
    assert parse_fault("slow=10x").factor == 10
