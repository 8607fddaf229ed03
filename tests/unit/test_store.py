"""Versions of a model: imported by content, whole or not there, active by decision, checked when they are used."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taktd.daemon.config.configuration import load
from taktd.daemon.models.store import ModelStore, StoreError, resolved, version_of
from tests.fakes.failing_calls import counted, failing, fails, killed_at

DISK_ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store" / "go1", "go1")


def source(folder: Path, content: bytes, **external: bytes) -> Path:
    path = folder / "incoming" / "policy.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for name, data in external.items():
        (path.parent / name).write_bytes(data)
    return path


def add(store: ModelStore, path: Path, external: tuple[str, ...] = ()) -> tuple[int, bool]:
    return store.commit(store.stage(path, external))


def visible(store: ModelStore) -> dict[int, dict[str, bytes]]:
    """Every version with all its bytes, as anybody would find them."""
    return {
        v.number: {p.name: p.read_bytes() for p in v.path.parent.iterdir() if p.name != "manifest.json"}
        for v in store.versions()
    }


def names(store: ModelStore) -> set[str]:
    return set(os.listdir(store.folder))


def test_an_empty_store_says_where_the_first_version_goes_and_that_is_served(store: ModelStore) -> None:
    with pytest.raises(StoreError) as refused:
        store.resolve("latest")
    place = re.search(r"put the first one at (\S+);", refused.value.hint)
    assert place is not None
    Path(place[1]).parent.mkdir(parents=True)
    Path(place[1]).write_bytes(b"one")
    assert store.resolve("latest").number == 1


def test_versions_count_up_and_the_first_one_is_active(store: ModelStore, tmp_path: Path) -> None:
    assert store.active() is None
    assert add(store, source(tmp_path, b"one")) == (1, True)
    assert (store.active(), store.resolve("latest").number) == (1, 1)
    assert add(store, source(tmp_path, b"two")) == (2, True)
    assert store.active() == 1, "an import alone changes nothing that is served"
    store.activate(2)
    assert store.active() == 2
    assert visible(store) == {1: {"model.onnx": b"one"}, 2: {"model.onnx": b"two"}}
    assert names(store) == {"1", "2", "active.json"}


def test_the_same_content_is_there_once(store: ModelStore, tmp_path: Path) -> None:
    assert add(store, source(tmp_path, b"one", weights=b"w"), ("weights",)) == (1, True)
    assert add(store, source(tmp_path, b"one", weights=b"w"), ("weights",)) == (1, False)
    assert add(store, source(tmp_path, b"one", weights=b"x"), ("weights",)) == (2, True)
    assert names(store) == {"1", "2", "active.json"}


def test_external_data_comes_along_in_its_folders(store: ModelStore, tmp_path: Path) -> None:
    path = source(tmp_path, b"one")
    (path.parent / "data").mkdir()
    (path.parent / "data" / "w.bin").write_bytes(b"weights")
    add(store, path, ("data/w.bin",))
    assert (store.folder / "1/data/w.bin").read_bytes() == b"weights"
    (store.folder / "1/data/w.bin").write_bytes(b"wEights")
    with pytest.raises(StoreError, match=r"data/w\.bin of version 1 is not what was imported"):
        store.resolve(1)


def test_a_version_put_there_by_hand_is_taken_as_it_is(store: ModelStore, tmp_path: Path) -> None:
    (store.folder / "7").mkdir(parents=True)
    (store.folder / "7" / "model.onnx").write_bytes(b"seven")
    (store.folder / "8").mkdir()  # still being copied: no model in it yet
    assert (store.active(), [v.number for v in store.versions()]) == (7, [7])
    assert add(store, source(tmp_path, b"seven")) == (7, False)
    assert add(store, source(tmp_path, b"nine"))[0] == 8 or names(store) >= {"7", "8"}


@pytest.mark.parametrize("name", ["0", "01", "-1", "1.bak", "latest", ".import-1-ab", "1000000000"])
def test_what_is_no_number_is_no_version(store: ModelStore, name: str) -> None:
    (store.folder / name).mkdir(parents=True)
    (store.folder / name / "model.onnx").write_bytes(b"x")
    assert store.versions() == []


def test_a_link_is_no_version(store: ModelStore, tmp_path: Path) -> None:
    add(store, source(tmp_path, b"one"))
    (store.folder / "2").symlink_to(store.folder / "1")
    assert [v.number for v in store.versions()] == [1]


def test_rollback_goes_back_one_at_a_time(store: ModelStore, tmp_path: Path) -> None:
    for content in (b"one", b"two", b"three"):
        add(store, source(tmp_path, content))
    store.activate(2)
    store.activate(3)
    assert [store.rollback(), store.rollback()] == [2, 1]
    with pytest.raises(StoreError, match="no version to go back to"):
        store.rollback()
    assert store.active() == 1


def test_rollback_passes_over_what_was_removed(store: ModelStore, tmp_path: Path) -> None:
    for content in (b"one", b"two", b"three"):
        add(store, source(tmp_path, content))
    store.activate(2)
    store.activate(3)
    store.remove(2)
    assert store.rollback() == 1


def test_a_number_is_never_used_again(store: ModelStore, tmp_path: Path) -> None:
    for content in (b"one", b"two", b"three"):
        add(store, source(tmp_path, content))
    store.remove(3)
    assert add(store, source(tmp_path, b"four")) == (4, True)


def test_what_is_active_or_used_stays(store: ModelStore, tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        add(store, source(tmp_path, content))
    with pytest.raises(StoreError, match="in use"):
        store.remove(1)
    with pytest.raises(StoreError, match="in use"):
        store.remove(2, used=[2])
    with pytest.raises(StoreError, match="no version 9") as refused:
        store.remove(9)
    assert "1, 2" in refused.value.hint


@pytest.mark.parametrize("action", [lambda s: s.activate(3), lambda s: s.resolve(3), lambda s: s.find(3)])
def test_a_version_that_does_not_exist(store: ModelStore, tmp_path: Path, action: Callable[[ModelStore], None]) -> None:
    add(store, source(tmp_path, b"one"))
    with pytest.raises(StoreError, match="no version 3"):
        action(store)


def test_an_empty_store_says_how_to_fill_it(store: ModelStore) -> None:
    with pytest.raises(StoreError, match="no version") as refused:
        store.resolve("latest")
    assert "taktctl model add go1" in refused.value.hint
    with pytest.raises(StoreError):
        store.activate(1)


def test_two_changes_at_once(store: ModelStore, tmp_path: Path) -> None:
    staged = store.stage(source(tmp_path, b"one"), ())
    for change in (lambda: store.activate(1), lambda: store.stage(source(tmp_path, b"one"), ()), store.rollback):
        with pytest.raises(StoreError, match="under way"):
            change()
    assert store.versions() == []
    store.abort(staged)
    assert names(store) == set()
    assert add(store, source(tmp_path, b"one")) == (1, True)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 1}', b"\xff" * 100, b"[" * 100_000, b"null"])
def test_a_damaged_state_is_refused_not_guessed(store: ModelStore, tmp_path: Path, damage: bytes) -> None:
    for content in (b"one", b"two"):
        add(store, source(tmp_path, content))
    (store.folder / "active.json").write_bytes(damage)
    with pytest.raises(StoreError, match=r"not known: .*active\.json is damaged") as refused:
        store.resolve("latest")
    assert "number in the configuration" in refused.value.hint
    assert store.resolve(2).number == 2


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_flipped_bit_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flip")
    store = ModelStore(folder / "s", "go1")
    add(store, source(folder, bytes(range(64))))
    file = store.folder / "1" / data.draw(st.sampled_from(["model.onnx", "manifest.json"]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) * 8 - 1))
    content[place // 8] ^= 1 << place % 8
    before = json.loads((store.folder / "1/manifest.json").read_bytes())
    file.write_bytes(content)
    try:
        store.resolve(1)
    except StoreError:
        return
    assert json.loads((store.folder / "1/manifest.json").read_bytes()) == before  # a flip in white space


# ---- FAULTS row 8: the disk fails, the process is killed, at every step ----


def whole(store: ModelStore, before: dict[int, dict[str, bytes]], after: dict[int, dict[str, bytes]]) -> None:
    found = visible(store)
    assert found in (before, after)
    for version in store.versions():
        store.check(version)


def prepared(folder: Path) -> tuple[ModelStore, Path]:
    store = ModelStore(folder / "s", "go1")
    add(store, source(folder, b"one", w=b"1" * 3000), ("w",))
    return store, source(folder, b"two", w=b"2" * 3000)


def import_and_activate(store: ModelStore, path: Path) -> None:
    add(store, path, ("w",))
    store.activate(2)


def steps(folder: Path) -> int:
    store, path = prepared(folder)
    return counted(lambda: import_and_activate(store, path))


@pytest.mark.parametrize("number", DISK_ERRORS, ids=errno.errorcode.get)
def test_each_failing_call_leaves_the_old_or_the_new(tmp_path: Path, number: int) -> None:
    (tmp_path / "count").mkdir()
    for at in range(1, steps(tmp_path / "count") + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        store, path = prepared(folder)
        before = visible(store)
        after = before | {2: {"model.onnx": b"two", "w": b"2" * 3000}}
        refused = None
        try:
            with failing(at, fails(number)):
                import_and_activate(store, path)
        except StoreError as error:
            refused = error
        if refused:
            assert os.strerror(number).lower() in str(refused)
            assert refused.hint or number == errno.EIO
        else:  # it was tidying up that failed: the work itself is done
            assert visible(store) == after
        whole(store, before, after)
        assert store.active() in (1, 2)
        import_and_activate(store, path)
        assert visible(store) == after, "and the next try works"
        assert names(store) == {"1", "2", "active.json"}


def test_a_kill_at_each_call_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    (tmp_path / "count").mkdir()
    for at in range(1, steps(tmp_path / "count") + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        store, path = prepared(folder)
        before = visible(store)
        killed_at(at, lambda: import_and_activate(store, path))  # noqa: B023
        whole(store, before, before | {2: {"model.onnx": b"two", "w": b"2" * 3000}})
        assert store.active() in (1, 2)
        import_and_activate(store, path)
        whole(store, before | {2: {"model.onnx": b"two", "w": b"2" * 3000}}, {})
        assert names(store) == {"1", "2", "active.json"}


def test_a_kill_while_removing_leaves_it_or_not(tmp_path: Path) -> None:
    def removing(store: ModelStore, path: Path) -> None:
        store.remove(2)

    def ready(folder: Path) -> tuple[ModelStore, Path]:
        folder.mkdir()
        store, path = prepared(folder)
        add(store, path, ("w",))
        return store, path

    first, incoming = ready(tmp_path / "count")
    for at in range(1, counted(lambda: removing(first, incoming)) + 1):
        store, path = ready(tmp_path / str(at))
        before = visible(store)
        killed_at(at, lambda: removing(store, path))  # noqa: B023
        whole(store, before, {1: before[1]})
        add(store, path, ("w",))
        assert not [name for name in names(store) if name.startswith(".remove")]


@pytest.mark.parametrize("number", DISK_ERRORS, ids=errno.errorcode.get)
def test_leftovers_that_can_t_be_cleared_away_are_told_as_any_other_no(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    add(store, source(tmp_path, b"one"))
    left = store.folder / ".active.json.17.tmp"
    left.touch()
    incoming = source(tmp_path, b"two")

    def unlinking(path: Path, missing_ok: bool = False) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlinking)
        for change in (
            store.rehearse, lambda: store.activate(1), lambda: store.remove(1), lambda: store.stage(incoming, ()),
        ):  # fmt: skip
            with pytest.raises(StoreError, match="can't be cleared away") as refused:
                change()
            assert os.strerror(number).lower() in str(refused.value)
    store.activate(1)
    assert not left.exists()


def test_a_source_that_vanishes_or_can_t_be_read(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        store.stage(tmp_path / "none.onnx", ())
    with pytest.raises(StoreError, match="is a directory"):
        store.stage(tmp_path, ())
    with pytest.raises(StoreError, match="no such file"):
        store.stage(source(tmp_path, b"one"), ("gone",))
    with pytest.raises(StoreError, match="can't be imported"):
        store.stage(source(tmp_path, b"one"), ("model.onnx",))
    assert names(store) == set()


def test_a_store_at_a_place_that_can_t_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't be made"):
        ModelStore(tmp_path / "file" / "go1", "go1").stage(source(tmp_path, b"one"), ())


# ---- configuration ----


def configured(folder: Path, version: str) -> Path:
    file = folder / "taktd.yaml"
    file.write_text(f"devices: {{c: {{driver: cpu}}}}\nmodels: {{go1: {{path: store/go1{version}}}}}\n")
    return file


def test_a_configuration_is_resolved_to_files(store: ModelStore, tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        add(store, source(tmp_path, content))
    latest = load(configured(tmp_path, ", version: latest"))
    assert resolved(latest).models["go1"].path == str(store.folder / "1/model.onnx")
    assert version_of(resolved(latest).models["go1"]) == 1
    assert resolved(latest, {"go1": 2}).models["go1"].path == str(store.folder / "2/model.onnx")
    pinned = load(configured(tmp_path, ", version: 2"))
    assert version_of(resolved(pinned).models["go1"]) == 2
    with pytest.raises(StoreError, match="no version 3"):
        resolved(load(configured(tmp_path, ", version: 3")))
    with pytest.raises(StoreError, match="no version is named"):
        resolved(load(configured(tmp_path, "")))
    file = configured(tmp_path, ", version: latest")
    file.write_text(file.read_text().replace("store/go1", str(source(tmp_path, b"one"))))
    with pytest.raises(StoreError, match="is a file, and a version is named"):
        resolved(load(file))
