"""What `reduce_gradients` gives for each argument; how its collectives are named and placed."""

import hvd_models
import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_mp import hvd

pytestmark = pytest.mark.skipif(hvd.size() != 2, reason="two ranks")


def variable(name, shape=(2, 3), device="CPU:0"):
    with tf.device(device), keras.name_scope("net"):
        return keras.Variable(np.zeros(shape, "float32"), name=name)


def gradients_of_rank(rank, count=3, shape=(2, 3)):
    rng = np.random.default_rng(rank)
    return [tf.constant(rng.normal(size=shape).astype("float32")) for _ in range(count)]


def reduce(gradients, variables, eager=False, **arguments):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), **arguments)
    if eager:
        return optimizer.reduce_gradients(gradients, variables)
    function = tf.function(lambda: optimizer.reduce_gradients(gradients, variables))
    return function()


def both_ranks(combine, count=3):
    pairs = zip(gradients_of_rank(0, count), gradients_of_rank(1, count), strict=True)
    return [combine(a.numpy(), b.numpy()) for a, b in pairs]


def assert_all_close(found, wanted, tolerance=1e-6):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=tolerance, atol=tolerance)


def adasum(a, b):
    """The formula of Maleki et al., https://arxiv.org/abs/2006.02924, for two vectors."""
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


def mean(a, b):
    return (a + b) / 2


CASES = {
    "average": ({}, mean),
    "sum": ({"op": hvd.Sum}, lambda a, b: a + b),
    "adasum": ({"op": hvd.Adasum}, adasum),
    "predivided": ({"gradient_predivide_factor": 4.0}, mean),
    "one group": ({"groups": 1}, mean),
    "more groups than gradients": ({"groups": 9}, mean),
    "on another device": ({"device_dense": "CPU:1"}, mean),
}


@pytest.mark.parametrize("eager", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_each_way_of_reducing_follows_its_formula(case, eager):
    arguments, combine = CASES[case]
    variables = [variable(name) for name in "abc"]
    found = reduce(gradients_of_rank(hvd.rank()), variables, eager, **arguments)
    assert_all_close(found, both_ranks(combine), 1e-5 if case == "adasum" else 1e-6)


def test_compressed_gradients_travel_as_float16_and_come_back_as_float32():
    found = reduce(
        gradients_of_rank(hvd.rank()),
        [variable(name) for name in "abc"],
        compression=hvd.Compression.fp16,
    )
    assert {one.dtype for one in found} == {tf.float32}
    halves = [a.astype("float16") / 2 for a in both_ranks(lambda a, b: a)]
    assert_all_close(found, both_ranks(mean), 2e-3)
    assert not np.array_equal(found[0].numpy(), both_ranks(mean)[0]), halves


def test_a_missing_gradient_stays_missing():
    own = gradients_of_rank(hvd.rank())
    found = reduce([own[0], None, own[2]], [variable(name) for name in "abc"])
    assert found[1] is None
    assert_all_close([found[0], found[2]], [both_ranks(mean)[0], both_ranks(mean)[2]])


@pytest.mark.parametrize("scaled", [True, False])
def test_local_variables_keep_their_own_gradient(scaled):
    variables = [variable(name) for name in "abc"]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(), op=hvd.Sum, scale_local_gradients=scaled
    )
    optimizer.register_local_var(variables[1])
    own = gradients_of_rank(hvd.rank())
    found = optimizer.reduce_gradients(own, variables)
    wanted = both_ranks(lambda a, b: a + b)
    wanted[1] = own[1].numpy() / (2 if scaled else 1)
    assert_all_close(found, wanted)


def slices(rank):
    values = [[1.0 + rank, 2.0], [3.0, 4.0 + rank]]
    return tf.IndexedSlices(tf.constant(values), tf.constant([rank, 3]), tf.constant([4, 2]))


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("as_dense", [False, True])
def test_slices_are_gathered_or_reduced_as_dense(op, as_dense):
    table = variable("table", (4, 2))
    arguments = {"op": getattr(hvd, op), "sparse_as_dense": as_dense}
    (found,) = reduce([slices(hvd.rank())], [table], **arguments)
    assert isinstance(found, tf.IndexedSlices) is not as_dense
    total = sum(tf.convert_to_tensor(slices(rank)).numpy() for rank in (0, 1))
    assert_all_close([tf.convert_to_tensor(found)], [total / 2 if op == "Average" else total])


