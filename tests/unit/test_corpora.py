"""The embedded corpora and token files: exact splits, every token predicted once, bad files refused."""

import math
import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.data.corpora import (
    PairDataset,
    TextSplits,
    TokenDataset,
    bigram_loss,
    digits,
    state_of_the_union,
    write_tokens,
)
from lockstep.errors import UserError


@pytest.fixture(scope="module")
def speeches() -> TextSplits:
    return state_of_the_union()


def years(text: np.ndarray) -> list[int]:
    return [int(year) for year in re.findall(rb"^= (\d{4}) ", text.tobytes(), re.MULTILINE)]


class TestStateOfTheUnion:
    def test_the_parts_have_their_exact_sizes_and_add_up_to_the_whole_text(self, speeches):
        sizes = [len(part) for part in (speeches.train, speeches.validation, speeches.test)]
        assert sizes == [9_876_691, 409_828, 481_638]
        assert sum(sizes) == 10_768_157

    def test_a_speech_is_in_one_part_only_chosen_by_its_year(self, speeches):
        assert {year % 20 for year in years(speeches.validation)} == {3}
        assert {year % 20 for year in years(speeches.test)} == {13}
        assert not {3, 13} & {year % 20 for year in years(speeches.train)}
        counts = [len(years(part)) for part in (speeches.train, speeches.validation, speeches.test)]
        assert sum(counts) == 233

    def test_every_part_begins_with_a_heading(self, speeches):
        for part in (speeches.train, speeches.validation, speeches.test):
            assert part.dtype == np.uint8
            assert part[:2].tobytes() == b"= "


class TestTokenDataset:
    @pytest.mark.parametrize(("tokens", "context"), [(101, 10), (100, 10), (11, 10), (2, 1), (57, 4)])
    def test_every_token_but_the_first_is_predicted_exactly_once(self, tokens, context):
        dataset = TokenDataset(np.arange(tokens, dtype=np.uint16), context)
        assert len(dataset) == (tokens - 1) // context
        predicted = torch.cat([dataset[index]["y"] for index in range(len(dataset))])
        assert predicted.tolist() == list(range(1, len(dataset) * context + 1))

    def test_a_target_is_the_token_after_its_input(self):
        sample = TokenDataset(np.array([5, 6, 7, 8, 9], np.uint8), 2)[1]
        assert sample["x"].tolist() == [7, 8]
        assert sample["y"].tolist() == [8, 9]
        assert sample["x"].dtype == sample["y"].dtype == torch.int64

    def test_an_index_past_the_end_is_an_error_and_iteration_ends(self):
        dataset = TokenDataset(np.arange(9), 4)
        assert len(list(dataset)) == 2  # type: ignore[call-overload]
        with pytest.raises(IndexError):
            dataset[2]

    def test_a_written_file_reads_back_in_the_smallest_type(self, tmp_path: Path):
        write_tokens(tmp_path / "tokens.npy", [1, 50_000, 3, 4, 5])
        dataset = TokenDataset.from_file(tmp_path / "tokens.npy", 2)
        assert dataset.tokens.dtype == np.uint16
        assert dataset[0]["x"].tolist() == [1, 50_000]
        assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]

    def test_writing_replaces_the_whole_file_and_leaves_its_open_maps_alone(self, tmp_path: Path):
        write_tokens(tmp_path / "tokens.npy", np.arange(100))
        old = TokenDataset.from_file(tmp_path / "tokens.npy", 9)
        write_tokens(tmp_path / "tokens.npy", np.arange(100)[::-1])
        assert old[0]["x"].tolist() == list(range(9))
        assert TokenDataset.from_file(tmp_path / "tokens.npy", 9)[0]["x"][0] == 99

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path: Path):
        write_tokens(tmp_path / "tokens.npy", [1, 2, 3])
        with pytest.raises(UserError, match="none below zero"):
            write_tokens(tmp_path / "tokens.npy", [1, -2])
        assert TokenDataset.from_file(tmp_path / "tokens.npy", 2)[0]["y"].tolist() == [2, 3]

    @pytest.mark.parametrize("tokens", [[], [[1, 2]], [0.5, 1.0], [-1, 2]])
    def test_what_is_no_token_sequence_is_not_written(self, tmp_path: Path, tokens):
        with pytest.raises(UserError, match="flat, non-empty sequence of integers"):
            write_tokens(tmp_path / "tokens.npy", tokens)
        assert not list(tmp_path.iterdir())

    def test_a_raw_file_is_read_by_its_dtype_and_cut_by_start_and_stop(self, tmp_path: Path):
        path = tmp_path / "tokens.bin"
        np.arange(50, dtype=np.uint16).tofile(path)
        assert TokenDataset.from_file(path, 7, "uint16")[6]["y"].tolist() == list(range(43, 50))
        assert TokenDataset.from_file(path, 4, "uint16", start=10, stop=20).tokens.tolist() == list(range(10, 20))

    def test_a_mapped_file_is_pickled_by_name_and_not_copied(self, tmp_path: Path):
        write_tokens(tmp_path / "tokens.npy", np.arange(100_000) % 251)
        dataset = TokenDataset.from_file(tmp_path / "tokens.npy", 64, start=100)
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 1000
        again = pickle.loads(pickled)
        assert isinstance(again.tokens, np.memmap)
        assert again[5]["x"].equal(dataset[5]["x"])
        assert len(again) == len(dataset)

    def test_a_relative_path_still_holds_in_a_worker_with_another_working_directory(self, tmp_path: Path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_tokens("tokens.npy", np.arange(20))
        pickled = pickle.dumps(TokenDataset.from_file("tokens.npy", 4))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert pickle.loads(pickled)[0]["x"].tolist() == [0, 1, 2, 3]

    def test_a_loader_with_spawned_workers_reads_a_mapped_file(self, tmp_path: Path):
        write_tokens(tmp_path / "tokens.npy", np.arange(33))
        dataset = TokenDataset.from_file(tmp_path / "tokens.npy", 4)
        loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn")
        assert torch.cat([batch["y"].flatten() for batch in loader]).tolist() == list(range(1, 33))

    @pytest.mark.parametrize(
        ("content", "dtype", "complaint"),
        [
            (None, "uint8", "cannot be read"),
            (b"", "uint8", "is empty"),
            (b"short", "uint8", "holds 5 tokens, too few for one sample of context 8"),
            (b"raw bytes, but of what type?", None, "pass dtype"),
            (b"an odd number of bytes.", "uint16", "no whole number of uint16 tokens"),
            (b"\x93NUMPY\x01\x00cut off", None, "no sound .npy file"),
            (b"0123456789abcdef" * 4, "float64", "not token ids"),
        ],
    )
    def test_a_bad_file_is_refused_by_name(self, tmp_path: Path, content, dtype, complaint):
        path = tmp_path / "tokens.bin"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(complaint)) as refusal:
            TokenDataset.from_file(path, 8, dtype)
        assert str(path) in refusal.value.cause

    @pytest.mark.parametrize(
        ("array", "dtype", "complaint"),
        [
            (np.arange(20), "uint16", "not uint16"),
            (np.zeros((5, 5), np.uint8), None, "not token ids"),
            (np.zeros(20), None, "not token ids"),
            (np.array([{}] * 20), None, "no sound .npy file"),
        ],
    )
    def test_an_npy_file_of_something_else_is_refused(self, tmp_path: Path, array, dtype, complaint):
        np.save(tmp_path / "tokens.npy", array)
        with pytest.raises(UserError, match=complaint):
            TokenDataset.from_file(tmp_path / "tokens.npy", 4, dtype)

    def test_a_directory_and_an_empty_context_are_refused(self, tmp_path: Path):
        with pytest.raises(UserError, match="cannot be read"):
            TokenDataset.from_file(tmp_path, 8, "uint8")
        with pytest.raises(UserError, match="context of 0"):
            TokenDataset(np.arange(9), 0)


