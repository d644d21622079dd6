"""A layout is read from text, fitted to the number of processes, and places every rank; mistakes are one sentence."""

from __future__ import annotations

import itertools

import pytest

from lockstep.errors import UserError
from lockstep.layout import AXES, Layout

EVERY_AXIS = Layout(pp=2, dp=3, fsdp=2, cp=2, tp=4)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("single", Layout()),
        (" single ", Layout()),
        ("dp=1", Layout()),
        ("dp=2", Layout(dp=2)),
        ("fsdp=4", Layout(fsdp=4)),
        ("dp=2,fsdp=4", Layout(dp=2, fsdp=4)),
        ("fsdp=4,dp=2", Layout(dp=2, fsdp=4)),
        (" dp = 2 , fsdp = 4 ", Layout(dp=2, fsdp=4)),
        ("pp=2,dp=3,fsdp=2,cp=2,tp=4", EVERY_AXIS),
        ("dp=auto", Layout(auto="dp")),
        ("dp=2,fsdp=auto", Layout(dp=2, auto="fsdp")),
    ],
)
def test_text_is_read_in_any_order_and_missing_axes_are_1(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


@pytest.mark.parametrize("text", ["single", "dp=2", "dp=2,fsdp=4", "dp=auto", "dp=2,fsdp=auto", "pp=2,cp=2,tp=4"])
def test_a_layout_is_written_as_the_text_that_reads_as_it(text: str) -> None:
    assert str(Layout.parse(text)) == text
    assert Layout.parse(str(Layout.parse(text))) == Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot read '' in layout '': write axis=size, as in dp=2,fsdp=4"),
        ("dp", "cannot read 'dp' in layout 'dp': write axis=size, as in dp=2,fsdp=4"),
        ("dp=2,", "cannot read '' in layout 'dp=2,': write axis=size, as in dp=2,fsdp=4"),
        ("dp=2 fsdp=2", "dp=2 fsdp=2 in layout 'dp=2 fsdp=2' is not a size: sizes are whole numbers from 1, or auto"),
        ("single,dp=2", "cannot read 'single' in layout 'single,dp=2': write axis=size, as in dp=2,fsdp=4"),
        ("fdsp=2", "unknown axis in layout 'fdsp=2': 'fdsp': did you mean 'fsdp'?"),
        ("replicas=2", "unknown axis in layout 'replicas=2': 'replicas': choose one of pp, dp, fsdp, cp, tp"),
        ("dp=2,dp=3", "layout 'dp=2,dp=3' names dp twice: give dp one size"),
        ("dp=2,dp=auto", "layout 'dp=2,dp=auto' names dp twice: give dp one size"),
        ("dp=auto,dp=2", "layout 'dp=auto,dp=2' names dp twice: give dp one size"),
        (
            "dp=auto,fsdp=auto",
            "layout 'dp=auto,fsdp=auto' has two auto axes: only one axis can take what is left",
        ),
        *(
            (f"dp={size}", f"dp={size} in layout 'dp={size}' is not a size: sizes are whole numbers from 1, or auto")
            for size in ("0", "-2", "1.5", "two", "", "٢")
        ),
    ],
)
def test_text_that_is_no_layout_is_refused_with_what_would_be_right(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        Layout.parse(text)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("text", "world_size", "resolved"),
    [
        ("single", 1, Layout()),
        ("dp=2", 2, Layout(dp=2)),
        ("dp=2,fsdp=4", 8, Layout(dp=2, fsdp=4)),
        ("dp=auto", 1, Layout()),
        ("dp=auto", 6, Layout(dp=6)),
        ("fsdp=auto", 6, Layout(fsdp=6)),
        ("dp=2,fsdp=auto", 8, Layout(dp=2, fsdp=4)),
        ("dp=auto,fsdp=4", 4, Layout(fsdp=4)),
        ("pp=2,dp=auto", 6, Layout(pp=2, dp=3)),
        ("pp=auto", 4, Layout(pp=4)),
    ],
)
def test_auto_takes_what_is_left_of_the_processes(text: str, world_size: int, resolved: Layout) -> None:
    assert Layout.parse(text).resolve(world_size) == resolved


