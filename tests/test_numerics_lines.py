"""A row names the user's line, and beside it the line of the library that this called."""

import inspect
import json

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.numerics import compare, diagnose, exponents

pytestmark = pytest.mark.no_leak_check("a diagnosis holds what it traced")
X = jnp.full((2, 4), 1e3)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4, kernel_init=nn.initializers.constant(1e3))(x)  # here
        return h * 2


class NNX(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, kernel_init=nnx.initializers.constant(1e3), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x) * 2  # here


class Equinox(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.linear)(x) * 2  # here


def linen():
    return (lambda v, x: jnp.sum(Linen().apply(v, x))), Linen().init(jax.random.key(0), X)


def flax_nnx():
    graph, state = nnx.split(NNX())
    return (lambda s, x: jnp.sum(nnx.merge(graph, s)(x))), nnx.as_pure(state)


def equinox():
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    return (lambda m, x: jnp.sum(m(x))), jax.tree.map(
        lambda w: jnp.full(w.shape, 1e3), Equinox(linear)
    )


@pytest.mark.parametrize(
    ("model", "layer"),
    [(linen, Linen), (flax_nnx, NNX), (equinox, Equinox)],
    ids=["linen", "nnx", "equinox"],
)
def test_a_layer_of_a_library_is_at_the_line_that_calls_it(model, layer):
    loss, params = model()
    report = diagnose(loss, "16-mixed")(params, X)
    source, first = inspect.getsourcelines(layer)
    line = next(first + i for i, text in enumerate(source) if "# here" in text)
    row = report.first[0]
    assert row.where == f"test_numerics_lines.py:{line}"
    assert row.library.partition(":")[0] in ("linear.py", "_linear.py")
    assert row.where in str(report)
    assert json.loads(json.dumps(report.to_dict()))["first"][0]["library"] == row.library


def test_a_line_that_calls_jax_itself_has_no_library():
    report = diagnose(lambda w, x: jnp.sum(x @ w), "16-mixed")(jnp.full((4, 4), 1e3), X)
    assert report.first[0].where.startswith("test_numerics_lines.py:")
    assert report.first[0].library == ""


def test_a_loss_that_a_library_wrote_is_at_the_librarys_line():
    model = nn.Sequential([nn.Dense(4, kernel_init=nn.initializers.constant(1e3)), jnp.sum])
    row = diagnose(model.apply, "16-mixed")(model.init(jax.random.key(0), X), X).first[0]
    assert row.where == row.library
    assert row.where.startswith("linear.py:")


def test_what_has_no_name_is_told_apart_by_its_line():
    def loss(w, x):
        h = jnp.tanh(x @ w)  # first
        h = h.astype(jnp.float8_e4m3fn).astype(jnp.float32)  # second
        return jnp.mean(h)

    text, start = inspect.getsourcelines(loss)
    lines = [f"test_numerics_lines.py:{start + i}" for i in range(len(text))]
    w, x = jnp.eye(4) / 3, jnp.ones((2, 4))
    worst, *rest = [e for e in compare(loss, "bf16-mixed")(w, x).modules if e.phase == "forward"]
    assert (worst.module, worst.where) == ("", lines[2])
    assert {e.where for e in rest} == {lines[1], lines[3]}
    spreads = exponents(loss, "bf16-mixed")(w, x).spreads
    assert {s.module for s in spreads if s.kind == "activation"} >= {lines[1], lines[2]}
    assert lines[1] in str(compare(loss, "bf16-mixed")(w, x))
