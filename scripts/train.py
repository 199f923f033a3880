"""Trains the MNIST network: split over the devices of each rank, replicated over the ranks.

python scripts/train.py                      one process, two stages on its devices
horovodrun -np 2 python scripts/train.py     two such processes that average their gradients

With --elastic, under `horovodrun --gloo --host-discovery-script scripts/discover_hosts.sh ...`,
ranks may leave and join; it is the same run all the same.
"""

import argparse
import functools
import os
import sys

import tf_mp  # before keras: TensorFlow reads the oneDNN switch once

# isort: split
import keras

from tf_mp import data, elastic, evaluation, stop, training
from tf_mp.checkpoint import CheckpointCallback, Checkpoints
from tf_mp.dealing import Share
from tf_mp.progress import Progress
from tf_mp.request import cuts_of


def parse(arguments=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Trains the MNIST network, split into stages over the devices of each rank "
        "(model parallelism) and replicated over the ranks that horovodrun starts (data "
        "parallelism). Without any option it trains on MNIST in this one process.",
        epilog="A rank is one process; -np of horovodrun says how many. A stage is the part of "
        "the model on one device. Each local batch is cut into micro-batches, so that the stages "
        "work at the same time.",
    )
    add, positive, natural = parser.add_argument, at_least(1), at_least(0)
    dataset = os.environ.get("TF_MP_DATASET", "mnist")
    add("--dataset", default=dataset, metavar="NAME", help=f"TFDS name of a set ({dataset})")
    add("--data-dir", metavar="DIR", help="folder of the data sets (TFDS's own)")
    add("--batch-size", type=positive, default=100, metavar="N", help="images a rank (100)")
    add("--steps", type=positive, metavar="N", help="optimizer steps (20000 // ranks)")
    add("--stages", type=positive, default=2, metavar="N", help="devices of a rank (2)")
    add("--cuts", type=cuts, metavar="WHERE", help="scopes (the model's own tf.device blocks), "
        "auto (measured), layers that begin a stage (dense,logits), or a balance (5,3); default: "
        "scopes")
    add("--micro-batches", type=positive, metavar="N", help="parts of a local batch (2 x stages)")
    add("--schedule", default="1f1b", choices=["1f1b", "gpipe"], help="order of the work (1f1b)")
    add("--optimizer", default="rmsprop", choices=[*training.OPTIMIZERS], help="(rmsprop)")
    add("--warmup-steps", type=natural, default=0, metavar="N", help="steps to reach the rate (0)")
    add("--seed", type=natural, default=0, metavar="N", help="of weights, dropout and data (0)")
    add("--checkpoint-dir", metavar="DIR", help="save here, and go on from what lies here")
    add("--checkpoint-every", type=positive, default=100, metavar="N", help="steps between (100)")
    add("--keep", type=positive, default=3, metavar="N", help="newest checkpoints to keep (3)")
    add("--elastic", action="store_true", help="go on when ranks leave or join (horovodrun's "
        "elastic launcher); the global batch stays that of the first ranks")
    add("--commit-every", type=positive, default=10, metavar="N",
        help="steps from one kept in memory to the next, with --elastic (10)")
    add("--log-dir", metavar="DIR", help="write TensorBoard logs here")
    add("--verify", action="store_true", help="prove first that each stage runs on its device")
    add("--timeline", metavar="DIR", help="measure some steps first, write pictures and traces")
    add("--summary", metavar="FILE", help="write the results as JSON")
    return parser.parse_args(arguments)


def cuts(text):
    """A way to cut; argparse shows the words of this kind of error only."""
    try:
        return cuts_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def at_least(least):
    """A reader of whole numbers from `least` on."""

    def whole_number(text):
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, received {text}")
        return number

    return whole_number


def main():
    """Starts this rank and trains; every rank does the same."""
    args = parse()
    tf_mp.init(devices_per_rank=args.stages)
    memory = elastic.Memory(args.elastic, args.commit_every)
    elastic.run(functools.partial(train, args), memory)


def train(args, memory):
    """Builds, trains, evaluates, reports; once, or again when the ranks of an elastic run change.

    Args:
        args: the command line.
        memory: what an elastic run goes on from.
    """
    world = tf_mp.current_world()
    keras.utils.set_random_seed(args.seed)
    training.agree_at_start(vars(args))
    checkpoints = Checkpoints(args.checkpoint_dir, args.keep)
    plan = memory.plan(
        training.plan(args.batch_size, args.stages, args.micro_batches),
        checkpoints.configuration(),
    )
    share = Share.of(plan["global_batch"], plan["global_micro_batches"], world.rank, world.size)
    steps = args.steps or 20000 * args.batch_size // share.global_batch
    run = {"dataset": args.dataset, "seed": args.seed, "global_batch": share.global_batch}

    data.prepare(args.dataset, args.data_dir, world=world)
    model = tf_mp.parallelize(
        tf_mp.build_model, cuts=args.cuts, stages=args.stages,
        micro_batches=share.micro_batches, schedule=args.schedule,
    )
    pipeline = tf_mp.pipeline_of(model)
    pipeline.first_micro_batch = share.first_micro_batch
    rate = training.learning_rate(share.global_batch, args.warmup_steps)
    model.compile(
        training.replicate(training.OPTIMIZERS[args.optimizer](rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    first_step = memory.restore(model)
    if first_step is None:
        first_step = training.resume(model, checkpoints, run)

    settings = {"batch_size": args.batch_size, "world": world, "seed": args.seed,
                "data_dir": args.data_dir}
    images = data.load(args.dataset, "train", start_step=first_step,
                       steps=max(0, steps - first_step), share=share, **settings)
    test_images = data.load(args.dataset, "test", shuffle=False, **settings)
    data.check_range(next(iter(test_images))[0])
    if args.verify:
        training.verify(model, test_images)
    if args.timeline:
        training.timeline(model, test_images, args.timeline)

    progress = Progress(steps, share.global_batch, first_step=first_step, log_dir=args.log_dir)
    saving = CheckpointCallback(
        checkpoints, args.checkpoint_every, first_step=first_step, configuration={**run, **plan}
    )
    if first_step < steps:
        callbacks = [training.broadcast(), stop.AgreedStop(saving.save), saving, progress,
                     memory.callback(first_step)]
        training.fit(model, images, callbacks)
    results = evaluation.evaluate(model, test_images)

    summary = {
        "world_size": world.size,
        "stages": len(pipeline.stages),
        "devices": [stage.device for stage in pipeline.stages],
        "micro_batches": pipeline.micro_batches,
        "schedule": pipeline.schedule,
        "global_batch": share.global_batch,
        "steps": steps,
        "final_loss": progress.final_loss,
        "accuracy": results["accuracy"],
        "images_per_second": progress.images_per_second,
        "step_time_ms": progress.step_time_ms,
        "weights_sha256": training.digest_of_weights(model),
        "versions": training.versions(),
    }
    training.report(summary, args.summary)


if __name__ == "__main__":
    sys.exit(stop.guarded(main))
