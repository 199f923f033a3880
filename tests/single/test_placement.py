"""The proof says where operations ran, and cannot be made to say otherwise."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_mp
from tf_mp import compat, idiom, opnames, ordering, placement, probe, runs
from tf_mp.table import Action

HOME = ("/device:CPU:0", "/device:CPU:1")


@pytest.fixture
def batch():
    draw = np.random.default_rng(0)
    return draw.random((12, 10), np.float32), draw.integers(0, 10, 12)


def dense_model(middle=None):
    """Two dense layers and a dropout on each of two devices; `middle` is one more layer."""
    inputs = keras.Input((10,))
    with tf.device(HOME[0]):
        hidden = keras.layers.Dense(16, activation="relu", name="first")(inputs)
        hidden = keras.layers.Dropout(0.5, name="noise")(hidden)
    with tf.device(HOME[1]):
        hidden = keras.layers.Dense(16, name="second")(hidden)
        hidden = middle(hidden) if middle else hidden
        outputs = keras.layers.Dense(10, name="logits")(hidden)
    return keras.Model(inputs, outputs)


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("rmsprop", loss=loss, metrics=["accuracy"])
    return model


def split(middle=None, **settings):
    settings = {"cuts": ["second"], "micro_batches": 3, **settings}
    return compiled(tf_mp.parallelize(lambda: dense_model(middle), **settings))


class Elsewhere(keras.layers.Layer):
    """A layer that computes on device 0, whichever stage it is in."""

    def call(self, inputs):
        with tf.device(HOME[0]):
            return tf.nn.softplus(inputs)


class BackwardElsewhere(keras.layers.Layer):
    """A layer whose gradient alone is computed on device 0."""

    def call(self, inputs):
        @tf.custom_gradient
        def double(x):
            def gradient(upstream):
                with tf.device(HOME[0]):
                    return 2 * tf.math.abs(upstream)

            return 2 * x, gradient

        return double(inputs)


def test_every_operation_of_a_split_model_is_on_its_stages_device(batch):
    proof = tf_mp.verify_placement(split(), batch)
    assert proof.ok, proof.strays or proof.problems
    assert proof.devices == HOME
    assert proof.layers == (("first", "noise"), ("second", "logits"))
    for stage, (forward, backward) in enumerate([(3, 3), (6, 12)]):
        assert proof.kinds(stage, "forward")["MatMul"] == forward
        assert proof.kinds(stage, "backward")["MatMul"] == backward
        assert proof.count(stage, "optimizer", "Square") == 2 * (stage + 1)
        assert proof.count(stage, "collective") == 0


def test_only_boundary_tensors_labels_and_scalars_cross(batch):
    proof = tf_mp.verify_placement(split(), batch)
    crossed = [
        (t.kind, t.num_bytes) for t in proof.transfers if t.kind not in ("scalar", "control")
    ]
    boundary = [("activation", 4 * 16 * 4)] * 3 + [("gradient", 4 * 16 * 4)] * 3
    assert sorted(c for c in crossed if c[0] != "data") == sorted(boundary)
    assert all(t.sender == HOME[0] for t in proof.transfers if t.kind == "data")


@pytest.mark.parametrize("step", ["test", "predict"])
def test_other_steps_are_proved_too(batch, step):
    proof = tf_mp.verify_placement(split(), batch, step=step)
    assert proof.ok, proof.strays or proof.problems
    assert proof.kinds(1, "forward")["MatMul"] == 6
    assert proof.count(0, "backward") == proof.count(1, "backward") == 0


def test_the_model_is_afterwards_as_it_was_before(batch):
    model = split()
    model.fit(*batch, verbose=0)
    state = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before, function = [v.numpy() for v in state], model.train_function
    tf_mp.verify_placement(model, batch)
    for variable, value in zip(state, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, variable.path)
    assert model.train_function is function


def test_a_layer_forced_to_the_wrong_device_is_a_stray_with_its_name(batch):
    proof = tf_mp.verify_placement(split(Elsewhere(name="lost")), batch)
    assert not proof.ok
    assert {(s.layer, s.expected, s.actual) for s in proof.strays} == {("lost", HOME[1], HOME[0])}
    assert len([s for s in proof.strays if "Softplus" in s.op and "forward" in s.op]) == 3
    with pytest.raises(RuntimeError, match=r"lost\) on /device:CPU:0.*tf-mp verify"):
        proof.raise_for_strays()


def test_a_gradient_on_the_wrong_device_is_a_stray(batch):
    proof = tf_mp.verify_placement(split(BackwardElsewhere(name="lost")), batch)
    assert {s.layer for s in proof.strays} == {"lost"}
    assert all("/backward_" in s.op for s in proof.strays)
    assert proof.count(1, "forward") == proof.count(1, "forward", here=False)
    assert proof.count(1, "backward", "Abs") == 0
    assert proof.count(1, "backward", "Abs", here=False) == 3


def test_a_variable_on_the_wrong_device_is_a_stray(batch):
    model = split()
    compat.initialise_on(model.get_layer("logits").kernel, HOME[0])
    strays = {s.op: s for s in tf_mp.verify_placement(model, batch).strays}
    assert strays["variable logits/kernel"].layer == "logits"
    assert any("ReadVariableOp" in op for op in strays)


def test_the_graph_optimiser_does_not_merge_operations_of_two_stages(batch):
    # TensorFlow's optimiser joins unary operations in a row, also those of two devices.
    inputs = keras.Input((10,))
    hidden = keras.layers.Dense(16, activation="softplus", name="first")(inputs)
    hidden = keras.layers.Activation("softsign", name="second")(hidden)
    hidden = keras.layers.Activation("tanh", name="third")(hidden)
    outputs = keras.layers.Dense(10, name="logits")(hidden)
    model = compiled(
        tf_mp.parallelize(keras.Model(inputs, outputs), cuts=["third"], micro_batches=2)
    )
    proof = tf_mp.verify_placement(model, batch)
    assert proof.ok, proof.strays
    sent = [t.tensor for t in proof.transfers if t.kind == "activation"]
    assert len(sent) == 2 and all("second" in name for name in sent), sent


def test_a_slot_on_the_wrong_device_is_a_stray(batch):
    model = split()
    model.optimizer.build(model.trainable_variables)
    slot = next(v for v in model.optimizer.variables if "logits_kernel" in v.path)
    compat.initialise_on(slot, HOME[0])
    assert any(slot.path in s.op for s in tf_mp.verify_placement(model, batch).strays)


def test_a_model_that_runs_eagerly_is_refused(batch):
    model = split()
    model.run_eagerly = True
    with pytest.raises(ValueError, match="run_eagerly=True"):
        tf_mp.verify_placement(model, batch)


def test_a_plain_model_is_refused(batch):
    with pytest.raises(ValueError, match="is not split"):
        tf_mp.verify_placement(compiled(dense_model()), batch)


def test_an_unknown_step_is_refused(batch):
    with pytest.raises(ValueError, match="step='trian'"):
        probe.fresh_step(compiled(dense_model()), batch, step="trian")


# The usual idiom -----------------------------------------------------------------------------


def test_the_usual_idiom_leaves_all_of_stage_1s_work_on_device_0(batch):
    proof = idiom.verify_usual_idiom(compiled(dense_model()), batch, devices=HOME)
    assert proof.kinds(1, "forward")["MatMul"] == 0
    assert proof.kinds(1, "forward", here=False)["MatMul"] == 2
    assert proof.kinds(1, "backward")["MatMul"] == 0
    assert proof.kinds(1, "backward", here=False)["MatMul"] == 4
    assert proof.count(0, "forward") == proof.count(0, "forward", here=False)
    assert {"second", "logits"} <= {s.layer for s in proof.strays}
    assert proof.count(1, "optimizer", "Square") == 0
    assert proof.count(1, "optimizer", "Square", here=False) == 4
    assert "weight" in {t.kind for t in proof.transfers}


def test_a_model_rewritten_in_the_usual_idiom_keeps_its_layers_and_strays_alike(batch):
    stages = {"first": 0, "noise": 0, "second": 1, "logits": 1}
    written = idiom.write_usual_idiom(dense_model(), stages, HOME)
    assert idiom.stages_by_device(written, HOME) == {written.layers[0].name: 0, **stages}
    proof = idiom.verify_usual_idiom(compiled(written), batch, devices=HOME)
    assert proof.count(1, "forward", "MatMul") == 0
    assert "call" not in vars(written.layers[1])


def test_a_layer_on_a_device_of_no_stage_is_an_error():
    with pytest.raises(ValueError, match="second on /device:CPU:1"):
        idiom.stages_by_device(dense_model(), HOME[:1])


# Graphs made by hand -------------------------------------------------------------------------


def ran(function, *inputs):
    return runs.record(lambda: tf.function(function)(*inputs))


def judged(function, *inputs):
    return placement.judge(ran(function, *inputs), HOME, phases=())


MATRIX = tf.random.normal((9, 9))


def test_an_operation_in_no_stage_is_a_stray_unless_it_only_moves_the_batch():
    def step(x):
        x = tf.transpose(x)
        with tf.device(HOME[1]), tf.name_scope("stage_1/forward_0"):
            return tf.matmul(x, x)

    assert judged(step, MATRIX).ok
    proof = judged(lambda x: step(tf.matmul(x, x)), MATRIX)
    assert [(s.op, s.expected) for s in proof.strays] == [("MatMul", "no stage")]


def test_an_operation_without_a_scope_is_expected_where_its_inputs_are():
    def step(x):
        with tf.device(HOME[1]), tf.name_scope("stage_1/forward_0"):
            x = tf.matmul(x, x)
        with tf.device(HOME[0]):
            return tf.matmul(x, x)

    assert [(s.op, s.expected, s.actual) for s in judged(step, MATRIX).strays] == [
        ("MatMul", *HOME[::-1])
    ]


def test_a_reduction_on_the_wrong_device_is_a_stray():
    def step(x):
        with tf.device(HOME[0]), tf.name_scope("stage_1/reduce"):
            return tf.raw_ops.CollectiveReduceV2(
                input=x, group_size=1, group_key=1, instance_key=1, merge_op="Add", final_op="Id",
                ordering_token=[],
            )  # fmt: skip

    proof = judged(step, MATRIX)
    assert proof.kinds(1, "collective", here=False) == {"CollectiveReduce": 1}
    assert [s.expected for s in proof.strays] == [HOME[1]]


def test_a_call_whose_body_was_not_read_is_not_proved():
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def body(x):
        return tf.matmul(x, x)

    def step(x):
        with tf.device(HOME[0]), tf.name_scope("stage_0/forward_0"):
            return body(x) + 1.0

    proof = judged(step, MATRIX)
    assert not proof.ok
    assert "was not read" in proof.problems[0]


def test_a_stage_of_which_nothing_was_found_is_not_proved():
    def step(x):
        with tf.device(HOME[0]), tf.name_scope("stage_0/forward_0"):
            return tf.matmul(x, x)

    proof = placement.judge(ran(step, MATRIX), HOME)
    assert proof.problems == ("no forward operation of stage 1 was found",)


def test_bytes_and_direction_of_a_transfer_are_known():
    def step(x):
        with tf.device(HOME[0]), tf.name_scope("stage_0/forward_0"):
            x = tf.matmul(x, x)
        with tf.device(HOME[1]), tf.name_scope("stage_1/forward_0"):
            return tf.matmul(x, x)

    [crossing] = [t for t in judged(step, MATRIX).transfers if t.kind == "activation"]
    assert (crossing.sender, crossing.receiver, crossing.num_bytes) == (*HOME, 9 * 9 * 4)
    assert crossing.tensor == "stage_0/forward_0/MatMul"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/stage_0/forward_3/PartitionedCall/x/MatMul", (0, "forward", 3)),
        ("stage_1_1/backward_2_1/gradient_tape/stage_1/forward_2/MatMul", (1, "backward", 2)),
        ("gradient_tape/stage_2/forward_4/mul", (2, "backward", 4)),
        ("gradient_tape/stage_2/loss_4/mul", (2, "backward", 4)),
        ("stage_1/update/Mul", (1, "optimizer", None)),
        ("stage_1/reduce_1/AddN", (1, "collective", None)),
        ("stage_1/metrics/Sum", (1, "forward", None)),
        ("stage_0/forward_0/Relu-0-0-TransposeNHWCToNCHW-LayoutOptimizer", (0, "forward", 0)),
        ("resnet_stage_1_block/conv", None),
        ("my_stage_1/forwarding/conv", None),
        ("stage_1", None),
    ],
)
def test_names_tell_the_action(name, expected):
    action = opnames.parse(name)
    assert (action and action[:3]) == expected


def test_kinds_are_free_of_fusions_and_vendors_names():
    kinds = {
        "_MklNativeFusedConv2D": "Conv2D",
        "_FusedMatMul": "MatMul",
        "_MklMatMul": "MatMul",
        "_MklNativeConv2DBackpropFilterWithBias": "Conv2DBackpropFilter",
        "BatchMatMulV2": "BatchMatMul",
        "FusedBatchNormV3": "FusedBatchNorm",
        "_Send": "_Send",
    }
    assert {t: runs.Op(0, "x", t, HOME[0]).kind for t in kinds} == kinds


# Order ---------------------------------------------------------------------------------------


def chained(x, *, gated):
    """Two micro-batches on two stages; `gated` lets the second wait for the first."""
    outputs, waits = [], [None, None]
    for i in range(2):
        h = x[i]
        for k, device in enumerate(HOME):
            with tf.device(device), tf.name_scope(f"stage_{k}/forward_{i}"):
                with tf.control_dependencies([waits[k]] if waits[k] is not None and gated else []):
                    h = tf.identity(h)
                h = tf.identity(tf.exp(h) + 1.0)
                waits[k] = h
        outputs.append(h)
    return outputs


def test_actions_of_a_stage_are_ordered_by_control_edges_only():
    x = tf.random.normal((2, 9, 9))
    gated = ordering.order_of(ran(lambda x: chained(x, gated=True), x))
    first, second = (Action(0, i, "forward") for i in range(2))
    assert gated.unordered() == []
    assert gated.before(first, second)
    assert not gated.before(second, first)
    assert gated.independent(second, Action(1, 0, "forward"))
    loose = ordering.unordered_pairs(ran(lambda x: chained(x, gated=False), x))
    assert loose == [(Action(k, 0, "forward"), Action(k, 1, "forward")) for k in range(2)]


def test_the_operations_that_leave_a_pair_unordered_are_named():
    order = ordering.order_of(ran(lambda x: chained(x, gated=False), tf.random.normal((2, 9, 9))))
    [blamed] = {n.split("/")[-1] for n in order.blame(*order.unordered()[0])} - {"add"}
    assert blamed == "Exp"


def test_what_follows_a_loop_waits_for_its_body():
    rows = [  # name, type, inputs: a loop as TensorFlow lowers it, then the next micro-batch
        ("stage_0/forward_0/enter", "Enter", ()),
        ("stage_0/forward_0/merge", "Merge", (0, 4)),
        ("stage_0/forward_0/switch", "Switch", (1,)),
        ("stage_0/forward_0/body", "MatMul", (2,)),
        ("stage_0/forward_0/next", "NextIteration", (3,)),
        ("stage_0/forward_0/exit", "Exit", (2,)),
        ("stage_0/forward_1/product", "MatMul", (5,)),
    ]
    ops = [
        runs.Op(i, name, op_type, HOME[0], inputs, elements=99)
        for i, (name, op_type, inputs) in enumerate(rows)
    ]
    order = ordering.order_of(runs.Run(tuple(ops), ()))
    first, second = Action(0, 0, "forward"), Action(0, 1, "forward")
    assert order.before(first, second), order.blame(first, second)
    assert not order.before(second, first)
