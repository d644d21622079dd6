"""The file format that TensorBoard reads: records with checksums.

The tensorboard package has a writer of its own, whose checksum is the larger part of what a step costs to be plotted.
This one writes the same bytes, with the checksums of many records found at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import IO

import numpy as np

MASK = 0xFFFFFFFF
BLOCK = 64
"""So many bytes of every record are added to its checksum at once."""


class RecordWriter:
    """Writes records: the length, its checksum, the data, their checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lengths: dict[int, bytes] = {}  # the beginnings of records: there are few sizes

    def write(self, records: Sequence[bytes]) -> None:
        """Append records, and let others see them."""
        parts: list[bytes] = []
        for data, checksum in zip(records, masked_checksums(records), strict=True):
            parts += self._beginning(len(data)), data, struct.pack("<I", checksum)
        self._file.write(b"".join(parts))
        self._file.flush()

    def _beginning(self, size: int) -> bytes:
        if size not in self._lengths:
            length = struct.pack("<Q", size)
            self._lengths[size] = length + struct.pack("<I", *masked_checksums([length]))
        return self._lengths[size]

    def close(self) -> None:
        """End the file."""
        self._file.close()


def masked_checksums(records: Sequence[bytes]) -> list[int]:
    """CRC-32C of each record, of four bytes or more, as the record format has it: rotated, and with a constant added.

    A checksum is the exclusive or of what each byte by itself adds to it, which depends on how far from the end the
    byte is. Zeros before the first byte add nothing.
    """
    longest = max(map(len, records))
    padded = longest + -longest % BLOCK
    rows = np.frombuffer(b"".join([data.rjust(padded, b"\0") for data in records]), np.uint8)
    rows = rows.reshape(len(records), padded).copy()
    first_four = padded - np.array([[len(data)] for data in records]) + np.arange(4)
    rows[np.arange(len(records))[:, None], first_four] ^= 0xFF  # the checksum begins with all bits set
    checksums = np.zeros(len(records), np.uint32)
    for begin in range(0, padded, BLOCK):
        block = rows[:, begin : begin + BLOCK]
        block[:, :4] ^= checksums.astype("<u4").view(np.uint8).reshape(-1, 4)
        checksums = np.bitwise_xor.reduce(_added_by_bytes()[np.arange(BLOCK), block], axis=1)
    checksums ^= np.uint32(MASK)
    return [((checksum >> 15 | checksum << 17) + 0xA282EAD8) & MASK for checksum in checksums.tolist()]


@cache
def _added_by_bytes() -> np.ndarray:
    """What a byte adds to the checksum, for its place in a block and its value."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE  # type: ignore[import-untyped]

    last = np.array(CRC_TABLE, np.uint32)
    rows = [last]
    while len(rows) < BLOCK:
        rows.append(last[rows[-1] & 0xFF] ^ (rows[-1] >> 8))
    return np.stack(rows[::-1])
