"""Breaks tf_mp.hvd once in each of many ways, and looks whether a test sees it.

python tests/break_hvd.py                 all of it: about 20 minutes on two cores
python tests/break_hvd.py --only rates    the faults whose name has this word

Each fault is one replacement in a copy of the tree; the tests that should turn red run on two
ranks (one process for those of tests/single). The tests run unbroken first, so that red means
the fault. The last line says how many were seen; the exit status is 1 if one was not.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RANKS = "tests/parallel/test_hvd_"
ONE = "tests/single/test_hvd_"
SECONDS = 300

# name: (file in tf_mp/hvd, what stands there, what stands there instead, test file, tests)
FAULTS = {
    "gradients are not reduced": (
        "optimizer.py",
        "reduced = self.reduce_gradients(gradients, variables) if reduce else gradients",
        "reduced = gradients",
        RANKS + "optimizers.py", "equals_one_rank and SGD",
    ),
    "reduced after the look for infinities": (
        "patches.py", "if inner is None or not list(grads):", "if True:",
        RANKS + "optimizers.py", "infinity_on_one_rank and Adam and inside",
    ),
    "backward passes are not cleared": (
        "accumulation.py", "total.assign(tf.zeros_like(total))", "pass",
        RANKS + "optimizers.py", "backward_passes",
    ),
    "backward passes are never averaged": (
        "accumulation.py", "if self.average:", "if False:",
        RANKS + "optimizers.py", "backward_passes",
    ),
    "the sum instead of the operation asked for": (
        "reduction.py", '"op": settings.op,', '"op": Average,',
        RANKS + "reduction.py", "follows_its_formula",
    ),
    "the predivide factor is used once": (
        "reduction.py", '"postscale_factor": factor', '"postscale_factor": 1.0',
        RANKS + "reduction.py", "follows_its_formula",
    ),
    "the process set is left out": (
        "reduction.py", '"process_set": settings.process_set,\n        "ignore', '"ignore',
        "tests/integration/test_hvd_scripts.py", "process_sets",
    ),
    "compression is left out": (
        "reduction.py", '"compression": settings.compression,', "",
        RANKS + "reduction.py", "compressed",
    ),
    "slices are added up, not averaged": (
        "reduction.py", "if settings.op == Average:", "if False:",
        RANKS + "reduction.py", "slices_are_gathered",
    ),
    "slices stay slices": (
        "reduction.py", "and not settings.sparse_as_dense", "",
        RANKS + "reduction.py", "slices_are_gathered",
    ),
    "local gradients are not scaled": (
        "reduction.py", "if not settings.scale_local_gradients:", "if True:",
        RANKS + "reduction.py", "local_variables",
    ),
    "local variables are reduced": (
        "settings.py", "return _variables.key(variable) in self.local_variables", "return False",
        RANKS + "reduction.py", "local",
    ),
    "reductions are named by the graph": (
        "variables.py", "paths = [_NOT_IN_A_NAME.sub(\".\", part) for part in parts]",
        "paths = [f\"g{len(tf.compat.v1.get_default_graph().get_operations())}\"]",
        RANKS + "reduction.py", "named_by_their_variables",
    ),
    "names are not numbered": (
        "variables.py", 'return f"{name}.{number}" if number else name', "return name",
        RANKS + "reduction.py", "two_models",
    ),
    "all is reduced on one device": (
        "reduction.py", "return asked or device_of(_variables.device(variable))",
        'return "/device:CPU:0"',
        RANKS + "reduction.py", "own_device",
    ),
    "groups are not asked for": (
        "reduction.py", "if settings.groups is None:", "if True:",
        RANKS + "reduction.py", "groups_of_variables",
    ),
    "one group for all": (
        "reduction.py", "> GROUP_BYTES", "> 1e15",
        RANKS + "reduction.py", "several_groups",
    ),
    "the tape does not reduce": (
        "tape.py", "reduced = self._reducer(gradients, listed, names)", "reduced = gradients",
        RANKS + "reduction.py", "tape",
    ),
    "the tape gives a list": (
        "tape.py", "return keras.tree.pack_sequence_as(sources, reduced)", "return reduced",
        RANKS + "reduction.py", "keeps_the_structure",
    ),
    "a lazy model is broadcast too late": (
        "callbacks/broadcast.py", "if compat.build_from(model, iterator):", "if False:",
        RANKS + "callbacks.py", "first_step_with_the_roots",
    ),
    "the optimizer is not broadcast": (
        "variables.py", "*(optimizer.variables if optimizer is not None else [])", "",
        RANKS + "callbacks.py", "restored_optimizer",
    ),
    "local variables are broadcast": (
        "callbacks/broadcast.py", "if _variables.key(v) not in self._local]", "]",
        RANKS + "callbacks.py", "local_variables",
    ),
    "statistics stay each rank's own": (
        "callbacks/broadcast.py", "average_state(self.model, self._local)", "pass",
        RANKS + "callbacks.py", "statistics",
    ),
    "metrics are averaged without weights": (
        "callbacks/metrics.py", "return sum(value * count for value, count in pairs if count)",
        "return sum(value for value, _ in pairs) * (total / len(pairs))",
        RANKS + "callbacks.py", "weighted",
    ),
    "metrics of other names pass": (
        "callbacks/metrics.py", "if any(one != names[0] for one in names):", "if False:",
        RANKS + "callbacks.py", "only_one_rank_has",
    ),
    "batch normalisation of one rank": (
        "batch_norm.py", "if size() == 1:", "if True:",
        RANKS + "callbacks.py", "synchronised",
    ),
    "early stopping of one rank": (
        "callbacks/stop.py", "return None if without else sum(map(float, ranks)) / len(ranks)",
        "return value",
        RANKS + "callbacks.py", "early_stopping",
    ),
    "a loss that is no number stays one rank's": (
        "callbacks/stop.py", "if int(flag) and not bad:", "if False:",
        RANKS + "callbacks.py", "no_number",
    ),
    "every rank writes the best model": (
        "callbacks/checkpoint.py", "if rank() == 0:\n            super().on_epoch_end",
        "if True:\n            super().on_epoch_end",
        RANKS + "callbacks.py", "best_model",
    ),
    "rates: the warm-up is a batch late": (
        "callbacks/schedule.py", "epoch += 1 / (self.steps_per_epoch or math.inf)", "pass",
        RANKS + "schedules.py", "warmup_follows and SGD",
    ),
    "rates: they forget the epoch": (
        "callbacks/schedule.py", "self.current_epoch = epoch", "self.current_epoch = 0",
        RANKS + "schedules.py", "warmup_follows and SGD",
    ),
    "rates: the staircase does not end": (
        "callbacks/schedule.py", "self.current_epoch >= self.end_epoch", "False",
        RANKS + "schedules.py", "staircase",
    ),
    "rates: the momentum stays": (
        "callbacks/schedule.py", "self._momentum.scale(new / old)", "pass",
        RANKS + "schedules.py", "momentum_is_corrected and SGD",
    ),
    "rates: the momentum stays changed": (
        "callbacks/schedule.py", "self._momentum.restore()", "pass",
        RANKS + "schedules.py", "momentum_is_corrected and SGD",
    ),
    "XLA by itself": (
        "patches.py", "def _auto(self: Any) -> bool:\n    if distributed_in(",
        "def _auto(self: Any) -> bool:\n    if None and distributed_in(",
        ONE + "optimizer.py", "auto_never_means",
    ),
    "XLA by name": (
        "patches.py", "if value and distributed_in(", "if None and distributed_in(",
        ONE + "optimizer.py", "asked_for_by_name",
    ),
    "a saved model names our class": (
        "optimizer.py", "compat.serialise_as(wrapped, inner)",
        'wrapped.__module__, wrapped.__qualname__ = __name__, "Wrapped"',
        ONE + "optimizer.py", "saved",
    ),
    "a loaded model is not distributed": (
        "saving.py", "DistributedOptimizer(model.optimizer, compression=compression)", "pass",
        ONE + "optimizer.py", "load_model_goes_on",
    ),
    "Horovod's own module passes": (
        "guard.py", "warnings.warn(", "str(",
        ONE + "names.py", "warns_once",
    ),
}  # fmt: skip


def main():
    """Runs the faults one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD")
    args = parser.parse_args()
    chosen = {name: fault for name, fault in FAULTS.items() if args.only in name}
    with tempfile.TemporaryDirectory() as temporary:
        copy = pathlib.Path(temporary) / "copy"
        kinds = shutil.ignore_patterns(".*", "__pycache__", "docs", "benchmarks")
        shutil.copytree(ROOT, copy, ignore=kinds)
        whole = sorted({(file, words) for _, _, _, file, words in chosen.values()})
        bad = [f"red without a fault: {case}" for case in whole if not green(copy, *case)]
        for name, (file, old, new, tests, words) in chosen.items():
            path = copy / "tf_mp" / "hvd" / file
            text = path.read_text()
            if text.count(old) != 1:
                bad.append(f"{name}: {old!r} stands {text.count(old)} times in {file}")
                continue
            path.write_text(text.replace(old, new))
            seen = not green(copy, tests, words)
            path.write_text(text)
            print(f"{'seen' if seen else 'NOT SEEN':9} {name}", flush=True)
            bad += [] if seen else [name]
    print(*bad, f"{len(chosen)} faults, {len(bad)} not as they should be", sep="\n")
    return int(bool(bad))


def green(copy, file, words):
    """Whether these tests pass in the copy; they must be some."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file]
    command += ["-k", words]
    if "/parallel/" in file:
        command = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-np", "2", *command]
    environment = {
        **os.environ, "PYTHONPATH": str(copy), "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
    }  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == 5 or "no tests ran" in done.stdout:
        raise SystemExit(f"No test in {file} is chosen by {words!r}.")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
