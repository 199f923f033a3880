"""Tables for people: 80 columns, no colour outside a terminal. Pictures are in `pictures.py`."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from tf_mp import opnames, rules
from tf_mp.doctor import Check

if TYPE_CHECKING:
    from tf_mp.placement import Crossing, Proof, Stray
    from tf_mp.plan import Plan
    from tf_mp.simulate import Simulation
    from tf_mp.timeline import Timeline

__all__ = [
    "check_table",
    "console",
    "heavy_counts",
    "plan_tables",
    "proof_tables",
    "schedule_grid",
    "size",
    "timeline_tables",
]

_SHOWN_STRAYS = 20
_WIDTH = 80


def console(file: IO[str] | None = None) -> Console:
    """A console of 80 columns where the output is not a terminal."""
    file = file or sys.stdout
    return Console(file=file, width=None if file.isatty() else _WIDTH, highlight=False)


def proof_tables(proof: Proof, out: Console, *, title: str = "") -> None:
    """Prints a proof: operations by stage, transfers, strays, and the verdict."""
    out.print(_stages(proof, title))
    if proof.transfers:
        out.print(_transfers(proof.transfers))
    if proof.strays:
        out.print(_strays(proof.strays))
    for problem in proof.problems:
        out.print(f"Not proved: {problem}.", markup=False)
    if proof.excused:
        excused = ", ".join(f"{count} {reason}" for reason, count in proof.excused.most_common())
        out.print(f"Not counted: {excused}.", markup=False)
    if proof.ok:
        verdict = "every operation ran on its stage's device"
    else:
        verdict = f"{len(proof.strays)} strays, {len(proof.problems)} problems"
    out.print(f"{'OK' if proof.ok else 'NOT OK'}: {verdict}.", style="bold", markup=False)


def heavy_counts(proof: Proof, stage: int, phase: str, *, here: bool) -> dict[str, int]:
    """Number of a stage's operations by group, with "all" for all of them."""
    groups: collections.Counter[str] = collections.Counter()
    for kind, count in proof.kinds(stage, phase, here=here).items():
        groups["all"] += count
        if group := rules.heavy_group(kind):
            groups[group] += count
    return dict(groups)


def check_table(checks: Iterable[Check], out: Console) -> None:
    """Prints the doctor's checks; what to do stands under each that is not as wanted."""
    table = _table("", "check", "found", "wanted")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[2].overflow = table.columns[3].overflow = "fold"
    problems = []
    for check in checks:
        mark = "ok" if check.ok else ("WRONG" if check.required else "note")
        table.add_row(mark, check.name, check.found, check.wanted)
        if not check.ok:
            problems.append(check)
    out.print(table)
    for check in problems:
        out.print(f"{check.name}: {check.fix}", markup=False)
    wrong = sum(check.required for check in problems)
    out.print(
        f"{wrong} to mend, {len(problems) - wrong} to know." if problems else "All as wanted.",
        style="bold",
    )


def plan_tables(plan: Plan, out: Console) -> None:
    """Prints a plan: stages with times and bytes, the schedule as a grid, predictions."""
    table = _table("stage and device", "parameters", "forward", "backward", "update")
    kept = _table("bytes on the device", "weights", "gradients", "slots", "activations", "in all")
    for column in [*table.columns[1:], *kept.columns[1:]]:
        column.justify = "right"
    for stage in plan.stages:
        name = f"{stage.index}  {stage.device}"
        times = (stage.forward_ms, stage.backward_ms, stage.update_ms)
        table.add_row(name, f"{stage.parameters:,}", *(f"{ms:.2f} ms" for ms in times))
        table.add_row(f"   {_span(stage.operations)}", *[""] * 4, style="dim")
        parts = stage.bytes
        active = f"{parts.in_flight} x {size(parts.activations)}"
        kept.add_row(
            name, size(parts.weights), size(parts.gradients), size(parts.slots), active,
            size(parts.total),
        )  # fmt: skip
    out.print(table)
    out.print(kept)
    out.print(schedule_grid(plan), markup=False)
    sizes = ", ".join(map(str, plan.micro_batch_sizes))
    out.print(
        f"{plan.batch_size} samples in micro-batches of {sizes}; schedule {plan.schedule.name}\n"
        f"predicted: {plan.step_ms:.1f} ms a step, bubble {plan.bubble:.0%}; one device "
        f"{plan.unsplit_ms:.1f} ms; the split gains at most {plan.speedup_bound:.2f} x",
        markup=False,
    )
    if plan.better is not None:
        out.print(
            f"better: cuts={plan.better.balance}, {plan.better.step_ms:.1f} ms a step, gains at "
            f"most {plan.better.speedup_bound:.2f} x",
            markup=False,
        )


def schedule_grid(plan: Plan) -> str:
    """The schedule as text: a row for each device, F2 and B2 for micro-batch 2, idle dots.

    A tick is a third of the shortest action or more, so that a row fits into 80 columns.
    """
    forward = [stage.forward_ms for stage in plan.stages]
    backward = [stage.backward_ms for stage in plan.stages]
    tick = max(min([t for t in forward + backward if t > 0], default=1.0), plan.step_ms / 32)
    cells = plan.schedule.grid(
        [max(1, round(t / tick)) for t in forward], [max(1, round(t / tick)) for t in backward]
    )
    width = max(len(device) for device in plan.devices)
    lines = []
    for device, row in zip(plan.devices, cells, strict=True):
        marks, before = [], None
        for action in row:
            if action is None:
                marks.append(" .")
            elif action == before:
                marks.append("--" if action.kind == "forward" else "==")
            else:
                marks.append(f"{action.kind[0].upper()}{action.micro_batch % 10}")
            before = action
        lines.append(f"{device:{width}} {''.join(marks)}"[:_WIDTH])
    return "\n".join(lines) + "\n(F forward, B backward, the digit is the micro-batch, . idle)"


