"""A mesh axis that tensors are cut over."""

from __future__ import annotations

from typing import Any, NamedTuple


class Axis(NamedTuple):
    """A mesh axis that tensors are cut over, as one rank sees it. One of size 1 with an observer is for trying out."""

    name: str
    size: int
    rank: int
    group: Any = ""
    """The name of its process group."""
    zigzag: bool = False
    """Two chunks a rank, one from each end: under a causal mask all ranks then have the same work."""
    sequence: bool = False
    """Whether ranks that share matrices share the tokens between them, too."""
    observer: Any = None

    @property
    def chunks(self) -> int:
        """Into how many equal pieces a dim is divided."""
        return 2 * self.size if self.zigzag else self.size

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The pieces of one rank."""
        return (rank, self.chunks - 1 - rank) if self.zigzag else (rank,)
