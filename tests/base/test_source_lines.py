"""A row names the user's own line, and beside it the library's; in a notebook, the cell."""

import inspect
import json
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
from mpjax.numerics import compare, diagnose, exponents

X, HUGE = jnp.full((2, 4), 1e3), jax.nn.initializers.constant(1e3)  # 4e6, beyond float16


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, kernel_init=HUGE)(x)  # here


class NNX(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, kernel_init=HUGE, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x)  # here


class Equinox(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.linear)(x)  # here


def equinox():
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    return jax.tree.map(lambda w: jnp.full(w.shape, 1e3), Equinox(linear))


def optax_loss(w, x):
    return optax.softmax_cross_entropy(x @ w, x).mean()  # here


LAYERS = {
    "linen": (Linen, lambda: (Linen().apply, Linen().init(jax.random.key(0), X))),
    "nnx": (NNX, lambda: (lambda model, x: model(x), NNX())),
    "equinox": (Equinox, lambda: (lambda model, x: model(x), equinox())),
}
MODELS = LAYERS | {"optax": (optax_loss, lambda: (optax_loss, jnp.eye(4)))}


def here(source):
    lines, first = inspect.getsourcelines(source)
    line = next(first + i for i, text in enumerate(lines) if "# here" in text)
    return f"test_source_lines.py:{line}"


@pytest.mark.parametrize("name", MODELS)
def test_explain_names_the_line_that_calls_a_library(name):
    source, make = MODELS[name]
    fun, params = make()
    table = mpjax.explain(fun, "bf16-mixed")(params, X)
    assert {_short(row.where) for row in table.rows} == {here(source)}
    assert here(source) in str(table)


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
@pytest.mark.parametrize("name", LAYERS)
def test_a_diagnosis_names_that_line_and_the_librarys_beside_it(name):
    source, make = LAYERS[name]
    fun, params = make()
    report = diagnose(lambda params, x: jnp.sum(fun(params, x)), "16-mixed")(params, X)
    row = report.first[0]
    assert row.where == here(source)
    assert row.library.partition(":")[0] in ("linear.py", "_linear.py")
    assert row.where in str(report)
    assert json.loads(json.dumps(report.to_dict()))["first"][0]["library"] == row.library


def _short(where):
    return where.rpartition("/")[2].partition(" ")[0]


def test_a_function_of_a_library_itself_has_the_librarys_line():
    where = mpjax.explain(optax.safe_norm, "bf16-mixed")(X, 1e-3).rows[0].where
    assert "optax" in where


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_a_line_that_calls_jax_itself_has_no_library():
    report = diagnose(lambda w, x: jnp.sum(x @ w), "16-mixed")(jnp.full((4, 4), 1e3), X)
    assert report.first[0].where.startswith("test_source_lines.py:")
    assert report.first[0].library == ""


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_a_loss_that_a_library_wrote_is_at_the_librarys_line():
    model = nn.Sequential([nn.Dense(4, kernel_init=nn.initializers.constant(1e3)), jnp.sum])
    row = diagnose(model.apply, "16-mixed")(model.init(jax.random.key(0), X), X).first[0]
    assert row.where == row.library
    assert row.where.startswith("linear.py:")


@pytest.mark.no_leak_check("a diagnosis holds what it traced")
def test_what_has_no_name_is_told_apart_by_its_line():
    def loss(w, x):
        h = jnp.tanh(x @ w)  # first
        h = h.astype(jnp.float8_e4m3fn).astype(jnp.float32)  # second
        return jnp.mean(h)

    text, start = inspect.getsourcelines(loss)
    lines = [f"test_source_lines.py:{start + i}" for i in range(len(text))]
    w, x = jnp.eye(4) / 3, jnp.ones((2, 4))
    worst, *rest = [e for e in compare(loss, "bf16-mixed")(w, x).modules if e.phase == "forward"]
    assert (worst.module, worst.where) == ("", lines[2])
    assert {e.where for e in rest} == {lines[1], lines[3]}
    spreads = exponents(loss, "bf16-mixed")(w, x).spreads
    assert {s.module for s in spreads if s.kind == "activation"} >= {lines[1], lines[2]}
    assert lines[1] in str(compare(loss, "bf16-mixed")(w, x))


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
    report = compare(names["loss"], "bf16-mixed")(jnp.eye(4), X)
    assert {e.where for e in report.modules} == {"In[3]:2"}


def test_a_prompt_without_ipython_shows_its_file():
    assert source_lines.cell("<stdin>") == "<stdin>"


def test_files_of_the_package_that_are_looked_past_are_where_they_are_said_to_be():
    """They are named by path: a file that moves would be taken for a user's."""
    assert Path(mpjax.__file__).parent == Path(source_lines.OURS)
    assert [path for path in source_lines.WRAPPED if not Path(path).is_file()] == []
