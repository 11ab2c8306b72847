"""Gradients that a function takes itself, inside autocast, through calls, loops and checkpoints.

JAX marks the equations of a backward pass as transposed. Of a call it marks the call alone: what
stands inside is told by `known/derivatives`, and then decided as if it were written out.
"""

import functools
import random

import _metamorphic as metamorphic
import jax
import jax.numpy as jnp
import pytest
from _planned import Action, Planned
from jax import lax

WS = [jnp.ones((8, 8))] * 4  # three layers, and a head
X = jnp.ones((4, 8))


def layer(x, w):
    return jnp.maximum(x @ w, 0)


def in_a_cond(fun):
    return lambda x, w: lax.cond(x[0, 0] < 9, fun, fun, x, w)


def value_and_grad(how, ws, x):
    def loss(ws):
        *hidden, head = ws
        return ((functools.reduce(how(layer), hidden, x) @ head - 1) ** 2).mean()

    return jax.value_and_grad(loss)(ws)


def products(plan):
    """Returns the dtype of each product's result, calls looked into."""
    rows = []
    for decision in plan.decisions:
        if decision.call is not None:
            rows += [row for inner in decision.call.programs[:1] for row in products(inner)]
        elif decision.action is Action.PRODUCT:
            rows.append(str(decision.out_dtype))
    return rows


@pytest.mark.parametrize("how", [jax.jit, in_a_cond])
def test_the_backward_pass_of_a_call_is_decided_as_if_it_were_written_out(how):
    """Before, each product that makes a cotangent inside gave float32, as if it were an output."""
    plain = Planned(functools.partial(value_and_grad, lambda f: f), WS, X)
    cut = Planned(functools.partial(value_and_grad, how), WS, X)
    assert products(plain.plan).count("bfloat16") == 6  # the layers, and three cotangents
    assert sorted(products(cut.plan)) == sorted(products(plain.plan))


def test_the_backward_pass_of_a_checkpoint_computes_layers_again_as_they_were():
    cut = Planned(functools.partial(value_and_grad, jax.checkpoint), WS, X)
    # Three layers, again in the backward pass, three cotangents; the head, four gradients.
    assert sorted(products(cut.plan)) == ["bfloat16"] * 9 + ["float32"] * 5


# -- numbers: each of these cuts gave a wrong gradient ---------------------------------------------


@pytest.mark.parametrize(
    ("head", "dtype", "kind", "seeds"),
    [
        # Computed again, cosines near 1 were those of other vectors: gradient off by 2.5.
        ("arccos_of_a_cosine", "bf16", "checkpoint", ["11", "16", "37", "79"]),
        # The cotangent of `f(z + 0.01) - f(z)` was rounded for one of the two: off by .053.
        ("slopes_of_a_softmax_by_two_values", "f16", "sort", ["45", "46", "139"]),
    ],
)
def test_law_of_cutting_the_gradient_of_what_was_cut_taken_inside(head, dtype, kind, seeds):
    limit = metamorphic.bound(head, dtype, ("uncut", "by hand", "widest"))
    for seed in seeds:
        errors = metamorphic.cut_errors(head, dtype, kind, metamorphic.OF_CUT, random.Random(seed))
        assert errors[0] <= limit[0]
        assert errors[1] <= limit[1]
