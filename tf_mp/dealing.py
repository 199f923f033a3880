"""The dealing of samples to ranks: which part of an order is whose. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Deal"]


@dataclass(frozen=True)
class Deal:
    """How the samples of one epoch go to the ranks.

    For training, global batch t is samples [t*G, (t+1)*G) of the epoch's order, with G =
    batch_size x size, and rank r has the r-th part of it. For evaluation each rank has one share
    of the order; shares differ by one sample at most.

    Attributes:
        count: samples in the epoch.
        batch_size: samples a rank and step.
        rank: number of this rank.
        size: number of ranks.
    """

    count: int
    batch_size: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"Received batch_size={self.batch_size}, rank={self.rank}, size={self.size}. "
                "Expected batch_size of 1 or more and 0 <= rank < size."
            )

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.batch_size * self.size

    def steps_per_epoch(self) -> int:
        """Global batches that one epoch fills.

        Raises:
            ValueError: the epoch is smaller than a global batch.
        """
        if self.count < self.global_batch:
            raise ValueError(
                f"Received a split of {self.count} samples and a global batch of "
                f"{self.global_batch} ({self.size} rank(s) x batch_size={self.batch_size}). "
                "Expected one global batch at least: pass a smaller batch_size, or start fewer "
                "ranks."
            )
        return self.count // self.global_batch

    def left_over(self, what: str, shuffled: bool = True) -> str:
        """Says what does not fill a global batch at an epoch's end; empty where all is used."""
        rest = self.count - self.steps_per_epoch() * self.global_batch
        if not rest:
            return ""
        which = "others each time: the order is drawn anew" if shuffled else "always the same"
        return (
            f"{what}: {self.count} samples fill {self.steps_per_epoch()} global batches of "
            f"{self.global_batch}; {rest} are left over at the end of each epoch ({which})."
        )

    def share(self) -> tuple[int, int]:
        """Start and length of this rank's share of the whole order."""
        least, ranks_with_more = divmod(self.count, self.size)
        start = self.rank * least + min(self.rank, ranks_with_more)
        return start, least + (self.rank < ranks_with_more)

    def sizes(self) -> list[tuple[int, int]]:
        """This rank's evaluation batches as (how many, of which size); as many on every rank.

        Where other ranks need one step more for their one sample more, the last full batch is
        given in two parts: a rank without a batch would be missing from the others' reductions,
        and an empty batch has no mean.

        Raises:
            ValueError: a rank would have to have an empty batch.
        """
        _, own = self.share()
        steps = -(-max(1, -(-self.count // self.size)) // self.batch_size)
        if own < steps:
            raise ValueError(
                f"Received {self.count} samples for {self.size} rank(s) in batches of "
                f"{self.batch_size}. Expected a sample for each rank in each of {steps} step(s): "
                "pass a larger batch_size or start fewer ranks."
            )
        full, rest = divmod(own, self.batch_size)
        if full + bool(rest) == steps:
            groups = [(full, self.batch_size), (1, rest)]
        else:
            groups = [(full - 1, self.batch_size), (1, self.batch_size - 1), (1, 1)]
        return [(number, size) for number, size in groups if number and size]
