"""Gradients that a function takes itself, inside autocast, through calls, loops and checkpoints.

JAX marks the equations of a backward pass as transposed. Of a call it marks the call alone: what
stands inside is told by `known/derivatives`, and then decided as if it were written out.
"""

import functools
import random

import _metamorphic as metamorphic
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _planned import Action, Planned
from _samples import normal
from _small import distance
from jax import lax

import mpjax

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


# -- the forward pass beside a backward pass -------------------------------------------------------

X_OF_A_NET = normal(0, 16, 24)
NET = normal(1, 24, 32, scale=0.2), normal(2, 32, 24, scale=0.2), normal(3, 24, 8)
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "sine": jnp.sin,
    "a square": jnp.square,
}


def _swiglu(x, up, down):
    gate, other = jnp.split(x @ up, 2, axis=-1)
    return x + (jax.nn.silu(gate) * other) @ down[:16]


def _attends(x, up, down):
    query, key = jnp.split(x @ up, 2, axis=-1)
    return x + jax.nn.softmax(query @ key.T / 4) @ x @ down[:24]


BLOCKS = {
    **{name: lambda x, up, down, f=f: f(x @ up) @ down for name, f in ACTIVATIONS.items()},
    "a silu behind a bias": lambda x, up, down: jax.nn.silu(x @ up + 0.1) @ down,
    "a gelu behind a bias": lambda x, up, down: jax.nn.gelu(x @ up + 0.1) @ down,
    "a gelu behind a norm": lambda x, up, down: x + jax.nn.gelu(jax.nn.standardize(x) @ up) @ down,
    "swiglu": _swiglu,
    "attention": _attends,
}


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", BLOCKS)
def test_law_of_derivatives_a_ratio_to_an_earlier_call_is_1(name, policy):
    """The forward pass beside a backward pass gives what it gives alone."""

    def log_probabilities(net, x):
        up, down, head = net
        return jax.nn.log_softmax(BLOCKS[name](x, up, down) @ head)

    def loss(net, x, old):
        ratios = jnp.exp(log_probabilities(net, x) - old)
        return jnp.mean(jnp.minimum(ratios * x[:, :8], jnp.clip(ratios, 0.8, 1.2))), ratios

    old = jax.jit(mpjax.autocast(log_probabilities, policy))(NET, X_OF_A_NET)
    inside = mpjax.autocast(jax.value_and_grad(loss, has_aux=True), policy)
    np.testing.assert_allclose(jax.jit(inside)(NET, X_OF_A_NET, old)[0][1], 1, atol=1e-5)


def _groups(loss):
    plan = Planned(jax.value_and_grad(loss), NET, X_OF_A_NET).plan
    return [step.group for step in plan.steps if step.group is not None]


def _repeats(group, others):
    theirs = {id(eqn) for other in others if other is not group for eqn in other.eqns}
    return any(id(eqn) in theirs for eqn in group.eqns)


@pytest.mark.parametrize("name", ["silu", "gelu", "exact gelu", "sine"])
def test_an_activation_stores_its_result_alone_for_the_backward_pass(name):
    """Its derivative is computed again from what the activation read."""

    def loss(net, x):
        up, down, head = net
        return jnp.mean((ACTIVATIONS[name](x @ up + 0.1) @ down @ head) ** 2)

    first, *_, last = groups = _groups(loss)
    assert [(low, full) for _, low, full in first.outputs] == [(True, False)]
    assert _repeats(last, groups)


def test_a_group_that_compares_computes_nothing_again():
    """Another kernel may give another last bit: no element would equal the stored maximum."""

    def loss(net, x):
        up, down, _ = net
        values = jax.nn.gelu(x @ up + 0.1).reshape(16, 4, 8)
        return jnp.mean(jax.nn.gelu(values.max(1)) @ down[:8])

    groups = _groups(loss)
    comparing = [g for g in groups if any(eqn.primitive.name == "eq" for eqn in g.eqns)]
    assert comparing
    assert not any(_repeats(g, groups) for g in comparing)
    right, got = (
        jax.jit(fun)(NET, X_OF_A_NET)[1]
        for fun in (jax.grad(loss), mpjax.autocast(jax.grad(loss), "bf16-mixed"))
    )
    assert distance(got, right) < 0.01


@pytest.mark.parametrize("name", ["gelu", "exact gelu"])
def test_the_derivative_of_a_gelu_reads_a_low_result(name):
    def loss(net, x):
        up, down, _ = net
        return jnp.mean(ACTIVATIONS[name](x @ up) @ down)

    inside = mpjax.autocast(jax.value_and_grad(loss), "bf16-mixed")
    jaxpr = jax.make_jaxpr(inside)(NET, X_OF_A_NET)
    first = next(e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general")
    assert first.outvars[0].aval.dtype == jnp.bfloat16
