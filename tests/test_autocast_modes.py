"""Autocast with less of what is done for speed: without any hint, without a mark, without a cut."""

import functools

import _metamorphic as metamorphic
import jax
import pytest
from _heads import HEADS, JUDGES
from _hinted import HINTED, hints
from _planned import dtypes, plan_of

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


def errors_without_hints(name, dtype):
    of = metamorphic.program(name)
    loss = autocast(of.loss(), metamorphic.POLICIES[dtype])
    fun = metamorphic.value_and_grad(loss, of.moving, metamorphic.SCALE[dtype])
    with hints.without(*hints.HINTS):
        jax.clear_caches()
        return metamorphic.errors(name, metamorphic.run(fun, of.leaves))


IN_BFLOAT16 = [*(head.name for head in JUDGES), *SOME_NETWORKS]
IN_FLOAT16 = ["contrastive", "router", "gru"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bf16") for name in IN_BFLOAT16), *((name, "f16") for name in IN_FLOAT16)],
)
def test_without_any_hint_a_program_is_as_exact_as_a_hand_cast(name, dtype):
    limit = metamorphic.bound(name, dtype, ("by hand", "widest"))
    loss, grads = errors_without_hints(name, dtype)
    assert loss <= limit[0]
    assert grads <= limit[1]


@pytest.mark.parametrize("name", [*OF_KIND["mark"], *OF_KIND["around"]])
def test_without_a_mark_explain_says_the_same(name):
    hinted = HINTED[name]

    def explained():
        loss = functools.partial(hinted.loss)  # of which nothing is remembered
        return explain(loss, hinted.policy)(*hinted.args).to_dict()

    before = explained()
    with hints.without(name):
        assert explained() == before


def losses():
    for name, hinted in HINTED.items():
        yield name, hinted.policy, hinted.loss, hinted.args
    for name in (*HEAD_NAMES, *SOME_NETWORKS):
        of = metamorphic.program(name)
        yield name, "bf16-mixed", of.loss(), of.leaves


LOSSES = {name: rest for name, *rest in losses()}


@pytest.mark.parametrize("name", LOSSES)
def test_without_cuts_every_decision_has_the_same_dtypes(name):
    policy, loss, args = LOSSES[name]

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
