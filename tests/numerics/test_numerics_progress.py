"""Questions say where their time goes; small programs run operation by operation."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax.nnx
from mpjax import numerics
from mpjax.numerics import _program

pytestmark = pytest.mark.no_leak_check("a diagnosis holds what it traced")
SGD = optax.sgd(0.1)
W, X = jnp.eye(4) / 3, jnp.ones((2, 4))


def loss(w, x):
    with jax.named_scope("layer"):
        return jnp.sum(jnp.tanh(x @ w))


ASKED = {
    "diagnose": lambda **more: numerics.diagnose(loss, "bf16-mixed", **more),
    "compare": lambda **more: numerics.compare(loss, "bf16-mixed", **more),
    "exponents": lambda **more: numerics.exponents(loss, "bf16-mixed", **more),
    "suggest": lambda **more: numerics.suggest(loss, "bf16-mixed", tolerance=1e-4, **more),
}


@pytest.mark.parametrize("name", ASKED)
def test_each_stage_is_said_and_timed(name):
    lines = []
    report = ASKED[name](progress=lines.append)(W, X)
    assert lines[:2] == [f"numerics.{name}: tracing ...", f"numerics.{name}: running ..."]
    stages = {"tracing", "running", *(("compiling", "counting bytes") * (name == "suggest"))}
    assert set(report.seconds) == stages
    assert all(seconds >= 0 for seconds in report.seconds.values())
    (took,) = [line for line in str(report).splitlines() if "took " in line]
    assert all(f"{stage} " in took for stage in stages)
    assert report.to_dict()["seconds"] == report.seconds


@pytest.mark.parametrize("name", ASKED)
def test_nobody_looks_nothing_is_said(name, capsys):
    ASKED[name]()(W, X)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("of_nnx", [False, True])
def test_a_diagnosis_of_a_step_says_its_stages_where_it_is_asked_to(of_nnx):
    lines = []
    if of_nnx:
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        step = mpjax.nnx.make_train_step(model, SGD, "16-mixed", lambda m, x: jnp.mean(m(x)))
        state = step.init()
    else:
        step = mpjax.make_train_step(loss, SGD, "16-mixed")
        state = step.init(W)
    step.diagnose(state, X, progress=lines.append)
    assert lines[0] == "step.diagnose: tracing ..."


def test_a_terminal_is_told(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ASKED["compare"]()(W, X)
    assert capsys.readouterr().err.startswith("numerics.compare: tracing ...\n")
    ASKED["compare"](progress=False)(W, X)
    assert capsys.readouterr() == ("", "")


# -- operation by operation, or compiled as one ----------------------------------------------------


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def everything(w, x):
    """A loop, a branch, a checkpoint, a derivative of its own, integers and random numbers."""

    def body(h, i):
        with jax.named_scope("loop"):
            h = jnp.tanh(clipped(h) @ w)
            return jax.lax.cond(i > 1, lambda h: h * 2, lambda h: h + 1, h), h.sum()

    def head(h):
        with jax.named_scope("head"):
            return jax.nn.softmax(h @ w.T)

    h, sums = jax.lax.scan(body, x, jnp.arange(3))
    noise = jax.random.normal(jax.random.key(0), h.shape)
    return jnp.mean(jax.checkpoint(head)(h + noise) ** 2) + sums.mean()


def both(monkeypatch, ask):
    """Returns a report by operations, and one of the compiled program."""
    by_operations = ask()
    monkeypatch.setattr(_program, "SMALL", -1)
    return by_operations, ask()


def test_a_small_program_is_not_compiled(monkeypatch):
    few, one = both(monkeypatch, lambda: numerics.compare(loss, "bf16-mixed")(W, X))
    assert ("compiling" in few.seconds, "compiling" in one.seconds) == (False, True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [2.0**20, 1.0], ids=["overflow", "finite"])
@pytest.mark.ci
def test_a_diagnosis_is_the_same_either_way(scale, monkeypatch):
    few, one = both(monkeypatch, lambda: numerics.diagnose(everything, "16-mixed")(W * scale, X))
    assert len(few.rows) == len(one.rows) > 30
    for a, b in zip(few.rows, one.rows, strict=True):
        exact = [dataclasses.replace(row, amax=0, headroom=0) for row in (a, b)]
        assert exact[0] == exact[1]
        assert a.amax == pytest.approx(b.amax, rel=2**-7)  # one rounding of a bfloat16 product
    assert few.cause.kind == one.cause.kind
    assert few.bad_gradients == one.bad_gradients


@pytest.mark.ci
def test_errors_are_the_same_either_way(monkeypatch):
    few, one = both(monkeypatch, lambda: numerics.compare(everything, "bf16-mixed")(W, X))
    found = [{(e.module, e.phase): e.local for e in r.modules if e.module} for r in (few, one)]
    assert (
        found[0].keys()
        == found[1].keys()
        == {(m, p) for m in ("loop", "head") for p in ("forward", "backward")}
    )
    for key, error in found[0].items():
        assert error == pytest.approx(found[1][key], rel=0.05), key


def test_a_suggestion_is_confirmed_by_the_compiled_program(monkeypatch):
    found = numerics.suggest(everything, "bf16-mixed", tolerance=5e-3)(W, X)
    last = found.tried[-1]
    assert last.compiled
    assert (last.error, set(last.full)) == (found.error, set(found.full))
    assert found.error <= 5e-3
    assert any(not tried.compiled for tried in found.tried)


def test_modules_are_added_where_the_compiled_program_needs_them(monkeypatch):
    from mpjax.numerics._search import Search

    real = Search.error

    def error(self, full, *, compiled=False):
        found = real(self, full, compiled=compiled)
        if not compiled:
            return 0.0  # as if nothing rounded, operation by operation
        return found

    monkeypatch.setattr(Search, "error", error)
    found = numerics.suggest(everything, "bf16-mixed", tolerance=1e-4)(W, X)
    assert found.error <= 1e-4
    assert found.full
