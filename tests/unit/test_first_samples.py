"""Samples that are looked at before they are trained on: nothing of the dataset is used up or changed by it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

from lockstep.data.first_samples import first_samples, second_of, uneven_samples
from lockstep.data.loader import Reading
from lockstep.data.order import Order, sample_ids

SIZE, BATCH, SEED = 26, 8, 5
ORDER = Order(SIZE, BATCH, 4, SEED, data_rank=1, data_size=2, equal_counts=False)
FIRST = sample_ids(np.arange(BATCH), SIZE, SEED, 0).tolist()


class OfAFile(Dataset[Any]):
    """Opens its file where it is first read, and counts."""

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.reads = path, -1, 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        if self.file < 0:
            self.file = os.open(self.path, os.O_RDONLY)
        os.lseek(self.file, index, os.SEEK_SET)
        return torch.tensor([float(os.read(self.file, 1)[0])])


def test_where_loader_processes_read_nothing_is_opened_or_counted_in_the_rank(tmp_path: Path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(SIZE)))
    dataset = OfAFile(path)
    read = first_samples(dataset, ORDER, Reading(workers=1))
    for start, end in [(0, 5), (2, 4), (0, BATCH)]:
        part = read(start, end)
        assert part.ids == FIRST[start:end]
        assert part.data.flatten().tolist() == FIRST[start:end]
    assert (dataset.file, dataset.reads) == (-1, 0)
    first_samples(dataset, ORDER, Reading(workers=0))(0, 5)
    assert dataset.reads == 5


class OfFunctions(Dataset[Any]):
    """Samples that no process can hand on."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return lambda: index


def test_samples_that_cannot_leave_a_process_are_read_here():
    reading = Reading(workers=1, collate=lambda samples: [sample() for sample in samples])
    assert first_samples(OfFunctions(), ORDER, reading)(0, 4).data == FIRST[:4]


class Epochs(IterableDataset[Any]):
    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return (torch.tensor([float(number)]) for number in range(SIZE))


def test_a_stream_stands_where_it_stood():
    stream = Epochs()
    assert first_samples(stream, ORDER, Reading())(0, 3).data.flatten().tolist() == [0.0, 1.0, 2.0]
    assert stream.epoch == 0


def test_a_stream_of_which_there_is_no_copy_is_read_only_where_it_begins_anew():
    class WithAFile(Epochs):
        def __init__(self) -> None:
            super().__init__()
            self.file = Path(os.devnull).open()  # noqa: SIM115 - of which nobody makes a second one

    class Once(WithAFile):
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            raise StopIteration

    again, once = WithAFile(), Once()
    assert second_of(again) is again
    assert second_of(once) is None
    again.file.close()
    once.file.close()


class Texts(Dataset[Any]):
    """All of one length, but for one."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((9 if index == 17 else 4,), float(index))


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


def test_samples_of_other_sizes_are_found_wherever_they_are():
    for workers in (0, 1):
        read = uneven_samples(Texts(), ORDER, Reading(workers, collate=padded), 5)
        assert read is not None
        assert read(0, 2).data.shape == (2, 4)
        assert read(2, 5).data.shape == (3, 9)
        assert read(2, 5).ids[-1] == 17


def test_samples_of_one_size_tell_nothing_nor_those_that_are_only_stacked():
    class Even(Texts):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4,), float(index))

    assert uneven_samples(Even(), ORDER, Reading(collate=padded), 5) is None
    assert uneven_samples(Texts(), ORDER, Reading(), 5) is None
