"""Texts of words: one vocabulary, every word of a split predicted exactly once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.data.corpora import IGNORED, TokenDataset
from lockstep.data.words import read_words, unigram_loss
from lockstep.errors import UserError
from tests.sets import WORDS, write_wikitext2


def write(folder: Path, train: str, valid: str = "a\n", test: str = "a\n", name: str = "{}.txt") -> Path:
    for part, content in (("train", train), ("valid", valid), ("test", test)):
        (folder / name.format(part)).write_bytes(content.encode())
    return folder


def test_lines_end_with_eos_and_words_are_numbered_by_first_appearance(tmp_path: Path):
    splits = read_words(write(tmp_path, " b a \n\n a c\n", valid="c b\n"))
    assert splits.vocabulary == ["b", "a", "<eos>", "c", "<unk>"]
    assert splits.train.tolist() == [0, 1, 2, 2, 1, 3, 2]
    assert splits.validation.tolist() == [3, 0, 2]


def test_a_word_the_training_text_does_not_have_is_unk(tmp_path: Path):
    splits = read_words(write(tmp_path, "a <unk> b\n", valid="a zebra\n"))
    assert splits.vocabulary == ["a", "<unk>", "b", "<eos>"], "none is added where the text has it"
    assert splits.validation.tolist() == [0, 1, 3]


def test_the_names_of_the_original_files_do_too(tmp_path: Path):
    assert read_words(write(tmp_path, "a b\n", name="wiki.{}.tokens")).train.tolist() == [0, 1, 2]


def test_a_tiny_set_in_the_official_layout_has_the_words_it_was_made_of(tmp_path: Path):
    splits = read_words(write_wikitext2(tmp_path / "set", train=600, valid=100, test=120))
    assert sorted(splits.vocabulary) == sorted([*WORDS, "<eos>"])
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (600 + 50, 100 + 9, 120 + 10)


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_missing_empty_or_unreadable_text_is_refused_by_its_name(tmp_path: Path, part: str):
    folder = write(tmp_path, "a b\n")
    path = folder / f"{part}.txt"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"{part}\.txt has no words"):
        read_words(folder)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=rf"{part}\.txt cannot be read as UTF-8"):
        read_words(folder)
    path.unlink()
    with pytest.raises(UserError, match=rf"has neither {part}\.txt nor wiki\.{part}\.tokens"):
        read_words(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="there is no folder"):
        read_words(tmp_path / "nowhere")


def test_the_unigram_loss_is_that_of_counted_words():
    train = np.array([0, 0, 0, 1], np.int32)
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert unigram_loss(train, np.array([1, 0, 2], np.int32), vocabulary=3) == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [2, 3, 7, 8, 9, 10, 57])
@pytest.mark.parametrize("context", [1, 3, 8, 100])
def test_every_token_but_the_first_is_predicted_once_also_in_a_shorter_last_window(tokens: int, context: int):
    dataset = TokenDataset(np.arange(tokens), context, pad_last=True)
    samples = [dataset[index] for index in range(len(dataset))]
    assert all(sample["x"].shape == sample["y"].shape == (context,) for sample in samples)
    targets = torch.cat([sample["y"] for sample in samples])
    inputs = torch.cat([sample["x"] for sample in samples])
    counted = targets != IGNORED
    assert targets[counted].tolist() == list(range(1, tokens))
    assert inputs[counted].tolist() == list(range(tokens - 1))
    assert len(targets) - int(counted.sum()) < context, "only the last window is filled up"


def test_one_token_predicts_nothing_and_is_refused():
    with pytest.raises(UserError, match="holds 1 tokens, too few"):
        TokenDataset(np.arange(1), 8, pad_last=True)
