"""The times of a real dump, as CRIU itself notes them."""

from __future__ import annotations

import time
from pathlib import Path

from criu_tool import Criu, dump
from made_checkpoints import WORD, fields
from workloads import Heap

from icefloe.capture.images import decode_dump_stats

SERVICE, STATS = 0x55105940, 0x57093306


def test_the_times_of_a_dump(criu: Criu, heap: Heap, tmp_path: Path) -> None:
    heap.advance()
    started = time.monotonic()
    dump(criu, heap, tmp_path / "images", leave_running=True)
    seconds = time.monotonic() - started
    content = (tmp_path / "images" / "stats-dump").read_bytes()
    times = decode_dump_stats(content, "stats-dump")
    assert content.startswith(WORD.pack(SERVICE) + WORD.pack(STATS))
    # One message of one field, the dump; nothing in it is longer than 127 bytes.
    (length,) = WORD.unpack(content[8:12])
    assert content[12] == 1 << 3 | 2 and content[13] == length - 2 == len(content) - 14
    told = fields(content[14:])
    assert [told[i] / 1e6 for i in (1, 2, 3, 4)] == [
        times.freezing,
        times.frozen,
        times.collecting,
        times.writing,
    ]
    assert 0 < times.freezing < seconds and 0 < times.frozen < seconds
    assert times.freezing + times.frozen <= seconds
    # The one is a part of the other (criu/mem.c, xfer_pages).
    assert 0 < times.writing < times.collecting < times.frozen
