"""What one rank asks for between two steps: all ranks do it once, after the same step."""

from __future__ import annotations

from lockstep.faults.requests import KINDS, Requests


def agree_together(ranks: list[Requests]) -> list[frozenset[str]]:
    """The end of a step: everybody's flags are added up, and everybody takes the sums."""
    sums = [sum(votes) for votes in zip(*(rank.votes() for rank in ranks), strict=True)]
    for rank in ranks:
        rank.agree(sums)
    return [rank.agreed for rank in ranks]


def test_one_vote_is_enough_and_every_rank_hears_of_it() -> None:
    ranks = [Requests() for _ in range(4)]
    ranks[2].ask("save")
    assert agree_together(ranks) == [frozenset({"save"})] * 4


def test_what_was_done_is_not_done_again_after_the_next_step() -> None:
    ranks = [Requests() for _ in range(2)]
    ranks[0].ask("save")
    ranks[1].ask("save")
    agree_together(ranks)
    assert agree_together(ranks) == [frozenset()] * 2


def test_what_is_asked_for_while_others_agree_waits_for_the_next_step() -> None:
    ranks = [Requests() for _ in range(2)]
    ranks[0].ask("save")
    sums = [sum(votes) for votes in zip(*(rank.votes() for rank in ranks), strict=True)]
    ranks[1].ask("validate")
    for rank in ranks:
        rank.agree(sums)
    assert ranks[1].agreed == {"save"}
    assert agree_together(ranks) == [frozenset({"validate"})] * 2


def test_agreeing_on_some_kinds_leaves_the_others_as_they_were() -> None:
    one = Requests()
    one.ask("terminate")
    one.agree(one.votes())
    one.ask("save")
    one.agree(one.votes(("save",)), ("save",))
    assert one.agreed == {"terminate", "save"}


def test_the_first_reason_that_a_rank_gave_is_the_one_it_tells() -> None:
    one = Requests()
    one.ask("terminate", "its time is over")
    one.ask("terminate", "somebody wants it to stop")
    assert one.why == {"terminate": "its time is over"}
    assert one.votes(("terminate",)) == [1.0]
    assert sum(one.votes(KINDS)) == 1.0
