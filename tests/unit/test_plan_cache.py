"""Plans on disk: whole or not there, and believed only if nobody else could have written them."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from taktd.engines.plan_cache import PlanCache, PlanIdentity, PlanRejected
from tests.fakes.failing_calls import counted, failing, fails, killed_at

IDENTITY = PlanIdentity(
    "digest", "tensorrt 10.16", "Card", (8, 9), 13000, {"x": [[1, 3], [4, 3], [4, 3]]}, {"level": 3}
)
PLAN = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    made = PlanCache(tmp_path / "cache")
    made.store(IDENTITY, PLAN, build_ns=5)
    return made


def test_what_was_stored_is_found(cache: PlanCache) -> None:
    found = cache.load(IDENTITY)
    assert found is not None
    assert found.plan == PLAN
    assert found.manifest["build_ns"] == 5
    cache.annotate(IDENTITY, measured={"p50_ns": 7})
    again = cache.load(IDENTITY)
    assert again is not None
    assert again.manifest["measured"] == {"p50_ns": 7}


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "other"},
        {"library": "tensorrt 10.17"},
        {"device": "Other card"},
        {"compute": (9, 0)},
        {"driver": 13010},
        {"shapes": {"x": [[1, 3], [8, 3], [8, 3]]}},
        {"options": {"level": 5}},
    ],
)
def test_everything_that_a_plan_depends_on_is_its_identity(cache: PlanCache, change: dict[str, object]) -> None:
    other = replace(IDENTITY, **change)  # type: ignore[arg-type]
    assert other.digest != IDENTITY.digest
    assert cache.load(other) is None


def test_a_foreign_plan_under_our_name_is_rejected(cache: PlanCache) -> None:
    """FAULTS: engine cache: foreign device or version."""
    other = replace(IDENTITY, device="Other card")
    for mine, theirs in zip(cache.paths(other), cache.paths(IDENTITY), strict=True):
        os.rename(theirs, mine)
    with pytest.raises(PlanRejected, match="'Card' instead of 'Other card'"):
        cache.load(other)


@pytest.mark.parametrize("at", [0, 1, 5000, -1])
def test_a_flipped_byte_is_noticed(cache: PlanCache, at: int) -> None:
    path, _ = cache.paths(IDENTITY)
    content = bytearray(PLAN)
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(PlanRejected, match="damaged"):
        cache.load(IDENTITY)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_file_is_noticed(cache: PlanCache, which: int, length: int) -> None:
    path = cache.paths(IDENTITY)[which]
    os.truncate(path, length)
    with pytest.raises(PlanRejected):
        cache.load(IDENTITY)


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_half_is_noticed(cache: PlanCache, which: int) -> None:
    cache.paths(IDENTITY)[which].unlink()
    with pytest.raises(PlanRejected):
        cache.load(IDENTITY)


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_others_can_write_is_rejected(cache: PlanCache, which: int) -> None:
    cache.paths(IDENTITY)[which].chmod(0o666)
    with pytest.raises(PlanRejected, match="written by others"):
        cache.load(IDENTITY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_rejected(cache: PlanCache) -> None:
    os.chown(cache.paths(IDENTITY)[0], 12345, -1)
    with pytest.raises(PlanRejected, match="user 12345"):
        cache.load(IDENTITY)


def test_links_and_pipes_are_rejected(cache: PlanCache, tmp_path: Path) -> None:
    path, _ = cache.paths(IDENTITY)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlanRejected):
        cache.load(IDENTITY)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(PlanRejected, match="regular"):
        cache.load(IDENTITY)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "null", '{"format": 2, "identity": {}, "plan_sha256": ""}', '{"format": "1"}', "\x00"]
)
def test_a_manifest_that_is_none_is_rejected(cache: PlanCache, content: str) -> None:
    cache.paths(IDENTITY)[1].write_text(content)
    with pytest.raises(PlanRejected):
        cache.load(IDENTITY)


NEW = b"new" * 1000


def store_new(cache: PlanCache) -> None:
    cache.store(IDENTITY, NEW, build_ns=6)


def pair(cache: PlanCache) -> tuple[bytes, int]:
    """The plan and the manifest that is found with it."""
    found = cache.load(IDENTITY)
    assert found is not None
    return found.plan, found.manifest["build_ns"]


def steps(folder: Path) -> int:
    cache = PlanCache(folder)
    cache.store(IDENTITY, PLAN, build_ns=5)
    return counted(lambda: store_new(cache))


def tried(cache: PlanCache, at: int, number: int) -> bool:
    """Whether the new plan is said to be stored though the at-th call fails."""
    try:
        with failing(at, fails(number)):
            store_new(cache)
    except OSError as error:
        return error.errno != number
    return True


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_each_failing_call_leaves_the_old_pair_or_the_new_one(tmp_path: Path, number: int) -> None:
    """FAULTS: ENOSPC, EIO and EROFS at each step of writing plan and manifest."""
    seen = []
    for at in range(1, steps(tmp_path / "count") + 1):
        cache = PlanCache(tmp_path / str(at))
        cache.store(IDENTITY, PLAN, build_ns=5)
        stored = tried(cache, at, number)
        seen.append(pair(cache))
        assert seen[-1] == (NEW, 6) or not stored
        assert not [p for p in cache.folder.iterdir() if p.name.startswith(".")], "nothing half written is left"
        store_new(cache)
        assert pair(cache) == (NEW, 6), "and the next try works"
        assert {p.name for p in cache.folder.iterdir()} == {p.name for p in cache.paths(IDENTITY)}
    assert set(seen) == {(PLAN, 5), (NEW, 6)}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_each_failing_call_of_a_first_one_leaves_nothing_or_all_of_it(tmp_path: Path, number: int) -> None:
    count = counted(lambda: store_new(PlanCache(tmp_path / "count")))
    for at in range(1, count + 1):
        cache = PlanCache(tmp_path / str(at))
        stored, found = tried(cache, at, number), _found(cache)
        assert found == NEW or (found is None and not stored)
        store_new(cache)
        assert pair(cache) == (NEW, 6)


def _found(cache: PlanCache) -> bytes | None:
    found = cache.load(IDENTITY)
    return found and found.plan


def test_a_kill_at_each_call_leaves_the_old_pair_or_the_new_one(tmp_path: Path) -> None:
    for at in range(1, steps(tmp_path / "count") + 1):
        cache = PlanCache(tmp_path / str(at))
        cache.store(IDENTITY, PLAN, build_ns=5)
        killed_at(at, lambda: store_new(cache))  # noqa: B023
        assert pair(cache) in ((PLAN, 5), (NEW, 6))
        store_new(cache)
        assert pair(cache) == (NEW, 6)


def test_what_waits_for_its_manifest_is_removed_with_the_rest(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "cache")
    count = counted(lambda: store_new(PlanCache(tmp_path / "count")))
    with failing(count - 2, fails(errno.EIO)), pytest.raises(OSError, match="Input/output"):
        store_new(cache)
    assert [p.name for p in cache.folder.glob("*.new")]
    assert _found(cache) == NEW
    cache.remove(IDENTITY)
    assert not list(cache.folder.iterdir())


def test_removal_takes_the_manifest_first(cache: PlanCache) -> None:
    cache.remove(IDENTITY)
    assert cache.load(IDENTITY) is None
    cache.remove(IDENTITY)


def test_manifests_are_for_people_too(cache: PlanCache) -> None:
    text = cache.paths(IDENTITY)[1].read_text()
    assert text.count("\n") > 5
    assert json.loads(text)["identity"]["device"] == "Card"
