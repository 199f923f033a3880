"""The dealing of samples to ranks: which part of an order is whose. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from tf_mp import microbatch

__all__ = ["Deal", "Share"]


@dataclass(frozen=True)
class Share:
    """What one rank has of every global batch: some of its micro-batches, one after the other.

    The global batch is cut into micro-batches first, and these are dealt to the ranks there are,
    in unequal shares where they do not divide. So the micro-batches, and what is drawn in them,
    are the same for every number of ranks.

    Attributes:
        global_batch: samples of all ranks in one step.
        start: index of this rank's first sample in the global batch.
        stop: index after its last one.
        micro_batches: number of its micro-batches.
        first_micro_batch: index of its first one among those of all ranks.

    >>> [(s.start, s.stop, s.micro_batches) for s in (Share.of(24, 8, r, 3) for r in range(3))]
    [(0, 9, 3), (9, 18, 3), (18, 24, 2)]
    """

    global_batch: int
    start: int
    stop: int
    micro_batches: int
    first_micro_batch: int

    @classmethod
    def of(cls, global_batch: int, micro_batches: int, rank: int, size: int) -> Share:
        """The share of one rank.

        Args:
            global_batch: samples of all ranks in one step.
            micro_batches: micro-batches of all ranks; with fewer samples there are fewer.
            rank: number of the rank.
            size: number of ranks.

        Raises:
            ValueError: fewer micro-batches than ranks.
        """
        sizes = microbatch.sizes(global_batch, micro_batches)
        own = microbatch.deal(len(sizes), size, rank)
        start = sum(sizes[: own.start])
        stop = start + sum(sizes[own.start : own.stop])
        return cls(global_batch, start, stop, len(own), own.start)

    @property
    def num_samples(self) -> int:
        """Samples of this rank in one step."""
        return self.stop - self.start


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
        dealt: this rank's part of each global batch for training, instead of the r-th equal one.
    """

    count: int
    batch_size: int
    rank: int = 0
    size: int = 1
    dealt: Share | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"Received batch_size={self.batch_size}, rank={self.rank}, size={self.size}. "
                "Expected batch_size of 1 or more and 0 <= rank < size."
            )

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.dealt.global_batch if self.dealt else self.batch_size * self.size

    @property
    def part(self) -> slice:
        """This rank's samples of a global batch."""
        if self.dealt:
            return slice(self.dealt.start, self.dealt.stop)
        return slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)

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
