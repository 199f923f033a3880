"""Promise 1 on a full grid: every model of the zoo, 1 to 4 stages, 5 counts of micro-batches, ...

python tests/transparency_grid.py                 all of it: hours on two cores
python tests/transparency_grid.py --only unet     one model
python tests/transparency_grid.py --report        the tables from what has run so far

Each model is a process of its own; its lines go to docs/transparency/<model>.jsonl, and what is
there already is not run again. Gradients, new state and loss are compared with the unsplit model
on the same micro-batches (tests/reference.py), in double precision, so that only mistakes are left
and no rounding; and to the bit with one stage at the same number of micro-batches. A second table
has single precision, a third five steps of three optimizers.
"""

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent
RESULTS = TESTS.parent / "docs" / "transparency"
MODELS = ("mnist_cnn", "transformer", "lstm", "unet", "two_in_two_out", "vgg16", "resnet50")
BATCH = {"resnet50": 24, "vgg16": 8}
MICRO_BATCHES = (1, 2, 3, 4, 8)
STAGES = (1, 2, 3, 4)
SCHEDULES = ("1f1b", "gpipe")
RTOL, ATOL = 1e-9, 1e-11  # in double precision; ATOL times the largest gradient
SINGLE_RTOL, SINGLE_ATOL = 1e-5, 1e-6
OPTIMIZERS = ("SGD with momentum", "RMSprop", "Adam")
DTYPES = ("float64", "float32")
COMPILED = ("resnet50",)  # in single precision compiled Keras and eager Keras round differently
# Even cuts would part a batch normalisation from the activation that TensorFlow fuses with it.
FUSED = {("resnet50", 3): [60, 58, 58]}
CONTROLLED = ("unet", "vgg16", "resnet50")  # without dropout: plain Keras draws other masks


def main():
    """Runs models one after another and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    if args.here:
        return run(args.only)
    failed = 0
    for name in () if args.report else [args.only] if args.only else MODELS:
        environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1"}
        environment["PYTHONPATH"] = f"{TESTS}:{TESTS / 'single'}"
        words = [sys.executable, __file__, "--here", "--only", name]
        failed += subprocess.run(words, env=environment).returncode != 0
    failed += report()
    return int(failed > 0)


def run(name):
    """All of one model, in this process."""
    import tf_mp

    tf_mp.init(devices_per_rank=4)
    import keras
    import tensorflow as tf

    path = RESULTS / f"{name}.jsonl"
    done = set()
    if path.exists():
        done = {tuple(json.loads(line)["key"]) for line in path.open()}
    for row in itertools.chain(*(rows(name, done) for rows in PARTS)):
        row["versions"] = f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, row, flush=True)
    return 0


def gradients(name, done):
    """The grid of one model in double precision: a row a combination."""
    import numpy as np

    precision("float64")
    for m in MICRO_BATCHES:
        keys = [key for key in itertools.product([m], STAGES, SCHEDULES, [False, True])
                if key not in done]  # fmt: skip
        if not keys:
            continue
        case, start, wanted = unsplit(name, m)
        size = max(1.0, *(float(np.abs(value).max()) for value in wanted))
        first = one_step(name, case, start, m, 1, "gpipe", False)
        for key in keys:
            found = one_step(name, case, start, *key)
            worst = error(found, wanted, RTOL, ATOL * size)
            yield {"key": key, "error": worst, "like_one_stage": same(found, first),
                   "compared": len(wanted) - 1}  # fmt: skip


def single(name, done):
    """In single precision under the default schedule: a row a number of stages."""
    precision("float32")
    for m in MICRO_BATCHES:
        keys = [key for key in itertools.product([m], STAGES, ["float32"]) if key not in done]
        if not keys:
            continue
        case, start, wanted = unsplit(name, m)
        for key in keys:
            cuts = FUSED.get((name, key[1]))
            found = one_step(name, case, start, m, key[1], "1f1b", False, cuts=cuts)
            worst = error(found, wanted, SINGLE_RTOL, SINGLE_ATOL)
            yield {"key": key, "error": worst, "like_unsplit": same(found, wanted)}


def control(name, done):
    """What rounding alone does: plain Keras compiled against plain Keras eagerly, one batch."""
    import keras
    import numpy as np
    import reference
    import test_transparency
    import zoo

    if (name, "control") in done or name not in CONTROLLED:
        return
    precision("float32")
    case = zoo.case(name, batch=BATCH.get(name, 10))
    plain, model = test_transparency.split(case, 2, 1)
    found = {}
    for word, eagerly in (("compiled", False), ("eager", True)):
        copy = keras.models.clone_model(plain)
        reference.copy_weights(plain, copy)
        found[word] = keras_gradients(case, copy, run_eagerly=eagerly)
    model.train_on_batch(case.x, case.y)
    found["split"] = list(reference.gradients_of(model).values())
    weights = plain.get_weights()
    precision("float64")
    double = case.build()
    double.set_weights(weights)
    truth = keras_gradients(case, double, run_eagerly=True)
    length = np.sqrt(sum(np.vdot(b, b) for b in truth))
    distances = {
        word: float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(values, truth, strict=True))))
        / float(length)
        for word, values in found.items()
    }
    shares = [
        error(found[a], found[b], SINGLE_RTOL, SINGLE_ATOL)
        for a, b in (("compiled", "eager"), ("split", "eager"), ("split", "compiled"))
    ]
    largest = max(float(np.abs(b).max()) for b in truth)
    yield {"key": (name, "control"), "shares": shares, "to_double": distances, "largest": largest}


def keras_gradients(case, model, **compiled):
    """The gradients that Keras's own `train_on_batch` gives its optimizer."""
    import reference

    if case.loss_weights:
        compiled["loss_weights"] = dict(zip(model.output, case.loss_weights))
    model.compile(reference.Keep(), loss=case.compiled_loss(model), jit_compile=False, **compiled)
    model.train_on_batch(case.x, case.y)
    return list(reference.gradients_of(model).values())


