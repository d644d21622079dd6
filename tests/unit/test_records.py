"""What TensorBoard reads is written byte by byte as its own writer would."""

from __future__ import annotations

import io
import random

from lockstep.sinks.records import RecordWriter


def test_records_are_those_of_tensorboards_own_writer() -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter as Original  # type: ignore[import-untyped]

    draw = random.Random(1)
    ours, theirs = io.BytesIO(), io.BytesIO()
    writers = RecordWriter(ours), Original(theirs)
    for size in (0, 1, 7, 89, 1000):
        data = draw.randbytes(size)
        for writer in writers:
            writer.write(data)
    assert ours.getvalue() == theirs.getvalue()
