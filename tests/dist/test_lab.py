"""The lab: every number it draws is the one on that rank, computed here in another way."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lockstep.errors import UserError
from lockstep.lab import draw_collective, draw_layout
from lockstep.lab.collectives import RankSaw, ShownCollective, cost_of, put_together, run_once
from lockstep.lab.layouts import (
    LEARNING_RATE,
    SAMPLES_AT_ONCE,
    HeldByRanks,
    HeldMatrix,
    Topic,
    loss_of,
    samples,
    take_part,
    tiny_model,
)
from lockstep.lab.wire import Transfer
from lockstep.launch.probe import Seat
from lockstep.links.collective_cost import ALGORITHMS, Algorithm, Collective, Link, check_algorithm, predict
from lockstep.runtime.rank_env import Place
from tests.ranks import Job, RankPool

SVG = "{http://www.w3.org/2000/svg}"
Buffers = list[list[NDArray[np.float64]]]
"""By rank and chunk."""


def possible(ranks: int) -> Iterator[tuple[Collective, Algorithm]]:
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            try:
                check_algorithm(collective, algorithm, ranks)
                yield collective, algorithm
            except UserError:
                assert algorithm == "halving-doubling"
                assert ranks & (ranks - 1)


def run_all(job: Job, sizes: list[int]) -> list[RankSaw]:
    job.init_process_group()
    return [
        run_once(collective, algorithm, job.rank, job.world_size, elements)
        for elements in sizes
        for collective, algorithm in possible(job.world_size)
    ]


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8], ids=lambda count: f"{count}-ranks")
def shown(request: pytest.FixtureRequest, ranks: RankPool) -> list[ShownCollective]:
    """Every algorithm on so many ranks: with one number a rank; on some also with an odd share, or with too few."""
    count: int = request.param
    sizes = {3: [3, 2, 7], 4: [4, 8, 9]}.get(count, [count])
    everybody = ranks.run(run_all, count, sizes)
    tried = [(elements, *one) for elements in sizes for one in possible(count)]
    return [
        put_together(collective, algorithm, elements, [seen[number] for seen in everybody])
        for number, (elements, collective, algorithm) in enumerate(tried)
    ]


def numbers_of(rank: int, elements: int) -> NDArray[np.float64]:
    return np.array([rank * 10 ** len(str(elements)) + number for number in range(1, elements + 1)], dtype=np.float64)


def expected(collective: Collective, ranks: int, elements: int) -> dict[tuple[int, int], NDArray[np.float64]]:
    """What a collective gives: by rank and chunk, where it gives anything."""
    given = [np.array_split(numbers_of(rank, elements), ranks) for rank in range(ranks)]
    total = np.array_split(np.sum([numbers_of(rank, elements) for rank in range(ranks)], axis=0), ranks)
    everywhere = [(rank, chunk) for rank in range(ranks) for chunk in range(ranks)]
    return {
        "broadcast": {(rank, chunk): given[0][chunk] for rank, chunk in everywhere},
        "reduce": {(0, chunk): total[chunk] for chunk in range(ranks)},
        "all-reduce": {(rank, chunk): total[chunk] for rank, chunk in everywhere},
        "all-gather": {(rank, chunk): given[chunk][chunk] for rank, chunk in everywhere},
        "reduce-scatter": {(rank, rank): total[rank] for rank in range(ranks)},
        "all-to-all": {(rank, chunk): given[chunk][rank] for rank, chunk in everywhere},
    }[str(collective)]


def replayed(one: ShownCollective) -> list[Buffers]:
    """What the ranks hold before and after every round, by doing to arrays what the messages say."""
    given: Buffers = [np.array_split(numbers_of(rank, one.elements), one.ranks) for rank in range(one.ranks)]
    nothing: Buffers = [[np.zeros(0)] * one.ranks for _ in range(one.ranks)]
    start: Buffers = [list(row) for row in given]
    if one.collective == "broadcast":
        start[1:] = nothing[1:]
    elif one.collective == "all-gather":
        start = [[given[r][c] if r == c else np.zeros(0) for c in range(one.ranks)] for r in range(one.ranks)]
    states = [start]
    if one.collective == "all-to-all":  # what is held is another buffer than what is given
        start = [[given[r][c] if r == c else np.zeros(0) for c in range(one.ranks)] for r in range(one.ranks)]
    for number in range(len(one.after)):
        now = [list(row) for row in start]
        for transfer in one.transfers:
            if transfer.round == number:
                for chunk in transfer.chunks:
                    sent = start[transfer.sender][chunk]
                    if one.collective == "all-to-all":
                        sent = given[transfer.sender][transfer.receiver]
                    held = start[transfer.receiver][chunk]
                    now[transfer.receiver][chunk] = held + sent if transfer.added else sent
        start = now
        states.append(now)
    return states


def test_every_algorithm_gives_what_the_collective_is_for_and_what_the_backend_gives(
    shown: list[ShownCollective],
) -> None:
    for one in shown:
        assert one.agrees
        last = one.after[-1] if one.after else one.before
        for (rank, chunk), numbers in expected(one.collective, one.ranks, one.elements).items():
            assert last[rank][chunk] == numbers.tolist(), (one.collective, one.algorithm, rank, chunk)


def seconds_by_rounds(transfers: list[Transfer], link: Link, bytes_per_element: int) -> float:
    """What the rounds cost over such links: each as long as its busiest rank sends, or receives."""
    total = 0.0
    for number in {transfer.round for transfer in transfers}:
        load: dict[tuple[str, int], float] = {}
        for transfer in transfers:
            if transfer.round == number:
                cost = link.seconds(transfer.elements * bytes_per_element)
                for end in (("sends", transfer.sender), ("receives", transfer.receiver)):
                    load[end] = load.get(end, 0.0) + cost
        total += max(load.values())
    return total


def test_the_rounds_cost_what_the_model_predicts(shown: list[ShownCollective]) -> None:
    link = Link(alpha=3e-3, beta=1e-3)
    for one in shown:
        predicted = predict(one.collective, one.algorithm, one.ranks, 4 * one.elements, link)
        counted = seconds_by_rounds(one.transfers, link, 4)
        if one.elements % one.ranks == 0:
            assert counted == pytest.approx(predicted), (one.collective, one.algorithm)
            assert cost_of(one).rounds == len({transfer.round for transfer in one.transfers})
        elif one.elements > one.ranks:  # chunks differ by one element
            assert counted == pytest.approx(predicted, rel=one.ranks / one.elements)


def test_every_number_in_the_svg_is_the_one_on_that_rank_and_every_arrow_a_message(
    shown: list[ShownCollective],
) -> None:
    for one in shown:
        states = replayed(one)
        groups = list(ET.fromstring(draw_collective.as_svg(one)).iter(f"{SVG}g"))
        cells = [group for group in groups if "data-chunk" in group.attrib]
        assert len(cells) == len(states) * one.ranks**2
        for cell in cells:
            round_, rank, chunk = (int(cell.attrib[f"data-{name}"]) for name in ("round", "rank", "chunk"))
            numbers = states[round_][rank][chunk].tolist()
            assert list(map(float, cell.attrib["data-values"].split())) == numbers, (one.collective, one.algorithm)
            texts = [text.text for text in cell.iter(f"{SVG}text") if text.text != "+"]
            assert texts == ([draw_collective.numbers(numbers)] if numbers else [])
        arrows = [
            tuple(int(group.attrib[f"data-{name}"]) for name in ("sent-in", "sender", "receiver"))
            for group in groups
            if "data-sender" in group.attrib
        ]
        assert arrows == [(transfer.round + 1, transfer.sender, transfer.receiver) for transfer in one.transfers]


def test_every_number_in_the_terminal_is_the_one_on_that_rank(shown: list[ShownCollective]) -> None:
    for one in shown:
        states = replayed(one)
        text = "\n".join(part.plain for part in draw_collective.in_terminal(one))
        rows = re.findall(r"^rank (\d+) +([\d·].*)$", text, re.MULTILINE)
        assert len(rows) == len(states) * one.ranks
        if one.elements != one.ranks:
            continue  # cells of several numbers
        for number, (rank, row) in enumerate(rows):
            numbers = states[number // one.ranks][int(rank)]
            cells = ["·" if not len(chunk) else f"{chunk[0]:g}" for chunk in numbers]
            assert row.split()[: one.ranks] == cells, (one.collective, one.algorithm)


def test_who_has_gone_into_a_sum_is_who_sent_it(shown: list[ShownCollective]) -> None:
    for one in shown:
        if one.collective == "all-reduce" and one.elements >= one.ranks:
            last = one.sources[-1] if one.sources else one.sources_before
            assert all(chunk == frozenset(range(one.ranks)) for rank in last for chunk in rank)
        if one.collective == "all-to-all" and one.elements >= one.ranks and one.sources:
            assert all(rank[chunk] == {chunk} for rank in one.sources[-1] for chunk in range(one.ranks))


# ---- Who holds what


def hold_all(job: Job) -> dict[Topic, tuple[list[HeldMatrix], float]]:
    place = Place(job.rank, job.world_size, job.rank, job.world_size, 0, 1, "store:1", "explicit")
    found: dict[Topic, tuple[list[HeldMatrix], float]] = {}
    topics: tuple[Topic, ...] = ("ddp", "fsdp", "tp")
    for topic in topics:
        folder = job.folder / topic
        folder.mkdir(exist_ok=True)

        def open_store(_: float, topic: Topic = topic) -> dist.Store:
            return dist.FileStore(str(job.folder / f"{topic}.store"), job.world_size)

        found[topic] = take_part(topic, Seat(place, folder, open_store, None))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=lambda count: f"{count}-ranks")
def held(request: pytest.FixtureRequest, ranks: RankPool) -> dict[Topic, HeldByRanks]:
    everybody: list[Any] = ranks.run(hold_all, request.param)
    return {
        topic: HeldByRanks(topic, request.param, [one[topic][0] for one in everybody], everybody[0][topic][1])
        for topic in everybody[0]
    }


def on_one_process(ranks: int) -> dict[str, torch.Tensor]:
    """One step of the same model on all samples, and the gradients of every rank's share alone."""
    model = tiny_model()
    batch = {key: torch.stack([one[key] for one in samples(ranks)]) for key in ("x", "t")}
    total = SAMPLES_AT_ONCE * ranks
    values: dict[str, torch.Tensor] = {"x": batch["x"]}
    for rank in range(ranks):
        share = {key: value[SAMPLES_AT_ONCE * rank :][:SAMPLES_AT_ONCE] for key, value in batch.items()}
        model.zero_grad()
        (loss_of(model, share)[0] / total).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            values[f"gradient of rank {rank}, {name}"] = parameter.grad.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer.zero_grad()
    loss = loss_of(model, batch)[0] / total
    loss.backward()  # type: ignore[no-untyped-call]
    values["loss"] = loss.detach()
    values["activations"] = (batch["x"] @ model.up.weight.detach().T).relu()  # type: ignore[operator, union-attr]
    values["outputs"] = model(batch["x"]).detach()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        values[f"before, {name}"], values[f"gradient, {name}"] = parameter.detach().clone(), parameter.grad.clone()
    optimizer.step()
    return values | {f"after, {name}": parameter.detach() for name, parameter in model.named_parameters()}