def unsplit(name, m):
    """The case, its starting weights, and what the unsplit model makes of m micro-batches."""
    import reference
    import zoo

    case = zoo.case(name, batch=BATCH.get(name, 10))
    plain = case.build()
    start = [v.numpy() for v in plain.variables]
    take = CompiledSteps(case, plain, m) if compiled(name) else None
    expected, state, loss = take() if take else reference.step(
        plain, case.losses, case.x, case.y, m, loss_weights=case.loss_weights
    )  # fmt: skip
    return case, start, [*expected.values(), *state.values(), loss]


def compiled(name):
    """Whether the reference is Keras's own compiled step, which rounds otherwise than eagerly."""
    import keras

    return name in COMPILED and keras.config.floatx() == "float32"


class CompiledSteps:
    """`reference.step` with each micro-batch by Keras's own compiled `train_on_batch`.

    For a model with one output, a mean loss, and no dropout.
    """

    def __init__(self, case, plain, micro_batches):
        import keras
        import reference

        self.case, self.plain = case, plain
        self.places = reference.numbers(len(case.x), micro_batches)
        self.models = {}  # by the size of a micro-batch: what its loss is multiplied with
        for size in {b - a for a, b in self.places}:
            model = self.models[size] = keras.models.clone_model(plain)
            weights = [size / len(case.x)]
            model.compile(
                reference.Keep(), loss=case.losses[0], loss_weights=weights, jit_compile=False
            )

    def __call__(self):
        import reference

        from tf_mp import microbatch

        before = [v.numpy() for v in self.plain.non_trainable_variables]
        rows, news, loss = [], [], 0.0
        for a, b in self.places:
            model = self.models[b - a]
            reference.copy_weights(self.plain, model)
            loss += model.train_on_batch(self.case.x[a:b], self.case.y[a:b])
            rows.append(list(reference.gradients_of(model).values()))
            news.append([v.numpy() for v in model.non_trainable_variables])
        total = rows[0]
        for row in rows[1:]:
            total = [one + other for one, other in zip(total, row, strict=True)]
        shares = microbatch.shares([b - a for a, b in self.places])
        state = [microbatch.merge(*pair, shares) for pair in zip(before, zip(*news))]
        plain = self.plain
        gradients = dict(zip((v.path for v in plain.trainable_variables), total, strict=True))
        paths = (v.path for v in plain.non_trainable_variables)
        return gradients, dict(zip(paths, state, strict=True)), loss


def precision(name):
    """Makes this the precision of all models from here on."""
    import keras

    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


