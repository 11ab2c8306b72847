"""Numbers do not depend on where a program is cut: the laws of autocast's page, each by its name.

By hand, with other cuts each time:

    MPJAX_CUTS=20000 pytest tests/autocast/decide/test_autocast_cuts.py -k random_cuts -s
"""

import functools
import os
import random
from unittest import mock

import _cuts
import _metamorphic as metamorphic
import jax
import jax.numpy as jnp
import pytest
from _heads import HEADS
from _hidden_heads import HIDDEN
from _planned import Kind, compat, plan_of, read_flags, structure

from benchmarks.networks import NETWORKS

IS_FLOOR = jax.__version_info__ < (0, 11)
CUTS = int(os.environ.get("MPJAX_CUTS", "40" if IS_FLOOR else "2000"))
SEED = os.environ.get("MPJAX_CUTS_SEED", "0")
BY_HAND = "MPJAX_CUTS" in os.environ
SHARDS = 1 if IS_FLOOR else 40
# Half a shard in each run of the tests; CI's stage `fuzz` and a run by hand take all of them.
ALL_SHARDS = [
    *(
        []
        if BY_HAND
        else [pytest.param(0, CUTS // SHARDS // 2, id="half", marks=pytest.mark.share)]
    ),
    *(
        pytest.param(shard, CUTS // SHARDS, marks=[] if BY_HAND else pytest.mark.slow)
        for shard in range(SHARDS)
    ),
]
NETWORK_CUTS = int(os.environ.get("MPJAX_NETWORK_CUTS", "1"))
POLICIES = metamorphic.POLICIES
HEAD_NAMES = [head.name for head in HEADS]
ALL_NAMES = [*HEAD_NAMES, *(head.name for head in HIDDEN)]

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.standard_promotion("heads are run in float64 too, with float32 literals"),
]


# -- cutting --------------------------------------------------------------------------------


@pytest.mark.parametrize(("shard", "count"), ALL_SHARDS)
def test_law_of_cutting_random_cuts_stay_within_twice_the_errors_of_the_uncut(shard, count):
    first = shard % 2 * count  # two shards have one seed
    _check_random_cuts(ALL_NAMES, f"{SEED}, shard {shard // 2}", range(first, first + count))


def _check_random_cuts(names, seed, numbers):
    failures = []
    for i in numbers:
        what, errors, limit = metamorphic.random_cut(names, random.Random(f"{seed}, cut {i}"))
        if not (errors[0] <= limit[0] and errors[1] <= limit[1]):
            failures.append((i, *what, errors, limit))
    assert not failures, "\n".join(map(str, failures))


def test_a_maximum_is_rounded_no_more_than_the_rows_that_it_is_subtracted_from():
    """The rows are float32 since a loop reads them too; `exp(x - max(x))` is then 1 exactly."""
    with mock.patch.object(metamorphic, "KINDS", metamorphic.KINDS[:27]):  # those of that time
        rng = random.Random("0, shard 3, cut 45")
        what, errors, limit = metamorphic.random_cut(HEAD_NAMES, rng)
    assert what == (
        "router",
        "f16",
        "scan that carries",
        metamorphic.INSIDE,
    )  # else: look for it anew
    assert errors[1] <= limit[1]


@pytest.mark.parametrize("move", [".at[].set", "dynamic_update_slice"])
def test_law_of_cutting_each_value_before_a_difference_may_be_moved_and_put_back(move):
    """Behind a scatter the softmax of `z` was not known for one of the same `z`: .030 for .0013."""
    name, dtype = "slopes_of_a_softmax_by_two_values", "f16"
    closed = metamorphic.traced(name, dtype, False)
    limit = metamorphic.bound(name, dtype, ("uncut", "by hand", "widest"))
    for i in range(len(closed.jaxpr.eqns)):
        cut = _cuts.moved(closed, {i: _cuts.MOVES[move]})
        errors = metamorphic.errors_of(name, dtype, cut)
        assert errors[0] <= limit[0], i
        assert errors[1] <= limit[1], i


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_law_of_cutting_networks_stay_within_twice_the_errors_of_the_uncut(network):
    _check_random_cuts([network], f"{SEED}, {network}", range(NETWORK_CUTS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("head", HEAD_NAMES)
def test_uncut_every_head_is_as_exact_as_a_hand_cast(head, dtype):
    limit = metamorphic.bound(head, dtype, ("by hand", "widest"))
    loss, grads = metamorphic.variant(head, dtype, "uncut")
    assert loss <= limit[0]
    assert grads <= limit[1]


# `told(plan, value)` gives what is compared; no plan: inside a function taken as a whole.


def _is_low(planned, v):
    return planned is not None and planned.states[v].kind == Kind.LOW


def _known(planned, v):
    told = read_flags.UNROUNDED | read_flags.LATER | read_flags.MEET
    return planned and planned.reads.get(v, 0) & told


def _rows(eqn, planned, told):
    """Returns the name and types of an operation, calls looked into, and what is told of it."""
    if structure.is_call(eqn):
        programs = [part.program for part in structure.parts(eqn)]
        eqns = [e for p in programs for e in compat.closed(p).jaxpr.eqns]
        return [row for e in eqns for row in _rows(e, None, told)]
    if eqn.primitive.name in _cuts.PUT_IN:
        return []
    return [(eqn.primitive.name, [(v.aval.str_short(), told(planned, v)) for v in eqn.outvars])]


def _decided(planned, told):
    """Returns what is told of each value, in the order of a plan."""
    rows = []
    for decision in planned.decisions:
        if decision.call is not None:
            rows += [row for inner in decision.call.programs for row in _decided(inner, told)]
        else:
            rows += _rows(decision.eqn, planned, told)
    return rows


def _told(fun, name, told):
    """Returns what is told of each value of a program; nothing is computed."""
    return _told_of(fun, metamorphic.program(name).leaves, told)


def _told_of(fun, args, told=_is_low):
    with mock.patch("mpjax._autocast.known.fusible._MAX_FUNCTION", 0):  # look into all pieces
        _kept, plan = plan_of(fun, args)
    return _decided(plan, told)


@functools.cache
def _uncut(name, inside, told):
    closed = metamorphic.traced(name, "bf16", inside)
    return _told(jax.extend.core.jaxpr_as_fun(closed), name, told)


def _plans(name, inside, kind, cuts, told):
    """Returns what is told of a program uncut, and of each of some cuts."""
    closed = metamorphic.traced(name, "bf16", inside)
    rngs = (random.Random(f"{name} {kind} {i}") for i in range(cuts))
    of_cuts = [_told(_cuts.random_cut(closed, kind, rng), name, told) for rng in rngs]
    return _uncut(name, inside, told), of_cuts


PLAN_KINDS = [
    "jit",
    "checkpoint",
    "checkpoint with a policy",
    "checkpoint_name",
    "barrier",
    "shard_map",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", PLAN_KINDS)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("head", ALL_NAMES)
def test_law_of_cutting_a_cut_changes_no_decision(head, inside, kind):
    uncut, of_cuts = _plans(head, inside, kind, 3, _is_low)
    assert all(cut == uncut for cut in of_cuts)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_law_of_cutting_a_cut_changes_nothing_that_is_known_of_a_network(network):
    """Who may not read a value rounded, and whether a product comes later.

    A norm or a residual stream of which a cut holds a half stays in float32: the permission to
    round there is given to the whole.
    """
    rng = random.Random(f"{SEED}, {network}")
    for inside in (False, True):
        kind = rng.choice(PLAN_KINDS)
        uncut, of_cuts = _plans(network, inside, kind, NETWORK_CUTS, _known)
        for cut in of_cuts:
            assert [name for name, _ in cut] == [name for name, _ in uncut]
            for (name, now), (_, before) in zip(cut, uncut, strict=True):
                pairs = zip(now, before, strict=True)
                both = [(a, b) for (_, a), (_, b) in pairs if None not in (a, b)]
                assert all(a == b for a, b in both), (name, both)


# -- a cut that holds more than one function -----------------------------------------------------

CUTS_OF_ONE = {
    "a call": jax.jit,
    "a barrier": lambda fun: lambda *args: jax.lax.optimization_barrier(fun(*args)),
    "a checkpoint": jax.checkpoint,
}
SHAPES = {"x": (4, 8), "y": (4, 8), "w": (8, 8), "v": (8, 8), "up": (8, 16), "down": (16, 8)}


def _read(p, h):
    """A loss that reads `h` twice, and by a product."""
    return (jnp.maximum(h, 0) * h @ p["v"]).sum()


def _one_result_is_made_of_one_operand(cut, p):
    """`a` is made of `h` alone: subtracting `y` from it changes no input in small steps."""
    a, b = cut(lambda h, y: (jnp.maximum(h, 0) * h, y * 2))(p["x"] @ p["w"], p["y"])
    return ((a - p["y"]) @ p["v"]).sum() + b.sum()


def _one_result_is_no_branch_of_a_product_beside_it(cut, p):
    """`exp(-h²)` is added to `h`: no product lies between them, though the cut holds one."""
    h = p["x"] @ p["w"]
    a, b = cut(lambda h: (jnp.exp(-h * h), h @ p["v"]))(h)
    return _read(p, h + a) + b.sum()


def _a_product_that_a_difference_reads_is_low_for_its_other_readers(cut, p):
    h = cut(lambda x: x @ p["w"])(p["x"])
    later = p["y"] * (1 + 0.01 * jnp.tanh(h))
    return (((later - p["y"]) / p["y"]) @ p["v"]).sum() + _read(p, h)


def _a_call_knows_of_which_inputs_its_operands_were_made(cut, p):
    """`h` is of another shape than `x`, and `x` comes in twice."""
    made = cut(lambda x, h, y: (x + jnp.maximum(h, 0) @ p["down"]) * (1 + y))
    return _read(p, made(p["x"], p["x"] @ p["up"], p["x"]))


NETS = (
    _one_result_is_made_of_one_operand,
    _one_result_is_no_branch_of_a_product_beside_it,
    _a_product_that_a_difference_reads_is_low_for_its_other_readers,
    _a_call_knows_of_which_inputs_its_operands_were_made,
)


@pytest.mark.parametrize("cut", CUTS_OF_ONE)
@pytest.mark.parametrize("net", NETS)
def test_law_of_cutting_a_cut_around_some_operations_changes_no_decision(net, cut):
    args = ({name: jnp.ones(shape) for name, shape in SHAPES.items()},)
    plans = [_told_of(functools.partial(net, how), args) for how in (lambda f: f, CUTS_OF_ONE[cut])]
    assert plans[0] == plans[1]


# -- an input and what is made of it ---------------------------------------------------------------

# These make rows or copies of an input, of a table or of positions: no state that is changed.
_COPIES = {"sort", "top_k", "max pooling", "concatenate", "dynamic_update_slice"}
_COPIES |= {"stack"} if IS_FLOOR else set()  # it is a concatenation there
_PLACES = ["x", "x of f", "f"]
_THESE = {**_cuts.MOVES, **_cuts.DEVICES}
_MOVED = [(m, p) for m in _THESE for p in _PLACES if p != "x" or m not in _COPIES]


@pytest.mark.parametrize(("move", "place"), _MOVED)
def test_law_of_cutting_an_input_that_was_moved_is_changed_by_what_is_made_of_it(move, place):
    """`x + f(x)` is a state, float32 throughout, wherever `x` or `f(x)` was moved."""

    def net(w, up, v, x):
        moves = [_THESE[move] if p == place else (lambda x: x) for p in _PLACES]
        state = moves[0](x) + moves[2](jnp.maximum(moves[1](x) @ up, 0) @ w)
        return (jnp.maximum(state, 0) * state @ v).sum()

    _kept, plan = plan_of(net, [jnp.ones(shape) for shape in [(16, 8), (8, 16), (8, 8), (4, 8)]])
    assert _last_sum(plan).is_recurrent


def test_law_of_cutting_a_part_of_an_input_is_no_state_that_the_rest_changes():
    def coupling(w, v, x):
        y = x[:, :4] + jnp.maximum(x[:, 4:] @ w, 0)
        return (jnp.maximum(y, 0) * y @ v).sum()

    _kept, plan = plan_of(coupling, [jnp.ones(shape) for shape in [(4, 4), (4, 4), (4, 8)]])
    assert not _last_sum(plan).is_recurrent


def _last_sum(plan):
    sums = [d.eqn.outvars[0] for d in plan.decisions if d.eqn.primitive.name == "add"]
    return plan.states[sums[-1]]
