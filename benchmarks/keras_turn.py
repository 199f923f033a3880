"""The measured process of every variant on Keras: one of these a rank.

Each trains the same network on one batch, again and again, with RMSprop or plain SGD.
"""

import argparse
import os

import harness

WAYS = ("plain", "idiom", "split", "mirrored", "horovod_loop", "horovod_fit")


def parse():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("network")
    parser.add_argument("--cores", type=int, help="keep each rank on its first so many cores")
    parser.add_argument("--own-core", action="store_true", help="rank r has core r to itself")
    parser.add_argument("--threads", type=int, help="threads of one operation")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--cuts", help="auto, parameters, or layers; instead of the usual")
    parser.add_argument("--devices", help="index of each stage's device: 1,0,1")
    parser.add_argument("--default-threads", action="store_true", help="TensorFlow's own defaults")
    return parser.parse_args()


def main():
    """Builds, warms up, serves."""
    args = parse()
    if args.cores:
        harness.affinity(args.cores)
    if args.own_core:
        os.sched_setaffinity(0, {int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])})
    if args.threads:
        os.environ["TF_NUM_INTRAOP_THREADS"] = str(args.threads)
    if args.default_threads:
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "")
    else:
        import tf_mp

        tf_mp.init(devices_per_rank=2)
    harness.serve(*trainer(args))


def trainer(args):
    """A function that makes some steps, warmed up, and this process's rank."""
    import keras
    import networks
    import numpy as np
    import tensorflow as tf

    network = networks.network(args.network, args.batch)
    data = networks.endless((network.x, network.y))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if args.way.startswith("horovod"):
        return two_ranks(args, network, data, loss)
    if args.way == "mirrored":
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        # a batch for each replica, as each of two ranks has one
        both = [np.concatenate([part, part]) for part in (network.x, network.y)]
        data = networks.endless(tuple(both))
        with strategy.scope():
            model = on_one_device(network)
            model.compile(keras.optimizers.RMSprop(0.001), loss, jit_compile=False)
    else:
        model = model_of(args, network)
        model.compile(keras.optimizers.RMSprop(0.001), loss)

    def train(steps):
        model.fit(data, steps_per_epoch=steps, verbose=0)

    train(5)
    return train, 0


def model_of(args, network):
    """The network as the variant wants it."""
    import networks

    import tf_mp

    if args.way == "plain":
        return on_one_device(network)
    if args.way == "idiom":
        return network.build(devices=["/device:CPU:0", "/device:CPU:1"])
    cuts = "auto" if args.stages == 1 else args.cuts or network.cuts
    if cuts == "parameters":
        cuts = networks.balance_by_parameters(network.build())
    elif cuts == args.cuts != "auto":
        cuts = cuts.split(",")
    return tf_mp.parallelize(
        network.build, stages=args.stages, micro_batches=args.micro_batches,
        schedule=args.schedule, cuts=cuts,
        devices=args.devices and [int(index) for index in args.devices.split(",")],
    )  # fmt: skip


def on_one_device(network):
    """The plain model, without scopes."""
    from tf_mp import models

    if network.build is models.build_model:
        return network.build(devices=["/device:CPU:0"] * 2)
    return network.build()


def two_ranks(args, network, data, loss):
    """Data parallel: our optimizer under `fit`, or the loop that Horovod's guide writes."""
    import keras
    import tensorflow as tf

    from tf_mp import hvd

    hvd.init()
    model = on_one_device(network) if args.stages == 1 else model_of(args, network)
    optimizer = keras.optimizers.RMSprop(0.001 * hvd.size())
    if args.way == "horovod_fit":
        model.compile(hvd.DistributedOptimizer(optimizer), loss)
        start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]

        def train(steps, callbacks=()):
            model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=list(callbacks))

        train(5, start)
        return train, hvd.rank()

    import horovod.tensorflow as horovod

    optimizer.build(model.trainable_variables)
    horovod.broadcast_variables([v.value for v in model.variables + optimizer.variables], 0)
    values = iter(data)

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
        optimizer.apply(horovod.grouped_allreduce(gradients), model.trainable_variables)
        return value

    def loop(steps):
        for _ in range(steps):
            value = step(*next(values))
        value.numpy()

    loop(5)
    return loop, horovod.rank()


if __name__ == "__main__":
    main()