def one_step(name, case, start, m, stages, schedule, recompute, **cuts):
    """Gradients, new state and loss of one step of the split model."""
    import reference
    import test_transparency

    plain, model = test_transparency.split(case, stages, m, schedule, recompute, **cuts)
    for variable, value in zip(model.variables, start, strict=True):
        variable.assign(value)
    logs = model.train_on_batch(case.x, case.y, return_dict=True)
    found = list(reference.gradients_of(model).values())
    state = [v for v in model.non_trainable_variables if "seed_generator" not in v.path]
    return [*found, *(v.numpy() for v in state), logs["loss"]]


def error(found, wanted, rtol, atol):
    """The largest difference as a share of what is allowed; below 1 is right."""
    import numpy as np

    pairs = zip(found, wanted, strict=True)
    return max(float((np.abs(a - b) / (rtol * np.abs(b) + atol)).max()) for a, b in pairs)


def same(found, other):
    """Whether all gradients and all state are equal to the bit; the last is the shown loss."""
    import numpy as np

    return all(np.array_equal(a, b) for a, b in zip(found[:-1], other[:-1], strict=True))


def weights(name, done):
    """Five steps of three optimizers in both precisions, two stages and four micro-batches."""
    import keras
    import numpy as np
    import reference
    import tensorflow as tf
    import test_transparency
    import zoo

    makers = [
        lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        lambda: keras.optimizers.RMSprop(0.001),
        lambda: keras.optimizers.Adam(0.001),
    ]
    for dtype, (word, make) in itertools.product(DTYPES, zip(OPTIMIZERS, makers, strict=True)):
        if (word, dtype) in done:
            continue
        precision(dtype)
        case = zoo.case(name, batch=BATCH.get(name, 10))
        plain, model = test_transparency.split(case, 2, 4, "1f1b", False, optimizer=make())
        optimizer = make()
        optimizer.build(plain.trainable_variables)
        take = CompiledSteps(case, plain, 4) if compiled(name) else None
        apply = update(optimizer, plain.trainable_variables, bool(take))
        for number in range(5):
            expected, state, _ = take() if take else reference.step(
                plain, case.losses, case.x, case.y, 4, loss_weights=case.loss_weights,
                number=number, dense=False,
            )  # fmt: skip
            gradients = list(expected.values())
            if take:
                gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            apply(gradients)
            for variable in plain.non_trainable_variables:
                if variable.path in state:
                    variable.assign(state[variable.path])
            model.train_on_batch(case.x, case.y)
        worst = 0.0
        for a, b in zip(model.trainable_variables, plain.trainable_variables, strict=True):
            allowed = 1e-4 * np.abs(b.numpy()) + 1e-5
            worst = max(worst, float((np.abs(a.numpy() - b.numpy()) / allowed).max()))
        yield {"key": (word, dtype), "error": worst, "compared": len(plain.trainable_variables)}


def update(optimizer, variables, in_a_graph):
    """What applies gradients, eagerly or as a compiled Keras does."""
    import tensorflow as tf

    def apply(gradients):
        optimizer.apply(gradients, variables)

    return tf.function(apply, autograph=False) if in_a_graph else apply


PARTS = (gradients, single, control, weights)


