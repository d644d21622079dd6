"""What is said of ranks that wait for each other, for every class of cause, with two ranks and with many."""

from __future__ import annotations

import pytest

from lockstep.faults.hangs import AFTER_THE_LOOP, FOR_EVERY_RANK, Report, Verdict, explain, ranks

LEAD = "no progress for 6 s: "
STEP = ("engine.step", "train.py:20 in <module>")
REDUCE = ("dist.all_reduce", "train.py:31 in <module>")
SAVE = ("run.save", "train.py:25 in <module>")
CLOSED = ("run.close", "train.py:40 in <module>")


def waiting(rank: int, place: tuple[str, str], shapes: list[list[int]] | None = None) -> Report:
    call, where = place
    return Report(
        rank, f"node{rank // 4}", 100 + rank, "summing gradients", 25, True, False, call, where, shapes or [[4]]
    )


def busy(rank: int, where: str = "train.py:33 in augment", step: int = 25, phase: str = "reading data") -> Report:
    return Report(rank, f"node{rank // 4}", 100 + rank, phase, step, False, False, "", where)


def all_but(odd: dict[int, Report], count: int, place: tuple[str, str] = STEP) -> list[Report]:
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
    reports = [waiting(rank, REDUCE, [[7] if rank == 1 else [3]]) for rank in range(count)]
    verdict = explain(reports, LEAD)
    assert (verdict.cause, verdict.where) == ("different shapes", REDUCE[1])
    told(verdict, "rank 1 gave [7]", "gave [3]", "pad or gather sizes first")
    if count > 2:
        assert verdict.rank == 1


def test_shapes_that_a_backend_found_not_to_go_together_need_no_shapes_in_the_reports() -> None:
    verdict = explain(all_but({}, 4, REDUCE), LEAD, mismatch=True)
    assert verdict.cause == "different shapes"
    told(verdict, "got different shapes from ranks 0-3")


def test_a_mismatch_of_ranks_in_different_calls_is_a_skipped_collective() -> None:
    verdict = explain(all_but({0: waiting(0, STEP)}, 2, REDUCE), LEAD, mismatch=True)
    assert verdict.cause == "skipped collective"


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
