"""`tf-mp doctor | plan | verify | timeline | data`: each sub-command in its own function.

Exit status: 0 all right; 1 something is not as it must be (a stray, a broken set-up); 2 the
question itself was wrong, with one sentence that says what was expected.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tf_mp import choose, request

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `tf-mp` and returns its exit status."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return int(options.run(options))
    except Exception as error:
        if getattr(options, "debug", False):
            raise
        return _say(options.command, error)
    except KeyboardInterrupt:
        return 130


def _say(command: str, error: Exception) -> int:
    """Prints one line about an error; whose it is decides the exit status."""
    expected = isinstance(error, ValueError | RuntimeError | OSError | ImportError)
    kind = "" if expected else f"{type(error).__name__}: "
    print(f"tf-mp {command}: {kind}{' '.join(str(error).split())}", file=sys.stderr)
    return 2 if expected else 1


def parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands."""
    top = argparse.ArgumentParser(
        prog="tf-mp", description="See how a Keras model is split over devices and ranks."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_doctor(commands)
    _add_about_model(commands, "plan", "stages, bytes and predicted times, before training", plan)
    verify_options = _add_about_model(
        commands, "verify", "prove where every operation of a step runs", verify
    )
    verify_options.add_argument(
        "--usual-idiom",
        action="store_true",
        help="look at the model as tutorials write it, with tf.device around its layers",
    )
    verify_options.add_argument(
        "--step", choices=("train", "test", "predict"), default="train", help="which step to run"
    )
    timeline_options = _add_about_model(
        commands, "timeline", "what really ran when, beside the plan", timeline
    )
    timeline_options.add_argument(
        "--steps", type=request.positive, default=5, help="steps to measure (default: %(default)s)"
    )
    timeline_options.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"
    )
    choose.add_data_command(commands)
    return top


def doctor(options: argparse.Namespace) -> int:
    """`tf-mp doctor`: examines the set-up."""
    from tf_mp import facts, report, smoke
    from tf_mp.doctor import Wanted, examine

    wanted = Wanted(options.stages, options.ranks)
    checks = examine(facts.gather(options.data_dir), wanted)
    if options.run_smoke_test:
        checks.append(smoke.check(wanted))
    wrong = any(check.required and not check.ok for check in checks)
    found = {"ok": not wrong, "checks": [vars(check) for check in checks]}
    if _wants_tables(options, found):
        report.check_table(checks, report.console())
    return int(wrong)


def plan(options: argparse.Namespace) -> int:
    """`tf-mp plan`: stages, bytes and predicted times."""
    from tf_mp import pictures, report, world
    from tf_mp import plan as plans
    from tf_mp.pipeline import pipeline_of

    with _only_json(options):
        model = request.split(options)
        found = plans.plan(pipeline_of(model), options.batch_size)
    if not world.current().is_root:
        return 0
    if _wants_tables(options, found.to_json()):
        report.plan_tables(found, report.console())
    if options.png:
        pictures.draw_plan(found, options.png)
    return 0


def verify(options: argparse.Namespace) -> int:
    """`tf-mp verify`: the proof of placement."""
    from tf_mp import idiom, pictures, placement, report, world
    from tf_mp.pipeline import pipeline_of

    proofs: dict[str, placement.Proof] = {}
    with _only_json(options):
        model = request.split(options)
        batch = request.random_batch(model, options.batch_size)
        pipeline = pipeline_of(model)
        if options.usual_idiom or options.png:
            usual, stages = request.usual_idiom(options, pipeline)
            devices = [stage.device for stage in pipeline.stages]
            proofs["the usual idiom"] = idiom.verify_usual_idiom(
                usual, batch, devices=devices, stages=stages, step=options.step
            )
        if options.png or not options.usual_idiom:
            proofs["tf_mp"] = placement.verify_placement(model, batch, step=options.step)
        asked = proofs["the usual idiom" if options.usual_idiom else "tf_mp"]
        everywhere = world.exchange(asked.ok, what="the proof")
    if world.current().is_root:
        if _wants_tables(options, asked.to_json()):
            report.proof_tables(asked, report.console(), title=pipeline.graph.model.name)
        if options.png:
            pictures.draw_placement(list(proofs.items()), options.png)
    for rank in [rank for rank, ok in enumerate(everywhere) if not ok and rank]:
        world.say(f"rank {rank} has strays too")
    return 0 if all(everywhere) else 1


def timeline(options: argparse.Namespace) -> int:
    """`tf-mp timeline`: what really ran when, beside the plan."""
    from tf_mp import pictures, report, timeline, trace, world
    from tf_mp import plan as plans
    from tf_mp.pipeline import pipeline_of

    with _only_json(options):
        model = request.split(options)
        batch = request.random_batch(model, options.batch_size)
        predicted = plans.plan(pipeline_of(model), options.batch_size).simulation
        found = timeline.measure(model, batch, steps=options.steps)
    rank = world.current().rank
    if options.trace:
        trace.write(found, predicted, _of_rank(options.trace, rank), rank=rank)
    if options.png:
        pictures.draw_timeline(found, predicted, _of_rank(options.png, rank))
    if world.current().is_root:
        if _wants_tables(options, found.to_json(predicted)):
            report.timeline_tables(found, predicted, report.console())
    return 1 if found.disorder() else 0


def _of_rank(path: Path, rank: int) -> Path:
    """The file of a rank: the name itself for the root, with the rank in it for the others."""
    return path if rank == 0 else path.with_stem(f"{path.stem}-rank{rank}")


def _add_about_model(
    commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    options: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    request.add_model_options(options)
    options.add_argument("--debug", action="store_true", help="show where an error came from")
    options.set_defaults(run=run)
    return options


def _add_doctor(commands: Any) -> None:
    options = commands.add_parser("doctor", help="what of the set-up is wrong, and what mends it")
    add = options.add_argument
    add("--stages", type=request.positive, default=2, help="stages of the job in mind")
    add("--ranks", type=request.positive, default=2, help="ranks on this host")
    options.add_argument("--data-dir", metavar="DIR", help="the folder of all data sets")
    request.add_json_option(options)
    options.add_argument(
        "--run",
        dest="run_smoke_test",
        action="store_true",
        help="also run two ranks and a two-device step (half a minute)",
    )
    options.set_defaults(run=doctor)


@contextlib.contextmanager
def _only_json(options: argparse.Namespace) -> Iterator[None]:
    """Keeps what others print out of the JSON: it goes to the error stream."""
    mixed = options.json == "-"
    with contextlib.redirect_stdout(sys.stderr) if mixed else contextlib.nullcontext():
        yield


def _wants_tables(options: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Writes the JSON where it was asked for; whether tables are to be printed."""
    text = json.dumps(found, indent=2, default=str)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")
    return bool(options.json != "-")
