"""A recording out of a journal's records, without a recorder's files."""

from __future__ import annotations

from collections.abc import Iterable

from taktd.daemon.recording.record import FULL_STATE, RECORD, TEXT, Record, Recording, Section, text_of


def sections_of(device: str, records: Iterable[Record]) -> Recording:
    """Records as they come out of a journal, in parts that each begin with a state; what comes before one is left
    out."""
    recording: Recording = []
    text = bytearray()
    pending = bytearray()
    for record in records:
        t_ns, kind, lane, aux, a, b = record
        if kind == FULL_STATE:
            recording.append(Section(device, text.decode()))
            text.clear()
            pending.clear()
            continue
        if kind == TEXT:
            text += text_of(aux, a, b)
            pending += RECORD.pack(t_ns, kind, lane, aux, a, b)
            continue
        text.clear()
        if recording:
            recording[-1].records += pending + RECORD.pack(t_ns, kind, lane, aux, a, b)
        pending.clear()
    return recording