def timeline_tables(timeline: Timeline, planned: Simulation | None, out: Console) -> None:
    """Prints a timeline: each device beside the plan, and how far the prediction was off."""
    used = timeline.utilisation()
    table = _table("device", "utilisation", "predicted")
    for place, (device, share) in enumerate(used.items()):
        guess = f"{planned.utilisation[place]:.0%}" if planned else "-"
        table.add_row(device, f"{share:.0%}", guess)
    stages = _table("stage", "forward", "backward", "update", "in flight")
    columns = [timeline.stage_ms(name) for name in ("forward", "backward", "optimizer")]
    for k, most in enumerate(timeline.in_flight_max()):
        stages.add_row(str(k), *(f"{column[k]:.2f} ms" for column in columns), str(most))
    for column in [*table.columns[1:], *stages.columns[1:]]:
        column.justify = "right"
    out.print(table)
    out.print(stages)
    line = f"{timeline.step_ms:.1f} ms a step (median of {len(timeline.steps)})"
    if planned:
        off = timeline.step_ms / planned.step_ms - 1 if planned.step_ms else 0.0
        line += f", predicted {planned.step_ms:.1f} ms ({off:+.0%})"
    out.print(f"{line}; bubble {timeline.bubble:.0%}", markup=False)
    if timeline.clock_ms is not None:
        out.print(f"Under the profiler, as above and drawn: {timeline.profiled_ms:.1f} ms a step.")
    overlapped = timeline.typical.overlapped
    if overlapped is not None:
        out.print(f"{overlapped:.0%} of the reduction over ranks was hidden behind work")
    if not timeline.device_times:
        out.print("Times are the host's: they show when work was handed over, not when it ran.")
    disorder = timeline.disorder()
    for sentence in disorder[:5]:
        out.print(f"Out of order: {sentence}.", markup=False)
    order = "not " if disorder else ""
    out.print(f"The order of actions is {order}the schedule's.", style="bold")


def size(num_bytes: int | None) -> str:
    """A number of bytes for people.

    >>> size(200704), size(4), size(None)
    ('196 KiB', '4 B', '?')
    """
    if num_bytes is None:
        return "?"
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def _table(*headers: str, title: str = "") -> Table:
    style = box.ASCII if not (sys.stdout.encoding or "").lower().startswith("utf") else box.SIMPLE
    table = Table(*headers, title=title or None, title_justify="left", box=style, pad_edge=False)
    return table


def _stages(proof: Proof, title: str) -> Table:
    table = _table("stage and device", *opnames.PHASES, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for index, device in enumerate(proof.devices):
        columns = [
            (heavy_counts(proof, index, p, here=True), heavy_counts(proof, index, p, here=False))
            for p in opnames.PHASES
        ]
        groups = sorted({group for _, belonging in columns for group in belonging} - {"all"})
        for group in ["all", *groups]:
            name = f"{index}  {device}" if group == "all" else f"   {group}"
            table.add_row(name, *(_of(here, belonging, group) for here, belonging in columns))
        if index < len(proof.layers) and proof.layers[index]:
            table.add_row(
                f"   {_span(proof.layers[index])}", *[""] * len(opnames.PHASES), style="dim"
            )
    table.caption = "operations on the stage's device, of all operations of the stage"
    table.caption_justify = "left"
    return table


def _of(here: dict[str, int], belonging: dict[str, int], group: str) -> str:
    if not belonging.get(group):
        return "-"
    return f"{here.get(group, 0)} of {belonging[group]}"


def _transfers(transfers: Sequence[Crossing]) -> Table:
    groups: dict[tuple[str, str, str], list[Crossing]] = {}
    for each in transfers:
        groups.setdefault((each.kind, each.sender, each.receiver), []).append(each)
    table = _table("transfers", "from", "to", "number", "bytes in all")
    for column in table.columns[3:]:
        column.justify = "right"
    for (kind, sender, receiver), found in sorted(groups.items()):
        if kind == "control":
            continue
        known = [each.num_bytes for each in found if each.num_bytes is not None]
        total = size(sum(known)) if len(known) == len(found) else f"{size(sum(known))} + ?"
        table.add_row(kind, sender, receiver, str(len(found)), total)
    return table


def _strays(strays: Sequence[Stray]) -> Table:
    table = _table("stray operation", "layer", "belongs on", "ran on")
    table.columns[0].overflow = "fold"
    for stray in strays[:_SHOWN_STRAYS]:
        name = stray.op.removeprefix("StatefulPartitionedCall/")
        table.add_row(name, stray.layer or "-", _short(stray.expected), _short(stray.actual))
    if len(strays) > _SHOWN_STRAYS:
        table.add_row(f"... and {len(strays) - _SHOWN_STRAYS} more; --json lists all", "", "", "")
    return table


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _short(device: str) -> str:
    return device.removeprefix("/device:")
