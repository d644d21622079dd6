"""What is said of ranks that wait for each other, for every class of cause, with two ranks and with many."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.faults.hangs import (
    AFTER_THE_LOOP,
    FOR_EVERY_RANK,
    RankReport,
    Verdict,
    explain,
    mismatched,
    parted_ways,
    ranks,
)
from lockstep.faults.watchdog import Watchdog
from lockstep.runtime.heartbeat import Beat

LEAD = "no progress for 6 s: "
STEP = ("engine.step", "train.py:20 in <module>")
REDUCE = ("dist.all_reduce", "train.py:31 in <module>")
SAVE = ("run.save", "train.py:25 in <module>")
CLOSED = ("run.close", "train.py:40 in <module>")


def waiting(rank: int, place: tuple[str, str], shapes: list[str] | None = None) -> RankReport:
    call, where = place
    return RankReport(
        rank,
        f"node{rank // 4}",
        100 + rank,
        "summing gradients",
        25,
        True,
        False,
        call,
        where,
        ["float32 [4]"] if shapes is None else shapes,
    )


def busy(rank: int, where: str = "train.py:33 in augment", step: int = 25, phase: str = "reading data") -> RankReport:
    return RankReport(rank, f"node{rank // 4}", 100 + rank, phase, step, False, False, "", where)


def all_but(odd: dict[int, RankReport], count: int, place: tuple[str, str] = STEP) -> list[RankReport]:
    return [odd.get(rank) or waiting(rank, place) for rank in range(count)]


def told(verdict: Verdict, *words: str) -> None:
    assert verdict.sentence.startswith(LEAD)
    assert "\n" not in verdict.sentence
    for word in words:
        assert word in verdict.sentence


COUNTS = pytest.mark.parametrize("count", [2, 4, 5, 64])


@COUNTS
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_passes_a_collective_by_is_named(count: int, odd: int) -> None:
    verdict = explain(all_but({odd: waiting(odd, STEP)}, count, REDUCE), LEAD)
    assert verdict.cause == "skipped collective"
    assert verdict.where == REDUCE[1]
    told(verdict, f"rank {odd} ", REDUCE[0], REDUCE[1], "passed it by", STEP[1])
    if count > 2:
        assert (verdict.rank, verdict.host) == (odd, "node0")


@pytest.mark.parametrize("count", [4, 5, 64])
def test_a_collective_that_only_one_rank_makes_is_that_ranks(count: int) -> None:
    verdict = explain(all_but({3: waiting(3, REDUCE)}, count), LEAD)
    assert (verdict.cause, verdict.rank, verdict.where) == ("skipped collective", 3, REDUCE[1])
    told(verdict, "rank 3 waits in dist.all_reduce", "do not call it", "same order")


def test_ranks_in_two_steps_of_one_loop_are_told_by_their_lines() -> None:
    other = ("engine.step", "train.py:22 in <module>")
    verdict = explain(all_but({2: waiting(2, other)}, 4), LEAD)
    assert (verdict.cause, verdict.rank) == ("skipped collective", 2)
    told(verdict, "ranks 0-1, 3 wait in engine.step at train.py:20", "rank 2 waits in engine.step at train.py:22")


def test_two_collectives_of_the_users_own_at_different_lines() -> None:
    other = ("dist.broadcast", "train.py:50 in <module>")
    verdict = explain(all_but({1: waiting(1, other)}, 4, REDUCE), LEAD)
    assert (verdict.cause, verdict.rank) == ("skipped collective", 1)
    told(verdict, "dist.broadcast at train.py:50", "dist.all_reduce at train.py:31")


@COUNTS
@pytest.mark.parametrize("method", FOR_EVERY_RANK)
def test_a_call_for_every_rank_behind_a_condition(count: int, method: str) -> None:
    place = (f"run.{method}", SAVE[1])
    verdict = explain(all_but({0: waiting(0, place)}, count), LEAD)
    assert (verdict.cause, verdict.rank, verdict.where) == ("rank-conditional call", 0, SAVE[1])
    told(verdict, f"every rank has to call run.{method}", "rank 0 waits in", "out of the condition")


def test_the_one_rank_that_does_not_save_is_the_odd_one() -> None:
    verdict = explain(all_but({2: waiting(2, STEP)}, 4, SAVE), LEAD)
    assert (verdict.cause, verdict.rank, verdict.where) == ("rank-conditional call", 2, SAVE[1])


@COUNTS
def test_different_shapes_are_told_with_their_ranks(count: int) -> None:
    reports = [waiting(rank, REDUCE, [f"float32 [{7 if rank == 1 else 3}]"]) for rank in range(count)]
    verdict = explain(reports, LEAD)
    assert (verdict.cause, verdict.where) == ("different shapes", REDUCE[1])
    told(verdict, "rank 1 gave float32 [7]", "gave float32 [3]", "pad or gather sizes first")
    if count > 2:
        assert verdict.rank == 1


def test_of_all_that_a_collective_was_given_what_differs_is_told() -> None:
    given = [["float32 [3]"], ["float32 [3]", "float32 [4]"], ["float32 [3]"]]
    verdict = explain([waiting(rank, REDUCE, shapes) for rank, shapes in enumerate(given)], LEAD)
    assert (verdict.cause, verdict.rank) == ("different shapes", 1)
    told(verdict, "ranks 0, 2 gave float32 [3], rank 1 gave float32 [3] and float32 [4]")


def aborted(rank: int, place: tuple[str, str]) -> RankReport:
    """A rank whose backend has ended it, because of what others gave; what itself gave is not known."""
    return waiting(rank, place, [])


def test_a_size_that_a_backend_did_not_expect_blames_nobody_of_two_ranks() -> None:
    verdict = mismatched([aborted(0, REDUCE)], [waiting(1, REDUCE, ["float32 [7]"])])
    assert (verdict.cause, verdict.where) == ("different shapes", REDUCE[1])
    assert verdict.sentence.startswith(
        "dist.all_reduce at train.py:31 in <module> got different shapes or dtypes: rank 1 gave float32 [7], "
        "rank 0 gave something else; give it the same on every rank"
    )


def test_the_rank_that_was_ended_is_not_the_odd_one_where_others_differ() -> None:
    others = [waiting(rank, REDUCE, ["int64 [7]" if rank == 1 else "int64 [3]"]) for rank in (0, 1, 3)]
    verdict = mismatched([aborted(2, REDUCE)], others)
    assert (verdict.cause, verdict.rank) == ("different shapes", 1)
    assert "ranks 0, 3 gave int64 [3], rank 1 gave int64 [7];" in verdict.sentence


def test_who_came_through_a_collective_did_not_pass_it_by() -> None:
    verdict = mismatched([aborted(0, REDUCE)], [waiting(1, STEP, ["float32 [64]"])])
    assert (verdict.cause, verdict.where) == ("different shapes", REDUCE[1])
    assert "rank 0 got more than expected, rank 1 came through it, to engine.step at train.py:20" in verdict.sentence
    assert "pad or gather sizes first" in verdict.sentence


@pytest.mark.parametrize(("first", "second"), [(SAVE, STEP), (STEP, SAVE), (REDUCE, ("dist.broadcast", STEP[1]))])
def test_sizes_of_different_calls_are_told_by_the_calls(first: tuple[str, str], second: tuple[str, str]) -> None:
    verdict = mismatched([aborted(0, first)], [waiting(1, second)])
    assert verdict.cause == ("rank-conditional call" if SAVE in (first, second) else "skipped collective")
    for call, where in (first, second):
        assert f"{call} at {where}" in verdict.sentence


def test_sharded_blocks_of_different_sizes_need_the_same_blocks() -> None:
    verdict = mismatched([aborted(0, STEP)], [waiting(1, STEP)])
    assert verdict.cause == "different shapes"
    assert "let every rank call the same blocks" in verdict.sentence


LOADER = ("run.loader", "train.py:18 in <module>")
IN_LOSS = ["/site-packages/lockstep/engine.py:788 in _summed_loss"]


@pytest.mark.parametrize("other", [STEP, LOADER])
def test_a_collective_in_the_loss_of_a_pipeline_is_not_passed_by(other: tuple[str, str]) -> None:
    stack = [*IN_LOSS, "/site-packages/lockstep/parallel/pipeline/runner.py:94 in step"]
    verdict = explain([replace(waiting(0, REDUCE), stack=stack), waiting(1, other)], LEAD)
    assert verdict.cause == "skipped collective"
    told(verdict, "rank 1 cannot come to it", "make it between steps", "one after another")


def test_a_collective_in_the_loss_that_some_rank_skips_is_no_condition_around_the_loader() -> None:
    verdict = explain([replace(waiting(0, REDUCE), stack=IN_LOSS), waiting(1, LOADER)], LEAD)
    assert (verdict.cause, verdict.where) == ("skipped collective", REDUCE[1])
    told(verdict, "rank 1 passed it by", "same order")


@COUNTS
def test_a_rank_that_takes_long_is_told_with_what_it_does(count: int) -> None:
    verdict = explain(all_but({1: busy(1)}, count), LEAD)
    assert (verdict.cause, verdict.rank, verdict.where) == ("slow rank", 1, "train.py:33 in augment")
    told(verdict, "rank 1 is still at train.py:33 in augment, reading data of step 25", "run.once", "timeout_minutes")


def test_of_several_slow_ranks_the_furthest_behind_is_to_blame() -> None:
    verdict = explain(all_but({1: busy(1, step=26), 3: busy(3, step=25), 5: busy(5, step=25)}, 8), LEAD)
    assert (verdict.cause, verdict.rank, verdict.host) == ("slow rank", 3, "node0")
    told(verdict, "ranks 1, 3, 5 are still at", "ranks 0, 2, 4, 6-7 wait in engine.step")


def test_a_slow_rank_outside_the_users_code_is_told_by_its_phase() -> None:
    verdict = explain(all_but({0: busy(0, where="")}, 2), LEAD)
    assert (verdict.cause, verdict.where) == ("slow rank", "")
    told(verdict, "rank 0 is still at reading data of step 25")


def test_when_nobody_waits_that_is_said() -> None:
    told(explain([busy(0), busy(1)], LEAD), "nobody waits")


@COUNTS
@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_does_not_answer(count: int, silent: int) -> None:
    reports = [waiting(rank, STEP) for rank in range(count) if rank != silent]
    verdict = explain(reports, LEAD, [silent], {silent: ["node7", 4711]})
    assert (verdict.cause, verdict.rank, verdict.host) == ("dead rank", silent, "node7")
    told(verdict, f"rank {silent} on node7 does not answer (pid 4711 there)", "dead, stopped or cut off", STEP[1])


def test_several_silent_ranks_and_none_known() -> None:
    verdict = explain([waiting(0, STEP)], LEAD, [4, 5, 6, 7])
    assert (verdict.cause, verdict.rank, verdict.host) == ("dead rank", 4, "an unknown host")
    told(verdict, "ranks 4-7 on an unknown host do not answer", "rank 0 waits in engine.step")


def test_silence_explains_more_than_a_busy_rank_or_a_call_of_rank_0() -> None:
    reports = [waiting(0, SAVE), busy(1), waiting(2, STEP)]
    assert explain(reports, LEAD, [3]).cause == "dead rank"


@COUNTS
@pytest.mark.parametrize("method", AFTER_THE_LOOP)
def test_a_rank_that_left_the_loop(count: int, method: str) -> None:
    verdict = explain(all_but({1: waiting(1, (f"run.{method}", CLOSED[1]))}, count), LEAD)
    assert (verdict.cause, verdict.rank, verdict.where) == ("uneven data", 1, CLOSED[1])
    told(verdict, "rank 1 has left the training loop", "different data", "same number of steps")


def test_a_rank_whose_script_is_over_has_no_line_any_more() -> None:
    verdict = explain(all_but({2: waiting(2, ("", ""))}, 4), LEAD)
    assert (verdict.cause, verdict.rank, verdict.where) == ("uneven data", 2, STEP[1])


def test_all_ranks_at_the_same_call_blame_the_network() -> None:
    verdict = explain(all_but({}, 8), LEAD)
    assert verdict.cause == "network"
    told(verdict, "all 8 ranks wait in engine.step at train.py:20", "firewalls")


@pytest.mark.parametrize("place", [STEP, SAVE, CLOSED])
def test_what_all_ranks_do_is_no_difference_between_them(place: tuple[str, str]) -> None:
    assert explain(all_but({}, 4, place), LEAD).cause == "network"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0-1"),
        ([5, 0, 2, 1], "ranks 0-2, 5"),
        ([1, 3, 5], "ranks 1, 3, 5"),
        (list(range(512)), "ranks 0-511"),
    ],
)
def test_rank_numbers_for_people(numbers: list[int], text: str) -> None:
    assert ranks(numbers) == text


def test_ranks_that_called_different_sharded_blocks_are_told_so_at_once() -> None:
    here = [replace(waiting(rank, STEP), gathered=["the model", "blocks.0", "blocks.1"]) for rank in range(2)]
    assert parted_ways(here) is None
    ahead = replace(here[1], gathered=[*here[1].gathered, "blocks.2"])
    assert parted_ways([here[0], ahead]) is None
    done = replace(here[0], gathered=[*here[0].gathered, "the end of the forward"])
    found = parted_ways([done, ahead])
    assert found is not None
    assert "rank 0 came to the end of the forward where rank 1 came to blocks.2, in step 25" in found.sentence


def test_a_round_in_which_nothing_was_found_leaves_no_report_behind(tmp_path: Path) -> None:
    store = dist.HashStore()
    comm: Any = SimpleNamespace(rank=1, world_size=2, beat=Beat(), own_store=lambda _: store)
    watchdog = Watchdog(comm, 0.1, tmp_path, {})
    asked = dist.PrefixStore("0", store)
    asked.set("alarm", "1")
    asked.set("verdict", "null")
    assert watchdog._one_round(asked, store)
    assert not asked.check(["report/1"])


def test_a_rank_that_has_just_done_something_long_is_not_taken_for_stuck(tmp_path: Path) -> None:
    comm: Any = SimpleNamespace(rank=0, world_size=2, beat=Beat(), own_store=lambda _: None)
    watchdog = Watchdog(comm, 60, tmp_path, {})
    watchdog._moved -= 100
    assert not watchdog._report().moving
    with comm.beat.busy():
        assert watchdog._report().moving
        watchdog._moved -= 100
    assert watchdog._report().moving
    watchdog._moved -= 100
    assert not watchdog._report().moving


def test_an_alarm_is_false_when_what_the_rank_waited_for_has_come_before_all_have_answered(tmp_path: Path) -> None:
    store = dist.HashStore()
    comm: Any = SimpleNamespace(rank=1, world_size=2, beat=Beat(), own_store=lambda _: store)
    watchdog = Watchdog(comm, 60, tmp_path, {})
    watchdog._moved -= 100
    asked = dist.PrefixStore("0", store)
    asked.set("report/0", json.dumps(asdict(waiting(0, STEP))))
    watchdog._ask_everybody(asked, store)  # this test waits for nobody; an alarm that were true would end its process
    assert asked.get("verdict") == b"null"


def test_the_blocks_of_a_step_or_of_scored_samples_are_forgotten_when_the_next_begin() -> None:
    beat = Beat()
    beat.gathered.append("blocks.0")
    beat.at("summing gradients")
    assert beat.gathered == ["blocks.0"]
    beat.step = 2
    assert beat.gathered == []
    for _ in range(3):
        beat.at("scoring")
        beat.gathered.append("blocks.0")
    assert beat.gathered == ["blocks.0"]
