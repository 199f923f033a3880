"""Pictures: legible in black and white, so hatches and not colours carry the meaning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_mp import opnames
from tf_mp.placement import Proof

__all__ = ["draw_placement", "draw_plan", "draw_timeline"]

_PHASES = (opnames.FORWARD, opnames.BACKWARD, opnames.OPTIMIZER)
_HATCHES = ("", "////", "....", "xx", "oo", "--")
_GREYS = ("0.25", "0.95", "0.70", "0.50", "0.85", "0.40")


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure that is drawn to a file, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn, drawn.subplots(rows, columns, squeeze=False, sharex=True)


def style_of(stage: int) -> dict[str, Any]:
    """Fill and hatch of a stage, the same in every picture."""
    place = stage % len(_HATCHES)
    return {"facecolor": _GREYS[place], "hatch": _HATCHES[place], "edgecolor": "black"}


def draw_placement(proofs: Sequence[tuple[str, Proof]], path: str | Path) -> None:
    """Draws where the operations of each stage ran, one panel a proof.

    Args:
        proofs: titles and proofs, for example of the usual idiom and of ours.
        path: the file to write, by its suffix a PNG, SVG or PDF.
    """
    devices = sorted({device for _, p in proofs for device in [*p.devices, *_ran_on(p)]})
    drawn, axes = figure(8, 1.2 + 0.32 * len(_PHASES) * len(devices) * len(proofs), len(proofs))
    for (title, proof), axis in zip(proofs, axes[:, 0], strict=True):
        _panel(axis, title, proof, devices)
    axes[-1, 0].set_xlabel("operations that ran there in one training step")
    _legend(drawn, max(len(p.devices) for _, p in proofs))
    drawn.savefig(path, dpi=150)


def _ran_on(proof: Proof) -> set[str]:
    return {device for _, _, _, device in proof.counts}


def _panel(axis: Any, title: str, proof: Proof, devices: list[str]) -> None:
    """Bars of one proof: a row for each device and phase, a segment for each stage."""
    labels = []
    for d, device in enumerate(devices):
        for p, phase in enumerate(_PHASES):
            row = d * (len(_PHASES) + 0.6) + p
            labels.append((row, f"{device.removeprefix('/device:')}  {phase}"))
            left = 0
            for stage in range(len(proof.devices)):
                width = _number(proof, stage, phase, device)
                if width:
                    axis.barh(row, width, left=left, height=0.8, linewidth=0.8, **style_of(stage))
                left += width
            axis.text(left, row, f" {left}", va="center", fontsize=8)
    axis.set_yticks([row for row, _ in labels], [label for _, label in labels], fontsize=8)
    axis.invert_yaxis()
    verdict = (
        "every operation on its stage's device" if proof.ok else f"{len(proof.strays)} strays"
    )
    axis.set_title(f"{title}: {verdict}", loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.08)


def _number(proof: Proof, stage: int, phase: str, device: str) -> int:
    return sum(
        count
        for (s, p, _, d), count in proof.counts.items()
        if (s, p, d) == (stage, phase, device)
    )


def _legend(drawn: Any, num_stages: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(linewidth=0.8, **style_of(s)) for s in range(num_stages)]
    labels = [f"operations of stage {s}" for s in range(num_stages)]
    drawn.legend(handles, labels, loc="outside upper center", ncols=num_stages, frameon=False)


def draw_plan(plan: Any, path: str | Path) -> None:
    """Draws the predicted step: a row for each device, a bar for each action."""
    drawn, axes = figure(8, 1.3 + 0.6 * len(plan.devices))
    axis = axes[0, 0]
    bars = [_bar(plan.simulation, a, plan.devices, plan.stages) for a in plan.simulation.start_ms]
    for row, action, start, length in bars:
        _draw_action(axis, row, action, (start, length), plan.step_ms)
    _finish_rows(axis, plan.devices, plan.step_ms)
    axis.set_xlabel("ms")
    axis.set_title(
        f"{plan.model}: {plan.step_ms:.1f} ms a step predicted, bubble {plan.bubble:.0%}",
        loc="left",
        fontsize=10,
    )
    _action_legend(drawn)
    drawn.savefig(path, dpi=150)


def draw_timeline(timeline: Any, planned: Any, path: str | Path) -> None:
    """Draws the median step as it ran below the step as it was predicted.

    Args:
        timeline: a `tf_mp.timeline.Timeline`.
        planned: the predicted `tf_mp.simulate.Simulation`, or None.
        path: the file to write, by its suffix a PNG, SVG or PDF.
    """
    devices = list(dict.fromkeys(timeline.devices))
    panels = 2 if planned else 1
    drawn, axes = figure(8, 1.2 + panels * (0.5 + 0.5 * len(devices)), panels)
    end = timeline.typical.step_ms
    if planned:
        axis, end = axes[0, 0], max(end, planned.step_ms)
        for action, start in planned.start_ms.items():
            row = devices.index(timeline.devices[action.stage])
            length = planned.end_ms[action] - start
            _draw_action(axis, row, action, (start, length), end)
        _finish_rows(axis, devices, end)
        axis.set_title(f"planned: {planned.step_ms:.1f} ms a step", loc="left", fontsize=10)
    axis = axes[-1, 0]
    for span in timeline.typical.spans:
        length = span.end_ms - span.start_ms
        if span.action is not None and span.device in devices:
            row, place = devices.index(span.device), (span.start_ms, length)
            _draw_action(axis, row, span.action, place, end)
    talk = timeline.typical.communication
    for start, stop in talk:
        axis.barh(len(devices), stop - start, left=start, height=0.4, **_TALK_STYLE)
    for d, device in enumerate(devices):
        for start, stop in timeline.typical.busy.get(device, []):
            axis.barh(d + 0.42, stop - start, left=start, height=0.08, color="black")
    _finish_rows(axis, [*devices, "reductions"] if talk else devices, end)
    axis.set_title(
        f"measured: {timeline.profiled_ms:.1f} ms a step under the profiler, "
        f"bubble {timeline.bubble:.0%} (thin line: the device works)",
        loc="left",
        fontsize=10,
    )
    axis.set_xlabel("ms")
    _action_legend(drawn)
    drawn.savefig(path, dpi=150)


_TALK_STYLE: dict[str, Any] = {"facecolor": "white", "edgecolor": "black", "hatch": "...."}
_NARROW = 0.014  # a share of the picture's width
_ACTION_STYLES: dict[str, dict[str, Any]] = {
    "forward": {"facecolor": "white", "edgecolor": "black"},
    "backward": {"facecolor": "0.8", "edgecolor": "black", "hatch": "////"},
}


def _bar(run: Any, action: Any, devices: Any, stages: Any) -> tuple[int, Any, float, float]:
    row = list(devices).index(stages[action.stage].device)
    start = run.start_ms[action]
    return row, action, start, run.end_ms[action] - start


def _draw_action(
    axis: Any, row: int, action: Any, place: tuple[float, float], end_ms: float
) -> None:
    """One bar from a start with a length, numbered where the number fits."""
    start, length = place
    style = _ACTION_STYLES[action.kind]
    axis.barh(row, length, left=start, height=0.7, linewidth=0.8, **style)
    if length < _NARROW * end_ms:
        return
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    middle, text = start + length / 2, str(action.micro_batch)
    axis.text(middle, row, text, ha="center", va="center", fontsize=7, bbox=box, clip_on=True)


def _finish_rows(axis: Any, devices: Sequence[str], end_ms: float) -> None:
    axis.set_yticks(range(len(devices)), [d.removeprefix("/device:") for d in devices])
    axis.set_ylim(len(devices) - 0.4, -0.6)
    axis.set_xlim(0, end_ms)
    axis.spines[["top", "right"]].set_visible(False)


def _action_legend(drawn: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(linewidth=0.8, label=name, **style) for name, style in _ACTION_STYLES.items()]
    drawn.legend(
        handles=handles, loc="outside upper right", ncols=2, frameon=False, fontsize=8,
        title="the number is the micro-batch", title_fontsize=8,
    )  # fmt: skip