def report():
    """Writes docs/transparency/README.md; the number of rows that are wrong."""
    lines, wrong, missing = [], 0, []
    single_lines, control_lines, optimizer_lines = [], [], []
    for name in MODELS:
        path = RESULTS / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.open()] if path.exists() else []
        grid = [row for row in rows if len(row["key"]) == 4]
        wrong += sum(row.get("error", 0) >= 1 for row in rows if row["key"][-1] != "float32")
        alike = [row for row in rows if row["key"][-1] == "float32" and len(row["key"]) == 3]
        if not grid:
            missing.append(name)
            continue
        worst = max(row["error"] for row in grid)
        equal = sum(row["like_one_stage"] for row in grid)
        lines.append(
            f"| {name} | {len(grid)} of {len(MICRO_BATCHES) * len(STAGES) * 4} | "
            f"{grid[0]['compared']} | {worst * RTOL:.1e} | {equal} of {len(grid)} |"
        )
        if alike:
            worst = max(row["error"] for row in alike)
            equal = sum(row["like_unsplit"] for row in alike)
            single_lines.append(
                f"| {name} | {len(alike)} of {len(MICRO_BATCHES) * len(STAGES)} | {worst:.2f} | "
                f"{sum(row['error'] < 1 for row in alike)} | {equal} |"
            )
        for row in rows:
            if row["key"][-1] == "control":
                cells = [f"{share:.2g}" for share in row["shares"]]
                cells += [f"{row['to_double'][w]:.1e}" for w in ("eager", "compiled", "split")]
                control_lines.append(f"| {name} | {row['largest']:.2g} | {' | '.join(cells)} |")
        found = {tuple(row["key"]): row.get("error") for row in rows if len(row["key"]) == 2}
        keys = itertools.product(OPTIMIZERS, DTYPES)
        cells = [f"{found[key]:.1e}" if key in found else "-" for key in keys]
        optimizer_lines.append(f"| {name} | {' | '.join(cells)} |")
    text = HEAD.format(missing=", ".join(missing) or "none")
    tables = [*TABLE, *lines, "", *SINGLE_TABLE, *single_lines, ""]
    tables += [*CONTROL_TABLE, *control_lines, "", *OPTIMIZER_TABLE, *optimizer_lines]
    text += "\n".join(["", *tables, ""])
    RESULTS.joinpath("README.md").write_text(text)
    print(text)
    return wrong


HEAD = """# The grid of promise 1

`python tests/transparency_grid.py` splits each model of the zoo into 1, 2, 3 and 4 stages, with 1,
2, 3, 4 and 8 micro-batches, under `1f1b` and `gpipe`, with and without recomputation, and compares
gradients, new state and loss with the unsplit model on the same micro-batches, variable by
variable, in double precision, where rounding cannot hide a mistake. ResNet-50 has 24 images of
64 x 64: batch normalisation of fewer numbers magnifies rounding until nothing can be told from
it. "To the bit" counts the
combinations whose gradients and state equal those of one stage at the same number of micro-batches
to the last bit; they differ in rounding where a tensor is used in several stages, because its
gradients are then added in another order.

Models without a row yet: {missing}.
"""
TABLE = (
    "| model | combinations | tensors compared | largest relative error | equal to the bit |",
    "| --- | --- | --- | --- | --- |",
)
SINGLE_TABLE = (
    "In single precision, under `1f1b` without recomputation: the largest difference as a share\n"
    "of what is allowed (1e-5 of the value and 1e-6); how many are within it; how many have\n"
    "gradients and state equal to the unsplit model's to the bit. ResNet-50's 53 batch\n"
    "normalisations magnify rounding until Keras differs from itself (next table). So its\n"
    "unsplit model takes each micro-batch by Keras's own compiled `train_on_batch`; the others\n"
    "do it eagerly. And its three stages are cut so that none parts a batch normalisation (or\n"
    "the sum after it) from its ReLU: TensorFlow fuses these on a CPU, and what is fused rounds\n"
    "otherwise (parted: 3e5 times what is allowed, as far as compiled Keras is from eager).\n",
    "| model | combinations | largest share | within | equal to the bit |",
    "| --- | --- | --- | --- | --- |",
)
CONTROL_TABLE = (
    "Keras's own rounding, in single precision on one batch: gradients of Keras's\n"
    "`train_on_batch`, compiled and with `run_eagerly=True`, and of the split model (two\n"
    "stages). First the differences as a share of what is allowed, then how far each is from\n"
    "the gradient in double precision (length of the difference to length of the gradient).\n",
    "| model | largest gradient | compiled - eager | split - eager | split - compiled | "
    "eager to double | compiled to double | split to double |",
    "| --- |" + " --- |" * 7,
)
OPTIMIZER_TABLE = (
    "Five steps, two stages, four micro-batches: the largest difference of a weight as a share\n"
    "of what is allowed (1e-4 of its value and 1e-5). The unsplit model's optimizer gets the\n"
    "gradients as Keras gives them: an embedding's as slices, in which an index may come twice.\n"
    "RMSprop and Adam square each slice, so what they make of them is not what they make of the\n"
    "sum; the split model does as Keras does.\n",
    "| model | " + " | ".join(f"{w}, {d}" for w in OPTIMIZERS for d in DTYPES) + " |",
    "| --- |" + " --- |" * 6,
)


if __name__ == "__main__":
    sys.exit(main())