def whole_of(part: HeldMatrix, rank: int, topic: Topic, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole that a part is of, as one process has it."""
    if part.name == "x":
        return values["x"] if topic == "tp" else values["x"][SAMPLES_AT_ONCE * rank :][:SAMPLES_AT_ONCE]
    if part.name == "relu(up x)":
        return values["activations"]
    if part.moment == "own gradient":
        return values[f"gradient of rank {rank}, {part.name}.weight"]
    if part.name == "y":
        return values["outputs"]
    which = "gradient" if "gradient" in part.moment or "optimizer" in part.moment else "before"
    return values[f"{'after' if part.moment == 'weights after' else which}, {part.name}.weight"]


def test_what_each_rank_holds_is_its_part_of_what_one_process_has(held: dict[Topic, HeldByRanks]) -> None:
    for topic, one in held.items():
        values = on_one_process(1 if topic == "tp" else one.ranks)
        assert one.loss == pytest.approx(float(values["loss"]), rel=1e-6)
        for rank, parts in enumerate(one.parts):
            for part in parts:
                if part.moment == "its partial sums":
                    continue  # their sum is checked below
                whole = whole_of(part, rank, topic, values)
                assert part.shape == tuple(whole.shape)
                rows, columns = len(part.values), len(part.values[0]) if part.values else 0
                own = whole[part.at[0] : part.at[0] + rows, part.at[1] : part.at[1] + columns]
                assert np.allclose(part.values or np.zeros((0, 0)), own, rtol=1e-6, atol=1e-6), (topic, rank, part)


def test_the_parts_of_all_ranks_are_the_whole_and_each_number_is_kept_once(held: dict[Topic, HeldByRanks]) -> None:
    for topic in ("fsdp", "tp"):
        one = held[topic]
        for name in ("up", "down"):
            kept = [
                part for parts in one.parts for part in parts if (part.moment, part.name) == ("weights after", name)
            ]
            assert sum(len(row) for part in kept for row in part.values) == kept[0].shape[0] * kept[0].shape[1]


def test_partial_sums_add_up_to_what_the_all_reduce_gives(held: dict[Topic, HeldByRanks]) -> None:
    one = held["tp"]
    partial = [part.values for parts in one.parts for part in parts if part.moment == "its partial sums"]
    given = [part.values for parts in one.parts for part in parts if part.moment == "after the all-reduce"]
    assert len(partial) == len(given) == one.ranks
    assert all(np.array_equal(np.sum(partial, axis=0), result) for result in given)


def test_gradients_of_replicas_add_up_to_what_the_all_reduce_gives(held: dict[Topic, HeldByRanks]) -> None:
    one = held["ddp"]
    for name in ("up", "down"):
        own = [p.values for parts in one.parts for p in parts if (p.moment, p.name) == ("own gradient", name)]
        summed = [
            p.values
            for parts in one.parts
            for p in parts
            if (p.moment, p.name) == ("gradient after the all-reduce", name)
        ]
        assert len(own) == len(summed) == one.ranks
        assert all(np.allclose(np.sum(own, axis=0), result) for result in summed)


def test_every_drawn_number_of_a_layout_is_the_one_on_that_rank(held: dict[Topic, HeldByRanks]) -> None:
    for one in held.values():
        root = ET.fromstring(draw_layout.as_svg(one))
        drawn: dict[tuple[int, str, str], dict[tuple[int, int], float]] = {}
        for tensor in (group for group in root.iter(f"{SVG}g") if "data-tensor" in group.attrib):
            key = int(tensor.attrib["data-rank"]), tensor.attrib["data-moment"], tensor.attrib["data-tensor"]
            numbers = drawn.setdefault(key, {})
            for cell in (group for group in tensor.iter(f"{SVG}g") if "data-value" in group.attrib):
                value = float(cell.attrib["data-value"])
                numbers[int(cell.attrib["data-row"]), int(cell.attrib["data-column"])] = value
                (text,) = cell.iter(f"{SVG}text")
                assert float(str(text.text)) == pytest.approx(value, rel=1e-5, abs=1e-12)
        for rank, parts in enumerate(one.parts):
            for part in parts:
                assert drawn.pop((rank, part.moment, part.name)) == {
                    (part.at[0] + row, part.at[1] + column): value
                    for row, line in enumerate(part.values)
                    for column, value in enumerate(line)
                }
        assert not drawn


def test_every_number_of_a_layout_in_the_terminal_is_the_one_on_that_rank(held: dict[Topic, HeldByRanks]) -> None:
    for one in held.values():
        texts = [text.plain for text in draw_layout.in_terminal(one)]
        for moment in draw_layout.moments(one):
            table = texts[texts.index(moment) + 1]
            found = [float(word) for word in table.split() if re.fullmatch(r"-?[\d.]+(e-?\d+)?", word)]
            numbers = [v for parts in one.parts for p in parts if p.moment == moment for row in p.values for v in row]
            ranks = list(range(one.ranks))  # in the heads of the columns
            assert sorted(found) == pytest.approx(sorted([*numbers, *ranks]), rel=1e-5, abs=1e-12)