def test_adasum_of_slices_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"net/table.*sparse_as_dense=True"):
        reduce([slices(hvd.rank())], [variable("table", (4, 2))], op=hvd.Adasum)


@pytest.mark.parametrize("as_dense", [False, True])
def test_an_embedding_trains_in_step(as_dense):
    rng = np.random.default_rng(0)
    words, y = rng.integers(0, 20, (4, 8, 5)), rng.normal(size=(4, 8, 1)).astype("float32")

    def trained(optimizer, share, **options):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(20, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
        model.compile(optimizer, loss="mse", **options)
        for x, target in zip(words, y, strict=True):
            model.train_on_batch(share(x), share(target))
        return model

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), sparse_as_dense=as_dense)
    split = trained(optimizer, hvd_models.mine)
    whole = trained(keras.optimizers.SGD(0.5), lambda array: array, run_eagerly=True)
    hvd_models.assert_in_step(split.variables)
    hvd_models.assert_close(split.variables, whole.variables)


def collectives(function):
    """Name and device of each of Horovod's operations in a traced function."""
    operations = function.get_concrete_function().graph.get_operations()
    return [(o.name, o.device) for o in operations if o.type.startswith("Horovod")]


def traced(variables, scope="", **arguments):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), **arguments)

    @tf.function
    def function():
        with tf.name_scope(scope or "outer"):
            return optimizer.reduce_gradients([tf.ones(v.shape) for v in variables], variables)

    return collectives(function)


def test_reductions_are_named_by_their_variables_whatever_is_around_them():
    (name, _), *others = traced([variable(name) for name in "ab"])
    assert not others
    assert name.rsplit("/", 1)[1] == "Horovod_allreduce.net.b.to_net.a.2_tensors"
    (deeper, _), *_ = traced([variable(name) for name in "ab"], scope="stage_1/reduce")
    assert deeper.startswith("stage_1/reduce/")
    assert deeper.rsplit("/", 1)[1] == name.rsplit("/", 1)[1]


def test_each_variable_is_reduced_on_its_own_device_unless_one_is_asked_for():
    variables = [variable("a"), variable("b", device="CPU:1"), variable("c")]
    found = dict(traced(variables))
    assert sorted(device[-5:] for device in found.values()) == ["CPU:0", "CPU:1"]
    assert [device[-5:] for _, device in traced(variables, device_dense="CPU:2")] == ["CPU:2"]


def test_groups_of_variables_are_reduced_as_asked():
    a, b, c, d = (variable(name) for name in "abcd")
    names = [name.rsplit("/", 1)[1] for name, _ in traced([a, b, c, d], groups=[[a, c]])]
    kind = "Horovod_allreduce.net"
    assert sorted(names) == [f"{kind}.a.to_net.c.2_tensors", f"{kind}.b", f"{kind}.d"]


def test_a_large_model_is_reduced_in_several_groups_so_that_they_overlap():
    large = [variable(name, (1024, 1024, 5)) for name in "abc"]  # 20 MiB each
    names = [name.rsplit("/", 1)[1] for name, _ in traced(large)]
    assert names == [f"Horovod_allreduce.net.{name}" for name in "cba"]


def test_two_models_of_the_same_names_train_in_one_function():
    twins = [[variable("w")], [variable("w")]]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD()) for _ in twins]

    @tf.function
    def step():
        own = gradients_of_rank(hvd.rank(), 2)
        return [
            optimizer.reduce_gradients([gradient], model)[0]
            for optimizer, gradient, model in zip(optimizers, own, twins, strict=True)
        ]

    assert_all_close(step(), both_ranks(mean, 2))
    names = {name.rsplit("/", 1)[1] for name, _ in collectives(step)}
    assert names == {"Horovod_allreduce.net.w", "Horovod_allreduce.net.w.1"}


