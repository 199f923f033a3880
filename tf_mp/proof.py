"""What the proof of placement says: counts by stage and device, strays, transfers, problems."""

import collections
import dataclasses
from typing import Any

from tf_mp import opnames, runs

__all__ = ["Crossing", "Proof", "Stray"]


@dataclasses.dataclass(frozen=True)
class Stray:
    """An operation that ran where it should not, and the layer it belongs to ("" if unknown)."""

    op: str
    expected: str
    actual: str
    layer: str = ""


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that crossed devices.

    Attributes:
        tensor: name of the operation that made it.
        sender: the device that it left.
        receiver: the device that it reached.
        num_bytes: its size, None when unknown.
        kind: "activation", "gradient", "weight", "update", "data", "scalar", "control" or "other".
    """

    tensor: str
    sender: str
    receiver: str
    num_bytes: int | None
    kind: str


@dataclasses.dataclass(frozen=True)
class Proof:
    """Where every operation of a step ran.

    Attributes:
        devices: the device of each stage.
        layers: names of the layers of each stage, where known.
        counts: number of operations by (stage, phase, kind of operation, device where it ran).
        strays: operations that ran elsewhere than their stage's device, the heaviest first.
        transfers: tensors that crossed devices.
        excused: number of operations that are not counted, by reason: they may run anywhere, or
            take no time.
        problems: sentences; each says what could not be proved.
        run: the operations themselves, for `tf_mp.ordering`.
    """

    devices: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    counts: collections.Counter[tuple[int, str, str, str]]
    strays: tuple[Stray, ...]
    transfers: tuple[Crossing, ...]
    excused: collections.Counter[str]
    problems: tuple[str, ...]
    run: runs.Run = dataclasses.field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether every operation was read and none strayed."""
        return not self.strays and not self.problems

    def count(self, stage: int, phase: str, kind: str | None = None, *, here: bool = True) -> int:
        """Operations of a stage and phase: on the stage's device (`here`), or all of them."""
        return sum(
            number
            for (s, p, k, device), number in self.counts.items()
            if (s, p) == (stage, phase)
            and kind in (None, k)
            and (not here or device == self.devices[stage])
        )

    def kinds(self, stage: int, phase: str, *, here: bool = True) -> dict[str, int]:
        """Number of operations of a stage and phase by kind, `MatMul` for example."""
        names = sorted({k for s, p, k, _ in self.counts if (s, p) == (stage, phase)})
        return {name: self.count(stage, phase, name, here=here) for name in names}

    def raise_for_strays(self) -> None:
        """Raises unless the proof is `ok`.

        Raises:
            RuntimeError: names the first strays and problems.
        """
        if self.ok:
            return
        lines = [f"{s.op} ({s.layer or 'no layer'}) on {s.actual}" for s in self.strays[:5]]
        raise RuntimeError(
            f"Placement is not proved. Received: {len(self.strays)} stray operations and "
            f"{len(self.problems)} problems. Expected: each operation on its stage's device. "
            f"First: {'; '.join([*self.problems[:3], *lines])}. "
            "`tf-mp verify` lists them all."
        )

    def to_json(self) -> dict[str, Any]:
        """The proof as `tf-mp verify --json` prints it."""
        stages = [self._stage_json(index) for index in range(len(self.devices))]
        return {
            "ok": self.ok,
            "stages": stages,
            "strays": [dataclasses.asdict(stray) for stray in self.strays],
            "transfers": [
                {
                    "tensor": t.tensor,
                    "from": t.sender,
                    "to": t.receiver,
                    "bytes": t.num_bytes,
                    "kind": t.kind,
                }
                for t in self.transfers
            ],
            "excused": dict(self.excused),
            "problems": list(self.problems),
        }

    def _stage_json(self, index: int) -> dict[str, Any]:
        layers = list(self.layers[index]) if index < len(self.layers) else []
        here = {phase: self.kinds(index, phase) for phase in opnames.PHASES}
        belonging = {phase: self.kinds(index, phase, here=False) for phase in opnames.PHASES}
        device = self.devices[index]
        return {"index": index, "device": device, "layers": layers, **here, "all": belonging}