@pytest.mark.parametrize(
    ("text", "world_size", "sentence"),
    [
        (
            "dp=3",
            2,
            "layout dp=3 needs 3 processes but there are 2: use --nproc 3, or layout dp=2 or fsdp=2 or pp=2",
        ),
        ("dp=2", 1, "layout dp=2 needs 2 processes but there is 1: use --nproc 2, or layout single"),
        (
            "dp=2,fsdp=4",
            4,
            "layout dp=2,fsdp=4 needs 2 x 4 = 8 processes but there are 4: "
            "use --nproc 8, or layout dp=2,fsdp=2 or fsdp=4 or dp=4",
        ),
        (
            "dp=auto,fsdp=3",
            2,
            "layout dp=auto,fsdp=3 needs a multiple of 3 processes but there are 2: "
            "use --nproc 3 or a multiple of it, or layout fsdp=2 or dp=2 or pp=2",
        ),
        ("single", 2, "layout single needs 1 process but there are 2: use --nproc 1, or layout dp=2 or fsdp=2 or pp=2"),
        (
            "pp=4,dp=2",
            4,
            "layout pp=4,dp=2 needs 4 x 2 = 8 processes but there are 4: "
            "use --nproc 8, or layout pp=2,dp=2 or pp=4 or dp=4",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_the_arithmetic_and_layouts_that_do(
    text: str, world_size: int, sentence: str
) -> None:
    with pytest.raises(UserError) as refusal:
        Layout.parse(text).resolve(world_size)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    "text", ["dp=7", "fsdp=5", "dp=3,fsdp=7", "dp=auto,fsdp=13", "dp=1024", "pp=6,dp=5", "pp=3,dp=auto"]
)
def test_every_suggested_layout_fits(text: str) -> None:
    wanted = Layout.parse(text)
    for world_size in range(1, 65):
        if world_size == wanted.world_size or (wanted.auto and world_size % wanted.world_size == 0):
            continue
        with pytest.raises(UserError) as refusal:
            wanted.resolve(world_size)
        suggestions = refusal.value.fix.rpartition("or layout ")[2].split(" or ")
        assert 1 <= len(set(suggestions)) == len(suggestions) <= 3
        for suggestion in suggestions:
            Layout.parse(suggestion).resolve(world_size)


@pytest.mark.parametrize("text", ["pp=2,cp=2", "pp=2,cp=2,tp=2", "dp=2,pp=2,cp=auto"])
def test_a_pipeline_of_cut_sequences_is_refused_with_layouts_that_work(text: str) -> None:
    with pytest.raises(UserError, match="both cp and pp") as refusal:
        Layout.parse(text).resolve(8 if "auto" in text else Layout.parse(text).world_size)
    suggestions = refusal.value.fix.removeprefix("use layout ").split(" or ")
    assert len(suggestions) == 2
    for suggestion in suggestions:
        layout = Layout.parse(suggestion)
        assert layout.resolve(layout.world_size).world_size in (4, 8)


def test_a_layout_to_be_chosen_is_no_text_of_axes() -> None:
    with pytest.raises(UserError, match="layout auto is chosen by lockstep train"):
        Layout.parse("auto")


def test_ranks_along_axes_are_those_that_differ_only_there() -> None:
    layout = Layout(pp=2, fsdp=2, tp=2)
    assert layout.ranks_along("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.ranks_along("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.ranks_along("dp", "fsdp") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_every_axis_can_be_alone() -> None:
    for axis in AXES:
        assert Layout.parse(f"{axis}=2").resolve(2).size(axis) == 2


def test_neighbours_on_an_axis_are_the_closer_in_rank_the_more_the_axis_talks() -> None:
    distances = {}
    for axis in AXES:
        along = [
            rank
            for rank in range(EVERY_AXIS.world_size)
            if all(index == 0 for other, index in EVERY_AXIS.coordinate(rank).items() if other != axis)
        ]
        assert [EVERY_AXIS.coordinate(rank)[axis] for rank in along] == list(range(EVERY_AXIS.size(axis)))
        steps = {after - before for before, after in itertools.pairwise(along)}
        assert len(steps) == 1
        distances[axis] = steps.pop()
    assert distances == {"tp": 1, "cp": 4, "fsdp": 8, "dp": 16, "pp": 48}


def test_every_rank_has_a_coordinate_of_its_own() -> None:
    coordinates = [tuple(EVERY_AXIS.coordinate(rank).values()) for rank in range(EVERY_AXIS.world_size)]
    assert set(coordinates) == set(itertools.product(*(range(EVERY_AXIS.size(axis)) for axis in AXES)))


def test_ranks_that_differ_only_in_what_they_compute_of_a_sample_read_the_same_samples() -> None:
    readers: dict[int, set[tuple[int, int]]] = {}
    for rank in range(EVERY_AXIS.world_size):
        at = EVERY_AXIS.coordinate(rank)
        readers.setdefault(EVERY_AXIS.data_rank(rank), set()).add((at["dp"], at["fsdp"]))
    assert sorted(readers) == list(range(EVERY_AXIS.data_size))
    assert all(len(replicas_and_shards) == 1 for replicas_and_shards in readers.values())


@pytest.mark.parametrize("text", ["single", "dp=4", "fsdp=4", "dp=2,fsdp=2"])
def test_without_other_axes_the_data_rank_is_the_rank(text: str) -> None:
    layout = Layout.parse(text)
    assert [layout.data_rank(rank) for rank in range(layout.world_size)] == list(range(layout.data_size))


@pytest.mark.parametrize(
    ("text", "explanation"),
    [
        ("single", "one process, nothing is cut"),
        ("dp=4", "dp=4 replicas of the model"),
        ("pp=2,dp=2", "pp=2 pipeline stages; dp=2 replicas of the model"),
        (
            "dp=2,fsdp=4",
            "dp=2 replicas of the model; fsdp=4 shards of the parameters, gradients and optimizer state",
        ),
    ],
)
def test_a_layout_explains_itself_in_one_line(text: str, explanation: str) -> None:
    assert Layout.parse(text).explain() == explanation
