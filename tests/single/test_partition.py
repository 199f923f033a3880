"""Every way to cut: expected cuts written out, the automatic one against brute force."""

import itertools
import random

import pytest

from tf_mp.balance import Limits, stage_bytes, stage_ms
from tf_mp.partition import Operation, Partition, automatic, by_balance, by_names
from tf_mp.scopes import by_function, by_scopes

LETTERS = "abcdefghijklmnop"


def listed(costs, **columns):
    """Operations a, b, c, ... with these costs; further columns by keyword."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows = rows or [{}] * len(costs)
    return [Operation(n, c, **row) for n, c, row in zip(LETTERS, costs, rows, strict=False)]


SEVEN = listed([3, 1, 4, 1, 5, 9, 2])


def test_a_partition_knows_its_stages():
    cut = Partition(7, (4, 5))
    assert cut.balance == [4, 1, 2]
    assert cut.stages == (range(0, 4), range(4, 5), range(5, 7))
    assert [cut.stage_of(i) for i in range(7)] == [0, 0, 0, 0, 1, 2, 2]
    assert cut.order == (0, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("boundaries", [(0,), (7,), (3, 3), (5, 4)])
def test_a_partition_with_an_empty_stage_cannot_be_made(boundaries):
    with pytest.raises(AssertionError, match="a stage is empty"):
        Partition(7, boundaries)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3)])
def test_a_partition_that_loses_an_operation_cannot_be_made(order):
    with pytest.raises(AssertionError, match="an operation is lost"):
        Partition(3, (1,), order)


# --- by name ---------------------------------------------------------------------------------


def test_each_name_begins_a_stage():
    assert by_names(SEVEN, ["d"]).balance == [3, 4]
    assert by_names(SEVEN, ["b", "f", "g"]).balance == [1, 4, 1, 1]
    assert by_names(SEVEN, []).balance == [7]


def test_the_first_use_of_a_layer_counts():
    assert by_names([Operation(name) for name in "abcbd"], ["b"]).balance == [1, 4]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["dense_3"], "'dense_3'.*such as 'dense_2', 'dense_1'"),
        (["xyz"], "'xyz'.*such as 'conv', 'dense_1', 'dense_2'"),
        (["dense_2", "dense_1"], r"go back.*cuts=\['dense_1', 'dense_2'\]"),
        (["dense_1", "dense_1"], "would be empty"),
        (["conv"], "not 'conv', which begins the first stage anyway"),
    ],
)
def test_wrong_names_are_explained(names, message):
    operations = [Operation(name) for name in ("conv", "dense_1", "dense_2")]
    with pytest.raises(ValueError, match=message):
        by_names(operations, names)


# --- by balance ------------------------------------------------------------------------------


def test_a_balance_counts_operations():
    assert by_balance(SEVEN, [4, 3]).boundaries == (4,)
    assert by_balance(SEVEN, [1, 1, 5]).boundaries == (1, 2)
    assert by_balance(SEVEN, [7]).boundaries == ()


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ([4, 4], r"adds up to 8, and the model has 7 operations.*for example cuts=\[5, 2\]"),
        ([4, 2], r"adds up to 6.*cuts=\[5, 2\]"),
        ([7, 0], r"stage 1 would be empty.*cuts=\[5, 2\]"),
        ([8, -1], r"stage 1 would be empty"),
        ([1] * 8, "stages=8 for 7 operations. Expected: 1 to 7 stages"),
        ([], "stages=0"),
    ],
)
def test_a_wrong_balance_prints_a_good_one(balance, message):
    with pytest.raises(ValueError, match=message):
        by_balance(SEVEN, balance)


def test_without_costs_the_good_balance_is_even():
    with pytest.raises(ValueError, match=r"cuts=\[1, 2, 2\]"):
        by_balance([Operation(name) for name in "abcde"], [1, 1, 1])


# --- automatic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_stages", "balance"),
    [(1, [7]), (2, [5, 2]), (3, [1, 4, 2]), (7, [1] * 7)],
)
def test_the_automatic_cut_of_seven_operations(num_stages, balance):
    assert automatic(SEVEN, num_stages).balance == balance


def test_among_equal_cuts_the_fewest_bytes_cross():
    costs = [2, 0, 0, 2]
    assert automatic(listed(costs, cross_bytes=[9, 9, 4, 0]), 2).balance == [3, 1]
    assert automatic(listed(costs, cross_bytes=[9, 4, 9, 0]), 2).balance == [2, 2]
    assert automatic(listed(costs, cross_bytes=[4, 4, 4, 0]), 2).balance == [1, 3]


def test_a_stage_may_be_slower_than_needed_to_save_bytes_but_not_than_the_slowest():
    # The last stage takes 6 in any case, so the first cut is free to follow the bytes.
    operations = listed([1, 1, 1, 1, 6], cross_bytes=[2, 9, 5, 1, 0])
    assert automatic(operations, 3).balance == [1, 3, 1]


def test_a_transfer_that_costs_more_than_it_saves_is_avoided():
    operations = listed([2, 2, 2, 2], cross_bytes=[1, 100, 1, 0])
    assert automatic(operations, 2).balance == [2, 2]
    assert automatic(operations, 2, transfer_ms_per_byte=0.1).balance == [1, 3]


def test_a_faster_device_gets_more():
    operations = listed([1] * 6)
    assert automatic(operations, 2).balance == [3, 3]
    assert automatic(operations, 2, speeds=[1, 2]).balance == [2, 4]


def test_a_memory_limit_moves_the_cut():
    operations = listed([1, 1, 1, 1], weight_bytes=[10, 10, 10, 70])
    assert automatic(operations, 2, max_bytes=70).balance == [3, 1]
    assert automatic(operations, 2, max_bytes=[20, 80]).balance == [2, 2]
    assert automatic(operations, 2, max_bytes=[10, None]).balance == [1, 3]


def test_activations_in_flight_count_under_the_limit():
    operations = listed([1, 1, 1, 1], activation_bytes=[10, 10, 10, 10])
    assert automatic(operations, 2, max_bytes=30, in_flight=[1, 1]).balance == [2, 2]
    assert automatic(operations, 2, max_bytes=30, in_flight=[2, 1]).balance == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_bytes": 60}, r"at least 70 bytes.*largest operation, 'd', takes 70 alone"),
        ({"max_bytes": 60, "state_copies": 3}, "at least 210 bytes.*'d', takes 210 alone"),
        ({"max_bytes": 0}, r"max_bytes=\[0, 0\]"),
        ({"max_bytes": [1]}, r"max_bytes=\[1\]. Expected: 2 numbers"),
        ({"speeds": [1, 0]}, "speeds="),
        ({"speeds": [1, 1, 1]}, "speeds="),
        ({"in_flight": [1]}, "in_flight="),
    ],
)
def test_limits_that_cannot_hold_are_explained(arguments, message):
    operations = listed([1, 1, 1, 1], weight_bytes=[10, 10, 10, 70])
    with pytest.raises(ValueError, match=message):
        automatic(operations, 2, **arguments)


def test_the_smallest_limit_that_is_named_is_kept_by_some_cut():
    operations = listed([1] * 5, weight_bytes=[40, 30, 20, 30, 40])
    with pytest.raises(ValueError, match="at least 90 bytes"):
        automatic(operations, 2, max_bytes=89)
    assert automatic(operations, 2, max_bytes=90).balance == [2, 3]


@pytest.mark.parametrize("num_stages", [0, 8])
def test_there_are_as_many_operations_as_stages(num_stages):
    with pytest.raises(ValueError, match=f"stages={num_stages} for 7 operations"):
        automatic(SEVEN, num_stages)


def drawn_case(seed):
    """Up to 14 operations with small whole costs, so that ties are frequent and sums exact."""
    draw = random.Random(seed)
    length = draw.randint(1, 14)
    num_stages = draw.randint(1, min(length, 5))
    operations = listed(
        [draw.randint(0, 6) for _ in range(length)],
        cross_bytes=[draw.randint(0, 4) for _ in range(length)],
        weight_bytes=[draw.randint(0, 9) for _ in range(length)],
        activation_bytes=[draw.randint(0, 3) for _ in range(length)],
    )
    if not any(operation.cost_ms for operation in operations):
        operations[0] = operations[0]._replace(cost_ms=1)
    arguments = {
        "speeds": [draw.choice([1, 1, 2, 4]) for _ in range(num_stages)],
        "in_flight": [draw.randint(1, 3) for _ in range(num_stages)],
        "state_copies": draw.choice([1, 2, 4]),
        "transfer_ms_per_byte": draw.choice([0, 0, 0.5, 2]),
        "max_bytes": draw.choice([None, draw.randint(20, 120)]),
    }
    if draw.random() < 0.3:
        arguments["max_bytes"] = [
            draw.choice([None, draw.randint(20, 120)]) for _ in range(num_stages)
        ]
    return operations, num_stages, arguments


def brute_force(
    operations, num_stages, *, speeds, in_flight, state_copies, transfer_ms_per_byte, max_bytes
):
    """All cuts by plain sums: (slowest, bytes crossing, boundaries) of the best, or None."""
    limits = max_bytes if isinstance(max_bytes, list) else [max_bytes] * num_stages
    best = None
    for boundaries in itertools.combinations(range(1, len(operations)), num_stages - 1):
        edges = (0, *boundaries, len(operations))
        slowest = 0
        for k, (start, stop) in enumerate(itertools.pairwise(edges)):
            run = operations[start:stop]
            crossing = operations[start - 1].cross_bytes if start else 0
            crossing += operations[stop - 1].cross_bytes if stop < len(operations) else 0
            ms = sum(o.cost_ms for o in run) / speeds[k] + crossing * transfer_ms_per_byte
            used = state_copies * sum(o.weight_bytes for o in run)
            used += in_flight[k] * sum(o.activation_bytes for o in run)
            if limits[k] is not None and used > limits[k]:
                break
            slowest = max(slowest, ms)
        else:
            crossed = sum(operations[b - 1].cross_bytes for b in boundaries)
            found = (slowest, crossed, boundaries)
            best = found if best is None else min(best, found)
    return best


def test_the_automatic_cut_equals_brute_force_on_random_costs():
    fits = limited = 0
    for seed in range(1500):
        operations, num_stages, arguments = drawn_case(seed)
        expected = brute_force(operations, num_stages, **arguments)
        if expected is None:
            limited += 1
            with pytest.raises(ValueError, match="keeps the memory limit"):
                automatic(operations, num_stages, **arguments)
        else:
            fits += 1
            cut = automatic(operations, num_stages, **arguments)
            assert cut.boundaries == expected[2], (seed, expected)
    assert fits > 1000 and limited > 50, (fits, limited)


def test_rounding_does_not_decide_between_equal_cuts():
    # Both cuts have a slowest stage of 0.8; in floating point the first gets 0.7999999999999999.
    operations = listed([0.4, 0.4, 0.1, 0.3], cross_bytes=[9, 1, 9, 0])
    assert automatic(operations, 2).balance == [2, 2]


def test_stage_costs_are_reported_as_the_cut_counts_them():
    operations = listed([1, 2, 3], cross_bytes=[5, 7, 0], weight_bytes=[10, 20, 30])
    limits = Limits((None, None), (1.0, 2.0), (2, 1), 3.0, 0.1)
    stages = Partition(3, (2,)).stages
    assert stage_ms(operations, stages, limits) == pytest.approx([3.7, 2.2])
    assert stage_bytes(operations, stages, limits) == [90, 90]


# --- by scope --------------------------------------------------------------------------------


def test_each_scope_becomes_a_stage():
    cut = by_scopes(SEVEN, ["/GPU:0"] * 3 + ["/GPU:1"] * 4)
    assert cut.balance == [3, 4]
    assert cut.labels == ("/GPU:0", "/GPU:1")


def test_operations_without_a_scope_go_with_what_feeds_them():
    assert by_scopes(SEVEN, ["x", None, None, "y", None, "z", None]).balance == [3, 2, 2]


def test_operations_before_the_first_scope_go_with_what_they_feed():
    assert by_scopes(SEVEN, [None, None, "x", "y", None, None, None]).balance == [3, 4]


def test_stages_follow_the_data_not_the_names_of_the_devices():
    cut = by_scopes(SEVEN, ["/GPU:1"] * 3 + ["/GPU:0"] * 4)
    assert cut.labels == ("/GPU:1", "/GPU:0")


def test_parallel_branches_under_two_devices_are_sorted_by_stage():
    # Two towers, listed by depth, joined at the end: a1 b1 a2 b2 join.
    operations = [Operation(name) for name in ("a1", "b1", "a2", "b2", "join")]
    inputs = [[], [], [0], [1], [2, 3]]
    cut = by_scopes(operations, ["x", "y", "x", "y", None], inputs=inputs)
    assert cut.labels == ("x", "y")
    assert cut.order == (0, 2, 1, 3, 4)
    assert cut.balance == [2, 3]
    assert [cut.stage_of(i) for i in range(5)] == [0, 1, 0, 1, 1]


def test_the_stage_that_is_listed_first_may_need_the_other():
    # b1 is listed first, but b2 needs a1: the scope of a1 is the first stage.
    operations = [Operation(name) for name in ("b1", "a1", "b2")]
    cut = by_scopes(operations, ["y", "x", "y"], inputs=[[], [], [0, 1]])
    assert cut.labels == ("x", "y")
    assert cut.order == (1, 0, 2)
    assert cut.balance == [1, 2]


def test_a_constant_goes_with_what_it_feeds():
    operations = [Operation(name) for name in ("constant", "half", "a", "b")]
    cut = by_scopes(operations, [None, None, "x", "y"], inputs=[[], [0], [], [1, 2]])
    assert [cut.stage_of(i) for i in range(4)] == [1, 1, 0, 1]


def test_scopes_that_go_back_are_an_error_that_says_so():
    message = "go back: 'c' under 'x' uses the output of 'b' under 'y'.*Move 'c' under 'y'"
    with pytest.raises(ValueError, match=message):
        by_scopes(SEVEN[:3], ["x", "y", "x"])


def test_scopes_that_go_back_through_an_operation_without_one():
    with pytest.raises(
        ValueError, match="go back: 'd' under 'x' uses the output of 'b' under 'y'"
    ):
        by_scopes(SEVEN[:4], ["x", "y", None, "x"])


def test_a_cycle_is_named_and_not_what_comes_after_it():
    # z is listed first and fed by x, which goes back too, but in no cycle: x -> y -> x is one.
    operations = [Operation(name) for name in ("z1", "x1", "z2", "y1", "x2")]
    with pytest.raises(ValueError, match="'x2' under 'x' uses the output of 'y1' under 'y'"):
        by_scopes(operations, ["z", "x", "z", "y", "x"], inputs=[[], [], [1], [1], [3]])


def test_a_model_without_scopes_is_told_how_to_write_them():
    with pytest.raises(ValueError, match="no layer was called under a tf.device scope"):
        by_scopes(SEVEN, [None] * 7)


# --- by function -----------------------------------------------------------------------------


def test_a_function_names_the_stage_of_each_operation():
    stage = {"a": 0, "b": 0, "c": None, "d": 1, "e": 1, "f": None, "g": 2}
    assert by_function(SEVEN, lambda operation: stage[operation.name]).balance == [3, 3, 1]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([0, 0, 2, 2], r"names the stages \[0, 2\].*no stage is empty"),
        ([1, 1, 1, 1], r"names the stages \[1\]"),
        ([None] * 4, r"names the stages \[\]"),
        ([0, 1, 0, 1], "goes back: 'c' in stage 0 uses the output of 'b' in stage 1"),
    ],
)
def test_a_wrong_function_is_explained(stages, message):
    chosen = dict(zip("abcd", stages, strict=True))
    with pytest.raises(ValueError, match=message):
        by_function(SEVEN[:4], lambda operation: chosen[operation.name])