class TestDigits:
    def test_the_parts_have_their_exact_sizes_and_are_disjoint_by_row(self):
        splits = digits()
        assert (len(splits.train), len(splits.validation)) == (1438, 359)
        assert Counter(splits.validation.y.tolist()).keys() == set(range(10))

    def test_a_sample_is_64_pixels_between_zero_and_one_and_a_label(self):
        splits = digits()
        sample = splits.train[0]
        assert sample["x"].shape == (64,)
        assert sample["x"].dtype == torch.float32
        assert sample["y"].dtype == torch.int64
        assert splits.train.x.min() == 0
        assert splits.train.x.max() == 1

    def test_inputs_and_targets_have_to_pair_up(self):
        with pytest.raises(UserError, match="do not pair up"):
            PairDataset(torch.zeros(3, 2), torch.zeros(4))


class TestBigramLoss:
    def test_it_equals_a_count_by_hand(self):
        train, validation = np.array([0, 1, 0, 1, 2, 0, 0]), np.array([1, 0, 2, 2, 1])
        pairs = Counter(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
        firsts = Counter(train[:-1].tolist())
        nats = [
            -math.log((pairs[a, b] + 1) / (firsts[a] + 3))
            for a, b in zip(validation[:-1].tolist(), validation[1:].tolist(), strict=True)
        ]
        assert bigram_loss(train, validation, vocabulary=3) == pytest.approx(sum(nats) / len(nats), rel=1e-12)

    def test_a_text_counted_in_pieces_is_counted_whole(self, speeches):
        pairs = np.stack([speeches.train[:-1], speeches.train[1:]], axis=1).astype(np.int64)
        counts = np.ones((256, 256))
        np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
        log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
        expected = -log_probabilities[speeches.validation[:-1], speeches.validation[1:]].mean()
        assert bigram_loss(speeches.train, speeches.validation) == pytest.approx(expected, rel=1e-12)
        assert expected == pytest.approx(2.370, abs=0.001)

    def test_without_training_text_every_token_is_a_uniform_guess(self):
        assert bigram_loss(np.array([0]), np.array([1, 2, 3])) == pytest.approx(math.log(256))
