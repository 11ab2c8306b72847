"""Autocast without any hint, without a mark, without a cut, and without any permission."""

import contextlib
import functools
from unittest import mock

import _metamorphic as metamorphic
import jax
import jax.numpy as jnp
import pytest
from _heads import HEADS, JUDGES
from _hinted import HINTED, hints
from _planned import Kind, Settings, api, dtypes, may, plan_of

from mpjax import autocast, explain

HEAD_NAMES = [head.name for head in HEADS]
SOME_NETWORKS = ("mlp", "gru", "graph")
OF_KIND = {
    kind: [name for name, hint in hints.HINTS.items() if hint.kind == kind]
    for kind in ("cut", "mark", "way", "around")
}

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.standard_promotion("heads are run in float64 too, with float32 literals"),
]


@contextlib.contextmanager
def without_permissions():
    with mock.patch.object(api, "Settings", functools.partial(Settings, may=frozenset())):
        yield


IN_BFLOAT16 = [*(head.name for head in JUDGES), *SOME_NETWORKS]
IN_FLOAT16 = ["contrastive", "router", "gru"]
WITHOUT = {
    "any hint": lambda: hints.without(*hints.HINTS),
    "any permission": without_permissions,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bf16") for name in IN_BFLOAT16), *((name, "f16") for name in IN_FLOAT16)],
)
@pytest.mark.parametrize("without", WITHOUT)
def test_without_any_a_program_is_as_exact_as_a_hand_cast(without, name, dtype):
    limit = metamorphic.bound(name, dtype, ("by hand", "widest"))
    of = metamorphic.program(name)
    with WITHOUT[without]():
        jax.clear_caches()
        loss = autocast(of.loss(), metamorphic.POLICIES[dtype])
        fun = metamorphic.value_and_grad(loss, of.moving, metamorphic.SCALE[dtype])
        of_loss, of_grads = metamorphic.errors(name, metamorphic.run(fun, of.leaves))
    assert of_loss <= limit[0]
    assert of_grads <= limit[1]


@pytest.mark.parametrize("name", [*OF_KIND["mark"], *OF_KIND["around"]])
def test_without_a_mark_explain_says_the_same(name):
    hinted = HINTED[name]

    def explained():
        loss = functools.partial(hinted.loss)  # of which nothing is remembered
        return explain(loss, hinted.policy)(*hinted.args).to_dict()

    before = explained()
    with hints.without(name):
        assert explained() == before


def normalised_branches(x, weights):
    """A stack whose branches are normalised before they are added, as in Swin V2 and Gemma 2."""
    x = x @ weights[0]
    for w in weights:
        branch = jax.nn.gelu(x @ w) @ w
        x = x + branch * jax.lax.rsqrt(jnp.mean(branch**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.mean((x @ weights[0]) ** 2)


def float32_branches(x, weights):
    """A stack that norms alone read, whose branches are float32 by their class."""
    x = x @ weights[0]
    for w in weights:
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        x = x + jnp.exp(-jnp.abs(normed @ w))
    normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.mean((normed @ weights[0]) ** 2)


def stack_of_layers(x, weights):
    """The same stack as a scan, with norms of its stream."""

    def layer(x, w):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(normed @ w) @ w, ()

    return jnp.mean((jax.lax.scan(layer, x @ weights[0], weights)[0] @ weights[0]) ** 2)


def gated_by_a_norm(x, weights):
    """An activation of a norm that both a mean and a product read."""
    y = x @ weights[0]
    y = jax.nn.silu(y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6))
    gate = jnp.mean(y, axis=0, keepdims=True) @ weights[1]
    return jnp.mean(((y * gate) @ weights[2]) ** 2)


STACKS = {
    "normalised branches": normalised_branches,
    "float32 branches": float32_branches,
    "gate of a norm": gated_by_a_norm,
    "stack of layers": stack_of_layers,
}
LOSSES = [*HINTED, *HEAD_NAMES, *SOME_NETWORKS, *STACKS]


@functools.cache
def written(name):
    """Returns the policy, the loss and the arguments of a program."""
    if name in HINTED:
        return HINTED[name].policy, HINTED[name].loss, HINTED[name].args
    if name in STACKS:
        return "bf16-mixed", STACKS[name], (jnp.ones((64, 32)), jnp.ones((3, 32, 32)) / 32)
    of = metamorphic.program(name)
    return "bf16-mixed", of.loss(), of.leaves


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSSES)
def test_without_cuts_every_decision_has_the_same_dtypes(name):
    policy, loss, args = written(name)

    def decided():
        jax.clear_caches()
        _traced, plan = plan_of(lambda *xs: loss(*xs), args, policy)
        return dtypes(plan)

    before = decided()
    for cut in OF_KIND["cut"]:
        with hints.without(cut):
            assert decided() == before, cut
    with hints.without(*OF_KIND["cut"]):
        assert decided() == before


# Permissions: without them nothing is lower than with them, and all laws hold.


@functools.cache
def lowered(name, **settings):
    """Returns of each value that is made, in order, whether it is low."""
    policy, loss, args = written(name)
    jax.clear_caches()
    _traced, plan = plan_of(lambda *xs: loss(*xs), args, policy, **settings)
    return [state.kind == Kind.LOW for *_, states in dtypes(plan) for state in states]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSSES)
def test_without_a_permission_nothing_is_lower(name):
    granted = lowered(name)
    for taken in (frozenset({permission}) for permission in may.ALL):
        for low, was_low in zip(lowered(name, may=may.ALL - taken), granted, strict=True):
            assert was_low or not low, taken
    without = lowered(name, may=frozenset())
    assert all(was or not low for low, was in zip(without, granted, strict=True))


LOWERED_BY = {
    may.STREAMS: "float32 branches",
    may.STREAM_CARRIES: "stack of layers",
    may.NORMS: "gate of a norm",
    may.READ: "float32 branches",
}


def test_each_permission_lowers_something():
    assert LOWERED_BY.keys() == may.ALL
    for permission, name in LOWERED_BY.items():
        assert lowered(name) != lowered(name, may=may.ALL - {permission}), permission
