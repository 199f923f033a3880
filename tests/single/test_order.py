"""The schedule is enforced by the graph that ran, and every operation of it has its stage."""

import contextlib
import itertools

import keras
import pytest
import test_transparency
import tensorflow as tf
import zoo

import tf_mp
from tf_mp import early, opnames, ordering, schedule, stage
from tf_mp.table import Action


def proof_of(name, stages, micro_batches, rule, recompute=False):
    case = zoo.case(name, batch=8)
    _, model = test_transparency.split(
        case, stages, micro_batches, rule, recompute, optimizer=keras.optimizers.Adam()
    )
    return tf_mp.verify_placement(model, (case.x, case.y))


def assert_obeys(proof, stages, micro_batches, rule):
    order = ordering.order_of(proof, loose_ends=True)
    table = schedule.build(rule, stages, micro_batches)
    assert set(order.steps) == {a for row in table.by_device for a in row}
    for row in table.by_device:
        for first, second in itertools.combinations(row, 2):
            assert order.before(first, second), order.blame(first, second)[:5]
    for k in range(stages):
        most = 0
        row = [a for a in table.by_device[k]]
        for place in range(len(row)):
            kinds = [a.kind for a in row[: place + 1]]
            most = max(most, kinds.count("forward") - kinds.count("backward"))
        assert most <= (min(micro_batches, stages - k) if rule == "1f1b" else micro_batches)
    return order


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "rule", "recompute"),
    [
        ("mnist_cnn", 2, 4, "1f1b", False),
        ("transformer", 3, 4, "gpipe", False),
        ("transformer", 3, 4, "1f1b", False),
        ("two_in_two_out", 2, 3, "1f1b", False),
        ("unet", 3, 4, "1f1b", True),
    ],
)
def test_actions_of_a_stage_are_ordered_and_nothing_strays(
    name, stages, micro_batches, rule, recompute
):
    proof = proof_of(name, stages, micro_batches, rule, recompute)
    proof.raise_for_strays()
    assert proof.ok
    order = assert_obeys(proof, stages, micro_batches, rule)
    # Micro-batches overlap: the first stage may begin the next while the last has this one.
    last = Action(stages - 1, 0, "forward")
    assert order.independent(Action(0, 1, "forward"), last)


@pytest.mark.parametrize("rule", ["1f1b", "gpipe"])
def test_stages_with_loops_keep_their_work_on_their_device_and_their_order(rule):
    proof = proof_of("lstm", 2, 3, rule)
    proof.raise_for_strays()
    assert_obeys(proof, 2, 3, rule)


def loop_edges(run, action, kind):
    """The operations at which the loops of an action begin (`Enter`) or end (`Exit`)."""
    found = set()
    for op in run.ops:
        parsed = opnames.parse(op.name, op.type)
        if op.type == kind and parsed is not None and parsed.micro_batch is not None:
            if Action(parsed.stage, parsed.micro_batch, parsed.phase) == action:
                found.add(op.index)
    return found


def waits_for(run, index):
    """All operations that one waits for."""
    found, waiting = set(), [index]
    while waiting:
        op = run.ops[waiting.pop()]
        new = {*op.inputs, *op.controls} - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_all_of_a_loop_ends_before_a_loop_of_the_next_action_begins(recompute):
    # That an operation in a loop comes first says nothing of its last time.
    run = proof_of("lstm", 2, 3, "1f1b", recompute).run
    for row in schedule.build("1f1b", 2, 3).by_device:
        for first, second in itertools.pairwise(row):
            ends, begins = loop_edges(run, first, "Exit"), loop_edges(run, second, "Enter")
            assert ends and begins
            for begin in begins:
                missing = ends - waits_for(run, begin)
                assert not missing, [run.ops[i].name for i in (begin, *missing)]


@pytest.mark.parametrize(("micro_batches", "waits"), [(2, True), (1, False)])
def test_an_update_waits_until_an_earlier_stage_that_works_on_has_its_gradient(
    micro_batches, waits
):
    run = proof_of("mnist_cnn", 2, micro_batches, "1f1b").run
    _, ancestors, bit = ordering._graph(run)
    last = ordering.tied_operations(run)[Action(1, micro_batches - 1, "backward")]
    backward = ordering._union(bit[index] for index in last)
    assigned = [
        op.index for op in run.ops
        if op.name.startswith("stage_1/update/") and op.type == "AssignSubVariableOp"
    ]  # fmt: skip
    assert len(assigned) == 4
    assert all(not backward & ~ancestors[index] for index in assigned) == waits


def test_without_the_tokens_the_order_is_lost(monkeypatch):
    monkeypatch.setattr(stage, "gate", lambda tensors, token: list(tensors))
    monkeypatch.setattr("tf_mp.backward.gate", lambda tensors, token: list(tensors))
    proof = proof_of("mnist_cnn", 2, 3, "gpipe")
    with pytest.raises(AssertionError):
        assert_obeys(proof, 2, 3, "gpipe")


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_without_its_wait_a_slope_that_needs_no_gradient_runs_during_the_forward(
    monkeypatch, name
):
    monkeypatch.setattr(early, "waits", lambda token, upstream: contextlib.nullcontext())
    proof = proof_of(name, 2, 2, "1f1b")
    with pytest.raises(AssertionError):
        assert_obeys(proof, 2, 2, "1f1b")


def test_a_stage_on_the_wrong_device_is_a_stray(monkeypatch):
    real = stage.Stage._on_device

    def wrong(self, body):
        with_wrong = real(self, body)
        if self.index == 0:
            return with_wrong

        def placed(*args):
            with tf.device("/device:CPU:0"):
                return body(*args)

        return placed

    monkeypatch.setattr(stage.Stage, "_on_device", wrong)
    proof = proof_of("mnist_cnn", 2, 2, "1f1b")
    assert not proof.ok
    assert {"dense", "logits"} <= {stray.layer for stray in proof.strays}
