"""The cluster that the tests in this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, cluster, why_no_slurm

NODES = 4


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A real Slurm with four nodes of four CPUs each; a test that takes a node down boots it again."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(f"needs a Slurm: {reason}")
    with cluster(NODES) as running:
        yield running
