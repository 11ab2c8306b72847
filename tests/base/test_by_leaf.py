"""Leaves are reduced alone or several in a kernel: the same numbers, in the kernels of a step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._base import by_leaf
from mpjax._base.tree import leaves_finite

LAYERS = 6
SQUARES = by_leaf.Reduction(lambda x: jnp.sum(x * x), jnp.square, jnp.add, 0.0)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Compiles for this CPU what a GPU is given."""
    monkeypatch.setattr(by_leaf, "_apart", by_leaf._together)


def tree(value=1.0, dtype=jnp.float32):
    """Returns layers of a weight and a bias, and leaves that are like no other."""
    layer = {"w": np.full((3, 8), value), "b": np.full(8, value)}
    layers = [jax.tree.map(lambda x: jnp.asarray(x, dtype), layer) for _ in range(LAYERS)]
    return {
        "layers": layers,
        "scale": jnp.asarray(value, dtype),
        "count": jnp.arange(3),
        "turn": jnp.full((2, 2), value + 1j * value),
        "number": value,
        "empty": jnp.zeros((0, 3), dtype),
    }


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_each_leaf_alone_is_found(bad, dtype):
    sound = tree(dtype=dtype)
    assert leaves_finite(sound).all()
    leaves, structure = jax.tree.flatten(sound)
    check = jax.jit(leaves_finite)
    for place, leaf in enumerate(leaves):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.integer) or not np.size(leaf):
            continue
        spoilt = np.asarray(leaf).copy()
        spoilt.reshape(-1)[-1] = bad
        given = structure.unflatten([*leaves[:place], jnp.asarray(spoilt), *leaves[place + 1 :]])
        assert np.flatnonzero(~np.asarray(check(given))).tolist() == [place]
        counted = [i != place for i in range(len(leaves))]
        assert leaves_finite(given, counted).all()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_sums_are_those_of_each_leaf():
    weights = [np.random.default_rng(i).normal(size=(4, 5)).astype(np.float32) for i in range(7)]
    leaves = jax.tree_util.tree_leaves_with_path({f"layer{i}": w for i, w in enumerate(weights)})
    want = [np.sum(w.astype(np.float64) ** 2) for w in weights]
    paths = [path for path, _ in leaves]

    def sums(*arrays):
        return jnp.stack(by_leaf.reduced(SQUARES, list(zip(paths, arrays, strict=True))))

    np.testing.assert_allclose(jax.jit(sums)(*weights), want, rtol=1e-6)
    twice = [np.stack([w, 2 * w]) for w in weights]
    mapped = jax.jit(jax.vmap(sums, (*[0] * 6, None)))(*twice[:6], weights[6])
    pairs = [[1, 4 if i < 6 else 1] for i in range(7)]
    np.testing.assert_allclose(mapped, (np.array(pairs) * np.array(want)[:, None]).T, rtol=1e-6)
    grads = jax.grad(lambda *arrays: sums(*arrays).sum(), argnums=range(7))(*weights)
    for grad, w in zip(grads, weights, strict=True):
        np.testing.assert_allclose(grad, 2 * w)
    assert by_leaf.reduced(SQUARES, []) == []


@pytest.mark.usefixtures("as_on_a_gpu")
def test_shards_of_a_shard_map_are_checked_together():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def check(weights):
        return leaves_finite(weights)[None]

    each = jax.jit(jax.shard_map(check, mesh=mesh, in_specs=rows, out_specs=rows))
    weights = [np.ones((4, 3), np.float32) for _ in range(3)]
    weights[1][3, 0] = np.nan  # of the second shard
    assert each(weights).tolist() == [[True, True, True], [True, False, True]]


def operands_of_reductions(fun, *args, **options):
    """Returns how many arrays each `reduce` reads, in the program for a GPU."""
    text = jax.export.export(jax.jit(fun, **options), platforms=["cuda"])(*args).mlir_module()
    return [len(re.findall("init:", line)) for line in text.splitlines() if "reduce(" in line]


def test_like_layers_share_a_kernel_on_a_gpu_and_nothing_else_does():
    assert sorted(operands_of_reductions(leaves_finite, tree()["layers"])) == [2, 2, 4, 4]
    mixed = {"q": jnp.ones((4, 4)), "o": jnp.ones((4, 4)), "b": [jnp.ones(4), jnp.ones(5)]}
    assert operands_of_reductions(leaves_finite, mixed) == [1] * 4


def test_a_program_that_is_split_over_devices_reduces_each_leaf_alone():
    """XLA would gather each array for a reduction of several."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    layers = [jnp.ones((4, 4)) for _ in range(LAYERS)]
    split = operands_of_reductions(leaves_finite, layers, in_shardings=rows)
    assert split == [1] * LAYERS
    assert operands_of_reductions(leaves_finite, layers) == [4, 2]


def test_a_step_that_clips_computes_its_norm_once():
    """On CPUs and TPUs, where the metric's squares are those of `optax.clip_by_global_norm`."""

    def loss(params, batch):
        return sum(jnp.sum(p["w"] * batch) ** 2 + jnp.sum(p["b"]) for p in params)

    def sums(tx):
        step = mpjax.make_train_step(loss, tx, "32-true")
        state = jax.eval_shape(step.init, tree()["layers"])
        text = step.lower(state, jnp.ones((3, 8))).compile().as_text()
        return len(re.findall(r"= f32\[\]\S* reduce\(", text))

    clips = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    assert sums(clips) == sums(optax.sgd(0.1))
