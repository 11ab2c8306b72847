"""Injected failures, over ten models of five frameworks: what broke, where and in which pass."""

import _failing_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.numerics import diagnose

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
    pytest.mark.standard_promotion("linen, NNX and Haiku promote masks and counts implicitly"),
]


def edited(params, end, change):
    """Returns parameters with one leaf changed, the one whose path has this end."""
    leaves, treedef = jax.tree.flatten(params)
    flat = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
    paths = [path.removesuffix("/value") for path in paths]
    (place,) = [i for i, p in enumerate(paths) if p == end or p.endswith("/" + end)]
    leaves[place] = change(leaves[place])
    return jax.tree.unflatten(treedef, leaves)


def large(w):
    """Returns weights that float16 holds, with products that it does not."""
    return jnp.sign(w) * 6e4


def broken(name, injury):
    """Returns the loss, parameters, batch and loss scale of a model with an injury."""
    about = models.MODELS[name]
    loss, params = models.made(name)
    batch, kernels, scale = models.batch_of(about), about.kernels, 1.0
    if injury == "forward":
        params = edited(params, kernels["first"], large)
    elif injury == "scan":
        params = edited(params, kernels["mid"], lambda w: w.at[2].set(large(w[2])))
    elif injury == "remat":
        params = edited(params, kernels["mid"], large)
    elif injury == "backward" and about.stacked:
        batch["y"] = batch["y"] + 1e6  # a gradient of more than 1e5, at the head
    elif injury == "backward":
        params = edited(params, kernels["first"], lambda w: w * 1e-4)
        params = edited(params, kernels["mid"], large)
        batch["y"] = batch["y"] + 100
    elif injury == "scale":
        scale = 2.0**20
    elif injury == "data":
        batch["x"][(3,) * (batch["x"].ndim - 1) + (1,)] = np.nan
    elif injury == "parameter":
        params = edited(params, kernels["head"], lambda w: w.at[0, 0].set(np.nan))
    elif injury == "branch":
        batch["hot"] = True
    elif injury == "shard":
        loss = models.sharded(loss)
        if about.normed:
            batch["y"][5] = 1e6
        else:  # float16 holds the inputs
            batch["x"][5] = np.sign(batch["x"][5]) * 6e4
            params = edited(params, kernels["first"], lambda w: w * 10)
    return loss, params, batch, scale


# injury → the kinds of cause, the layer, the pass, and what else the first row says
EXPECTED = {
    "forward": ({"range"}, "first", "forward", {}),
    "backward": ({"gradient_range"}, "mid", "backward", {}),
    "scale": ({"loss_scale"}, "head", "backward", {}),
    "branch": ({"everywhere"}, "gate", "forward", {"branch": (1,), "operation": "sqrt"}),
    "remat": ({"range"}, "mid", "forward", {}),
    "scan": ({"range"}, "mid", "forward", {}),
    "shard": ({"range"}, "first", "forward", {"shard": 5}),
}
BY_MODEL = {
    "linen-mlp": "forward backward scale data parameter branch shard",
    "linen-cnn": "forward backward scale data",
    "linen-transformer": "forward backward scan",
    "nnx-mlp": "scale parameter branch shard",
    "nnx-stack": "backward parameter scan",
    "equinox-mlp": "forward data parameter branch shard",
    "haiku-mlp": "forward data branch shard",
    "haiku-stack": "backward parameter scan",
    "plain": "forward backward remat branch shard",
    "plain-scan": "backward scale scan",
}
CASES = [(model, injury) for model, injuries in BY_MODEL.items() for injury in injuries.split()]
IN_EACH_RUN = [
    ("linen-mlp", "parameter"),
    ("nnx-stack", "scan"),
    ("equinox-mlp", "branch"),
    ("plain", "remat"),
]


@pytest.mark.parametrize(
    ("model", "injury"),
    [pytest.param(*case, marks=[] if case in IN_EACH_RUN else pytest.mark.slow) for case in CASES],
)
def test_what_was_broken_is_named(model, injury):
    loss, params, batch, scale = broken(model, injury)
    report = diagnose(loss, "16-mixed", loss_scale=scale)(params, batch)
    assert not report.finite
    for row in report.rows:
        scopes = row.module.split("/")
        assert len(set(scopes)) == len(scopes)  # no module stands inside of itself
    about = models.MODELS[model]
    if injury in ("data", "parameter"):
        path = "batch/x" if injury == "data" else about.kernels["head"]
        assert (report.cause.kind, report.first) == ("leaf", ())
        (leaf,) = report.leaves
        assert leaf.module.removesuffix("/value").endswith(path)
        assert (leaf.nan, repr(leaf.module) in report.cause.text) == (1, True)
        return
    kinds, layer, phase, more = EXPECTED[injury]
    if (injury == "backward" and about.stacked) or (injury == "shard" and about.normed):
        kinds, layer, phase = {"gradient_range"}, "head", "backward"
    first = report.first[0]
    module = about.modules.get(layer, layer)
    assert report.cause.kind in kinds
    assert module in first.module.split("/")
    assert first.phase == phase
    assert first.where
    if injury == "scan":
        assert first.iteration == (about.rounds,)
    for name, value in more.items():
        assert getattr(first, name) == value
    if phase == "forward" and injury != "branch":
        assert first.operation in (about.operation, "convert_element_type")
        assert f"{{{first.module!r}: 'float32'}}" in report.cause.fix
    if injury == "remat":
        assert report.cause.fix.endswith("and its gradient is not finite.")
    if injury == "forward":
        policies = mpjax.PolicyMap("16-mixed", {first.module: "float32"})
        mended = diagnose(loss, policies, loss_scale=scale)(params, batch)
        assert first.module not in [row.module for row in mended.first if row.phase == "forward"]


def test_the_table_has_forty_failures_and_every_kind_in_several_models():
    assert len(CASES) >= 40
    injuries = [injury for _, injury in CASES]
    assert {*EXPECTED, "data", "parameter"} == set(injuries)
    assert all(injuries.count(injury) >= 4 for injury in set(injuries) - {"remat"})
