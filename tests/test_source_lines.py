"""A row names the user's own line: behind Flax, Equinox and optax, and in a notebook's cell."""

import inspect
import sys
import types
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._base import source_lines

X = jnp.ones((2, 4))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)  # here


class NNX(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)  # here


class Equinox(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.linear)(x)  # here


def optax_loss(w, x):
    return optax.softmax_cross_entropy(x @ w, x).mean()  # here


MODELS = {
    "linen": (Linen, lambda: (Linen().apply, Linen().init(jax.random.key(0), X))),
    "nnx": (NNX, lambda: (lambda model, x: model(x), NNX())),
    "equinox": (
        Equinox,
        lambda: (lambda m, x: m(x), Equinox(eqx.nn.Linear(4, 4, key=jax.random.key(0)))),
    ),
    "optax": (optax_loss, lambda: (optax_loss, jnp.eye(4))),
}


def here(source):
    lines, first = inspect.getsourcelines(source)
    return next(first + i for i, text in enumerate(lines) if "# here" in text)


@pytest.mark.parametrize("name", MODELS)
def test_explain_names_the_line_that_calls_a_library(name):
    source, make = MODELS[name]
    fun, params = make()
    table = mpjax.explain(fun, "bf16-mixed")(params, X)
    assert {_short(row.where) for row in table.rows} == {f"test_source_lines.py:{here(source)}"}
    assert f"test_source_lines.py:{here(source)}" in str(table)


def _short(where):
    return where.rpartition("/")[2].partition(" ")[0]


def test_a_function_of_a_library_itself_has_the_librarys_line():
    where = mpjax.explain(optax.safe_norm, "bf16-mixed")(X, 1e-3).rows[0].where
    assert "optax" in where


CELL = "/tmp/ipykernel_7/123.py"


@pytest.fixture
def notebook(monkeypatch):
    """IPython with one cell, as far as it is asked here."""
    known = {CELL: ("Cell", "In[3]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=known.get))
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    source_lines.of.cache_clear()
    yield
    source_lines.of.cache_clear()


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_a_line_of_a_notebook_is_its_cell_and_line(notebook):
    names = {"jnp": jnp}
    exec(compile("def loss(w, x):\n    return jnp.sum(jnp.tanh(x @ w))\n", CELL, "exec"), names)
    table = mpjax.explain(names["loss"], "bf16-mixed")(jnp.eye(4), X)
    assert {row.where for row in table.rows} == {"In[3]:2 (loss)"}
    assert "In[3]:2" in str(table)
    report = mpjax.numerics.compare(names["loss"], "bf16-mixed")(jnp.eye(4), X)
    assert {e.where for e in report.modules} == {"In[3]:2"}


def test_a_prompt_without_ipython_shows_its_file():
    assert source_lines.cell("<stdin>") == "<stdin>"


def test_files_of_the_package_that_are_looked_past_are_where_they_are_said_to_be():
    """They are named by path: a file that moves would be taken for a user's."""
    assert Path(mpjax.__file__).parent == Path(source_lines.OURS)
    assert [path for path in source_lines.WRAPPED if not Path(path).is_file()] == []
