"""Events: a subscriber that does not read loses them alone, they are counted, and he sees that he lost some."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import zmq

from taktd.ipc.zmq.server import EventPublisher, bind

EVENTS = 400
TENSOR = bytes(64 << 10)


def test_a_subscriber_that_does_not_read_loses_events_alone_and_they_are_counted(tmp_path: Path) -> None:
    async def go() -> tuple[int, int, list[int], list[int]]:
        ours, theirs = zmq.Context(), zmq.Context()
        publisher = EventPublisher(ours, 10, (8, 8), lambda complaint: None)
        bind(publisher.socket, str(tmp_path / "events"))
        subscribers = []
        for high_water in (EVENTS, 1):
            subscriber = theirs.socket(zmq.SUB)
            subscriber.set(zmq.RCVHWM, high_water)
            subscriber.connect(f"ipc://{tmp_path}/events")
            subscriber.subscribe(b"")
            subscribers.append(subscriber)
        reader, deaf = subscribers
        await heard(publisher, reader)
        await heard(publisher, deaf)
        seen = []
        while reader.poll(100):
            number_of(reader)
        for _ in range(EVENTS):
            publisher.publish("topic", {}, [TENSOR])
            seen.append(number_of(reader))
        sent, dropped = publisher.sent, publisher.dropped
        kept = []
        while deaf.poll(500):
            kept.append(number_of(deaf))
        publisher.publish("topic", {})
        kept.append(number_of(deaf))
        publisher.close()
        for context in (ours, theirs):
            context.destroy(0)
        assert sent >= EVENTS
        return sent, dropped, seen, kept

    sent, dropped, seen, kept = asyncio.run(go())
    assert seen == list(range(seen[0], seen[0] + EVENTS)), "whoever reads gets all of them, in order"
    assert 0 < dropped < sent
    assert kept == sorted(kept)
    assert kept[-1] - kept[0] >= len(kept), "the number tells of the gap"


async def heard(publisher: EventPublisher, subscriber: zmq.Socket[Any]) -> None:
    """Until it hears: who has just connected may not be known yet."""
    while not subscriber.poll(20):
        publisher.publish("hello", {})
        await asyncio.sleep(0)


def number_of(subscriber: zmq.Socket[Any]) -> int:
    """Of the next event."""
    assert subscriber.poll(30_000), "nothing came"
    _, header, *_ = subscriber.recv_multipart()
    return int(msgpack.unpackb(header)["n"])
