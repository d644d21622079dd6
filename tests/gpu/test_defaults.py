"""The table of trainings at the defaults, on a GPU: the numbers of a plain loop on one, or refused by name."""

from __future__ import annotations

import pytest

from tests.parity.defaults.case import Case
from tests.parity.defaults.cases import CASES
from tests.parity.defaults.test_defaults import train_all
from tests.parity.defaults.truth import plain_losses
from tests.ranks import Job, RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.limit(400)]

NAMES = [
    *("dropout", "functional-dropout", "alpha-dropout", "rrelu-gumbel", "residual-dropout"),
    *("drop-path", "drop-path-by-floor", "drop-path-dropout", "vae", "vae-distributions", "diffusion", "flow-matching"),
    *("masked-inputs", "noise-of-the-step", "noise-of-a-width", "drop-connect", "time-first-dropout"),
    *("clip", "simclr", "vicreg", "moe-balance", "hardest-of-a-batch", "moe-balance-from-zero", "simclr-dropout"),
    *("batchnorm1d", "batchnorm-dropout", "resnet", "unet-batchnorm", "batchnorm-calls-between"),
    *("jittered-channels", "dropped-weights", "normalised-padding"),
]


def plain(_job: Job, names: list[str]) -> dict[str, list[float]]:
    return {name: plain_losses(CASES[name], device="cuda") for name in names}


@pytest.fixture(scope="module")
def truth(ranks: RankPool) -> dict[str, list[float]]:
    (losses,) = ranks.run(plain, 1, [name for name in NAMES if "single" not in CASES[name].refused], timeout=200)
    return losses


@pytest.mark.parametrize(("layout", "size"), [("single", 1), ("dp=2", 2), ("fsdp=2", 2), ("tp=2", 2), ("pp=2", 2)])
def test_a_plain_script_gives_the_numbers_of_one_gpu_or_is_refused(
    ranks: RankPool, truth: dict[str, list[float]], layout: str, size: int
) -> None:
    by_rank = ranks.run(train_all, size, layout, NAMES, device="cuda", share_gpu=size > 1, timeout=300)
    wrong = {}
    for name in NAMES:
        verdicts = {rank[name].verdict(truth[name]) for rank in by_rank}
        if not all(is_right(CASES[name], layout, verdict) for verdict in verdicts):
            wrong[name] = verdicts
    assert wrong == {}


def is_right(case: Case, layout: str, verdict: str) -> bool:
    wanted = case.refused.get(layout)
    if (
        layout == "pp=2" and "outside of any module" in verdict
    ):  # where a pipeline is cut follows the speed of the device
        return verdict.startswith("refused: ")
    return verdict == "works" if wanted is None else verdict.startswith("refused: ") and wanted in verdict