def test_part_of_the_variables_can_be_reduced_without_a_change_of_the_optimizer():
    variables = [variable(name) for name in "abc"]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam())
    optimizer.build(variables)
    before = [v.numpy() for v in optimizer.variables]
    found = optimizer.reduce_gradients(gradients_of_rank(hvd.rank())[1:], variables[1:])
    assert_all_close(found, both_ranks(mean)[1:])
    pairs = zip(before, optimizer.variables, strict=True)
    assert all(np.array_equal(a, b.numpy()) for a, b in pairs)


def test_plain_values_are_reduced_gathered_and_broadcast():
    rank = hvd.rank()
    weight = keras.Variable([1.0 * rank, 2.0], name="weight")
    assert hvd.allreduce(weight).numpy().tolist() == [0.5, 2.0]
    assert hvd.allreduce([rank, 1.0], op=hvd.Sum).numpy().tolist() == [1.0, 2.0]
    assert hvd.allreduce(np.float32(rank), average=False).numpy() == 1
    assert hvd.allgather([[rank]]).numpy().tolist() == [[0], [1]]
    assert hvd.broadcast([rank + 5], root_rank=1).numpy().tolist() == [6]
    assert hvd.reducescatter([1.0 * rank, 3.0]).numpy().tolist() == [[0.5], [3.0]][rank]
    assert hvd.grouped_allreduce([tf.constant(1.0)], op=hvd.Sum)[0].numpy() == 2


def test_the_tape_reduces_in_an_own_loop_and_keeps_the_structure_of_its_sources():
    model = hvd_models.network()
    x, y = (hvd_models.mine(array) for array in hvd_models.batches(1)[0])
    whole_x, whole_y = hvd_models.batches(1)[0]

    def loss(inputs, targets):
        return tf.reduce_mean(tf.square(model(inputs) - targets))

    @tf.function
    def split(wrap_before):
        tape = tf.GradientTape()
        with hvd.DistributedGradientTape(tape) if wrap_before else tape as recorded:
            value = loss(x, y)
        tape = recorded if wrap_before else hvd.DistributedGradientTape(recorded)
        sources = {"all": model.trainable_variables, "first": model.trainable_variables[0]}
        return tape.gradient(value, sources)

    with tf.GradientTape() as plain:
        value = loss(whole_x, whole_y)
    wanted = [g.numpy() for g in plain.gradient(value, model.trainable_variables)]
    for wrap_before in (False, True):
        found = split(wrap_before)
        assert_all_close(found["all"], wanted)
        assert_all_close([found["first"]], wanted[:1])


def test_the_partial_tape_leaves_local_layers_alone():
    model = hvd_models.network()
    x, y = (hvd_models.mine(array) for array in hvd_models.batches(1)[0])
    with tf.GradientTape(persistent=True) as tape:
        value = tf.reduce_mean(tf.square(model(x) - y))
    own = tape.gradient(value, model.trainable_variables)
    partial = hvd.PartialDistributedGradientTape(
        tape, local_layers=model.layers[0], scale_local_gradients=False
    )
    local, common = partial.get_local_and_global_gradients(value, model.trainable_variables)
    assert [v.path.split("/")[-2:] for v, _ in local] == [["hidden", "kernel"], ["hidden", "bias"]]
    assert_all_close([g for _, g in local], [g.numpy() for g in own[:2]])
    rows = hvd_models.of_all_ranks(common[0][1].numpy().ravel())
    assert len({row.tobytes() for row in rows}) == 1


def test_a_partial_optimizer_trains_local_layers_on_each_rank_for_itself():
    model = hvd_models.network()
    model.compile(
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[model.layers[0]]),
        loss="mse",
    )
    for x, y in hvd_models.batches(2):
        model.train_on_batch(hvd_models.mine(x), hvd_models.mine(y))
    hvd_models.assert_in_step(model.layers[1].variables)
    with pytest.raises(AssertionError):
        hvd_models.assert_in_step(model.layers[0].variables)
