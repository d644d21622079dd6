"""WikiText-2, or any text laid out like it, as numbers of words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.data.sets import own_folder
from lockstep.errors import UserError

END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"
FILE_NAMES = ("{}.txt", "wiki.{}.tokens")

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WordSplits:
    """Three texts as indices into `vocabulary`, which is the words of the training text by first appearance."""

    vocabulary: list[str]
    train: Ids
    validation: Ids
    test: Ids


def read_words(folder: Path) -> WordSplits:
    """The texts {train,valid,test}.txt (or wiki.*.tokens) of a folder: words between spaces, each line ended by <eos>.

    A word that the training text does not have is <unk>.
    """
    own_folder(folder)
    numbers: dict[str, int] = {}
    train = [numbers.setdefault(word, len(numbers)) for word in _words(folder, "train")]
    unknown = numbers.setdefault(UNKNOWN, len(numbers))
    validation, test = ([numbers.get(word, unknown) for word in _words(folder, part)] for part in ("valid", "test"))
    return WordSplits(list(numbers), *(np.array(ids, np.int32) for ids in (train, validation, test)))


def unigram_loss(train: Ids, validation: Ids, vocabulary: int) -> float:
    """Nats per word of `validation`, each guessed by how often `train` has it, plus one."""
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[validation[1:]].mean())


def _words(folder: Path, part: str) -> list[str]:
    candidates = [folder / name.format(part) for name in FILE_NAMES]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise UserError(
            f"{folder} has neither {candidates[0].name} nor {candidates[1].name}",
            "give a folder with a training, a validation and a test text",
        )
    try:
        with path.open(encoding="utf-8") as file:
            words = [word for line in file for word in (*line.split(), END_OF_LINE)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error})", "restore the file") from None
    if len(words) < 2:
        raise UserError(f"{path} has no words", "restore the file")
    return words
