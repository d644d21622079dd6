"""What TensorBoard reads is written byte by byte as its own writer would."""

from __future__ import annotations

import io
import random

from lockstep.sinks.records import RecordWriter


def test_records_are_those_of_tensorboards_own_writer() -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter as Original  # type: ignore[import-untyped]

    draw = random.Random(1)
    ours, theirs = io.BytesIO(), io.BytesIO()
    records = [draw.randbytes(size) for size in (89, 4, 7, 64, 65, 1000, 89, 0x10000)]
    original = Original(theirs)
    for data in records:
        original.write(data)
    writer = RecordWriter(ours)
    writer.write(records[:6])
    writer.write(records[6:7])
    writer.write(records[7:])
    assert ours.getvalue() == theirs.getvalue()
