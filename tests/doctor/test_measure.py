"""`measure`: what it times and compares, and what it advises."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._base.tree import distance
from mpjax._doctor import measure

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape).astype(np.float32))


@pytest.fixture(autouse=True)
def samples_are_short(monkeypatch):
    """A slow machine does not spend the budget, and a quick one is soon done."""
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.01)


PARAMS = {"w": normal(16, 8), "b": jnp.zeros(8)}
X = normal(4, 16)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def row(policy, *samples, memory=100, off=1e-3, **more):
    return measure.Timing(policy, samples, memory, off, off, **more)


# -- what is measured ----------------------------------------------------------------------------


def test_each_policy_has_times_memory_and_errors():
    report = mpjax.measure(loss_fn, budget=60)(PARAMS, X)
    assert [row.policy for row in report.rows] == list(measure.POLICIES)
    assert report.what == "value and gradient"
    assert report.reference == "float32"
    for each in report.rows:
        assert min(each.samples) > 0
        assert each.memory >= 4 * (16 * 8 + 8 + 4 * 16)
    f32, bf16, f16 = report.rows
    assert f32.gradient_error < 2**-20
    assert 2**-12 < bf16.gradient_error < 2**-6
    assert 2**-15 < f16.gradient_error < 2**-9
    assert (f32.loss_scale, bf16.loss_scale) == (1, 1)
    assert f16.loss_scale > 1


def test_errors_are_those_of_the_gradients_that_autocast_gives():
    report = mpjax.measure(loss_fn, ["32-true", "bf16-mixed"], budget=60)(PARAMS, X)
    low = jax.jit(jax.grad(mpjax.autocast(loss_fn, "bf16-mixed")))(PARAMS, X)
    with jax.default_matmul_precision("highest"):
        full = jax.jit(jax.grad(loss_fn))(PARAMS, X)
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (low, full)]
    want = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])
    assert report.rows[1].gradient_error == pytest.approx(want, rel=1e-3)


def test_of_a_module_with_functions_in_it_the_arrays_are_differentiated():
    mlp = eqx.nn.MLP(16, 4, 8, 1, key=jax.random.key(0))

    def loss(mlp, x):
        return jnp.mean(jax.vmap(mlp)(x) ** 2)

    report = mpjax.measure(loss, ["32-true", "bf16-mixed"], budget=60)(mlp, X)
    grads = eqx.filter_jit(eqx.filter_grad(mpjax.autocast(loss, "bf16-mixed")))(mlp, X)
    with jax.default_matmul_precision("highest"):
        full = eqx.filter_jit(eqx.filter_grad(loss))(mlp, X)
    low, exact = ([np.asarray(g) for g in jax.tree.leaves(tree)] for tree in (grads, full))
    off, whole = distance(low, exact)
    assert report.rows[1].gradient_error == pytest.approx(off / whole, rel=1e-3)


def test_with_64_bits_on_errors_are_against_float64():
    with jax.enable_x64(True):
        report = mpjax.measure(loss_fn, ["32-true"], budget=60)(PARAMS, X)
    assert report.reference == "float64"
    assert 0 < report.rows[0].gradient_error < 2**-18


def test_float16_gets_a_scale_with_which_gradients_are_finite():
    def steep(w, x):
        return jnp.sum((x @ w) * 3.0)  # a gradient of 3 times the scale: inf from 2**15 on

    report = mpjax.measure(steep, ["32-true", "16-mixed"], budget=60)(normal(16, 8), normal(4, 16))
    assert report.rows[1].gradient_error < 2**-8
    assert 1 < report.rows[1].loss_scale < 2**15


@pytest.mark.parametrize(
    ("fun", "args", "what"),
    [
        (lambda w, x: (jnp.sum(x @ w), {"aux": x}), (PARAMS["w"], X), "value and gradient"),
        (lambda x: jnp.sin(x), (X,), "value"),
        (lambda x, flag: jnp.sin(x) if flag else x, (X, True), "value"),
        (lambda tokens: jnp.sum(jnp.sin(tokens.astype(jnp.float32))), (jnp.arange(4),), "value"),
    ],
)
def test_losses_are_differentiated_and_other_functions_evaluated(fun, args, what):
    report = mpjax.measure(fun, ["32-true", "bf16-mixed"], budget=60)(*args)
    assert report.what == what
    assert (report.rows[0].gradient_error is None) == (what == "value")
    assert all(row.samples for row in report.rows)


def test_a_policy_that_fails_is_a_row_and_the_others_are_measured(monkeypatch):
    real = measure.autocast

    def short(fun, policy):
        if policy == "bf16-mixed":
            return lambda *args: (_ for _ in ()).throw(RuntimeError("RESOURCE_EXHAUSTED: 9 GB"))
        return real(fun, policy)

    monkeypatch.setattr(measure, "autocast", short)
    report = mpjax.measure(loss_fn, budget=60)(PARAMS, X)
    assert report.rows[1].failure == "out of memory"
    assert report.rows[1].samples == ()
    assert report.rows[2].samples
    assert "bf16-mixed: out of memory" in str(report)


def test_what_the_budget_does_not_reach_is_left_out_and_said():
    def slow(policies):
        for policy in policies:
            yield policy
            time.sleep(0.3)

    report = mpjax.measure(loss_fn, budget=0.1, track=slow)(PARAMS, X)
    assert report.rows[0].samples
    assert [row.failure for row in report.rows[1:]] == ["left out: the budget was spent"] * 2


def test_a_policy_has_the_name_that_it_was_made_by():
    given = ["32-true", mpjax.get_policy("16-mixed")]
    report = mpjax.measure(loss_fn, given, budget=0.001)(PARAMS, X)
    assert [row.policy for row in report.rows] == ["32-true", "16-mixed"]


def test_it_prints_as_a_table_and_as_plain_values():
    report = mpjax.measure(loss_fn, ["32-true", "bf16-mixed"], budget=60)(PARAMS, X)
    assert "loss_fn: value and gradient, measured on " in str(report)
    assert report.to_dict()["rows"][1]["policy"] == "bf16-mixed"
    assert "<table>" in report._repr_html_()
    assert repr(report).startswith("<Measurement of loss_fn: value and gradient, measured on ")


# -- what is advised -----------------------------------------------------------------------------

BASE = row("32-true", 2.0, 2.1, 2.2, 2.0, 2.1, 2.2, 2.1)


@pytest.mark.parametrize(
    ("other", "taken", "said"),
    [
        (row("bf16-mixed", *[1.0] * 7), "bf16-mixed", "2.10 times as fast, faster in 7 of 7"),
        (row("bf16-mixed", *[1.0] * 6, 9.0), "bf16-mixed", "faster in 6 of 7 rounds"),
        (row("bf16-mixed", *[1.0] * 5, 9.0, 9.0), "32-true", "none is faster here"),
        (row("bf16-mixed", *[3.0] * 7), "32-true", "none is faster here"),
        (row("bf16-mixed", *[3.0] * 7, memory=50), "32-true", "none is faster here"),
        (
            row("bf16-mixed", 2.1, 2.0, 2.3, 1.9, 2.2, 2.1, 2.1, memory=60),
            *("bf16-mixed", "for memory, 40% less: in time they are equal"),
        ),
        (row("bf16-mixed", *[1.0] * 7, off=float("nan")), "32-true", "gives inf or NaN"),
        (row("bf16-mixed", 1.0, 1.0), "32-true", "Not sure: fewer than 3 samples"),
        (measure.Timing("bf16-mixed", failure="out of memory"), "32-true", "Nothing else to take"),
        (row("16-mixed", *[1.0] * 7, loss_scale=512.0), "16-mixed", "a loss scale (512 was taken)"),
    ],
)
def test_advice_says_what_to_take_and_how_sure_that_is(other, taken, said):
    found, advice = measure.advise([BASE, other])
    assert found == taken
    assert said in " ".join(advice)
