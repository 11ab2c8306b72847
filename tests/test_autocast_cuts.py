"""Numbers do not depend on where a program is cut: the laws of autocast's page, each by its name.

By hand, with other cuts each time:

    MPJAX_CUTS=20000 pytest tests/test_autocast_cuts.py -k random_cuts -s
"""

import os
import random
from unittest import mock

import _cuts
import _metamorphic as metamorphic
import jax
import pytest
from _heads import HEADS

import mpjax
from mpjax import _compat
from mpjax._autocast import api, plan, structure
from mpjax._autocast.states import Kind

IS_FLOOR = jax.__version_info__ < (0, 11)
CUTS = int(os.environ.get("MPJAX_CUTS", "100" if IS_FLOOR else "2000"))
SEED = os.environ.get("MPJAX_CUTS_SEED", "0")
BY_HAND = "MPJAX_CUTS" in os.environ
SHARDS = 1 if IS_FLOOR else 20
ALL_SHARDS = [
    pytest.param(shard, marks=[pytest.mark.slow] if shard and not BY_HAND else [])
    for shard in range(SHARDS)
]
POLICIES = metamorphic.POLICIES

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.standard_promotion("heads are run in float64 too, with float32 literals"),
]


# -- law 1: cutting --------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ALL_SHARDS)
def test_law_of_cutting_random_cuts_stay_within_twice_the_errors_of_the_uncut(shard: int) -> None:
    failures = []
    for i in range(CUTS // SHARDS):
        rng = random.Random(f"{SEED}, shard {shard}, cut {i}")
        head, dtype = rng.choice(HEADS).name, rng.choice(list(POLICIES))
        kind = rng.choice(metamorphic.KINDS)
        inside = kind in metamorphic.ONLY_INSIDE or rng.random() < 0.4
        limit = metamorphic.bound(head, dtype, ("uncut", "by hand", "widest"))
        errors = metamorphic.cut_errors(head, dtype, kind, inside, rng)
        if not (errors[0] <= limit[0] and errors[1] <= limit[1]):
            failures.append((i, head, dtype, kind, inside, errors, limit))
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("head", [h.name for h in HEADS])
def test_uncut_every_head_is_as_exact_as_a_hand_cast(head: str, dtype: str) -> None:
    limit = metamorphic.bound(head, dtype, ("by hand", "widest"))
    loss, grads = metamorphic.variants(head, dtype)["uncut"]
    assert loss <= limit[0]
    assert grads <= limit[1]


def _planned(fun, args):
    made = []

    def trace(*xs):
        settings = plan.Settings(mpjax.get_policy("bf16-mixed"))
        made.append(api.planned(fun, xs, {}, settings))
        return ()

    jax.eval_shape(trace, *args)
    return made[0]


def _rows(eqn, low):
    """Returns the name and types of an operation, calls looked into, and what of it is low."""
    if structure.is_call(eqn):
        programs = [part.program for part in structure.parts(eqn)]
        eqns = [e for p in programs for e in _compat.closed(p).jaxpr.eqns]
        return [row for e in eqns for row in _rows(e, lambda v: False)]
    if eqn.primitive.name in _cuts.PUT_IN:
        return []
    return [(eqn.primitive.name, [(v.aval.str_short(), low(v)) for v in eqn.outvars])]


def _low(planned):
    """Returns of each value that a plan decides whether it is low."""
    found = []
    for decision in planned.decisions:
        if decision.call is not None:
            found += [row for inner in decision.call.plans for row in _low(inner)]
        else:
            found += _rows(decision.eqn, lambda v: planned.states[v].kind == Kind.LOW)
    return found


@pytest.mark.parametrize("kind", ["jit", "checkpoint", "checkpoint_name", "barrier"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("head", [h.name for h in HEADS])
def test_law_of_cutting_a_cut_changes_no_decision(head: str, inside: bool, kind: str) -> None:
    """Nothing is computed: the plans are compared, value by value."""
    closed, args = metamorphic.traced(head, "bf16", inside), metamorphic.leaves(head)
    with mock.patch("mpjax._autocast.fusible._MAX_FUNCTION", 0):  # look into all pieces
        _kept, whole = _planned(jax.extend.core.jaxpr_as_fun(closed), args)
        uncut = _low(whole)
        for i in range(3):
            rng = random.Random(f"{head} {kind} {i}")
            _kept, plan_of_cut = _planned(_cuts.random_cut(closed, kind, rng), args)
            cut = _low(plan_of_cut)
            if kind != "barrier":
                assert cut == uncut, i
            # What a barrier holds together is rounded no more than without it.
            assert [name for name, _ in cut] == [name for name, _ in uncut]
            for (name, now), (_, before) in zip(cut, uncut, strict=True):
                assert not any(a and not b for (_, a), (_, b) in zip(now, before, strict=True)), (
                    name
                )
