"""`diagnose` names what was not finite first, where it went, and what to type; or why it cannot."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.numerics import diagnose

pytestmark = [
    pytest.mark.no_leak_check("it traces everything anew: twice the time, same programs"),
]

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def params():
    return {"w": jnp.full((4, 6), 0.3), "v": jnp.full((6, 2), 0.3)}


def loss_fn(params, batch):
    with jax.named_scope("up"):
        h = jnp.tanh(batch["x"] @ params["w"])
    with jax.named_scope("down"):
        y = h @ params["v"]
    return jnp.mean((y - batch["y"]) ** 2)


def batch(**other):
    return {"x": X, "y": X[:, :2]} | other


def make(policy="16-mixed", **options):
    return mpjax.make_train_step(loss_fn, optax.sgd(1e-3), policy, **options)


# -- causes ------------------------------------------------------------------------------------


def saturated(params, x):
    with jax.named_scope("gate"):
        p = jax.nn.sigmoid(x @ params)
    with jax.named_scope("head"):
        return -jnp.mean(jnp.log1p(-p))


def test_a_probability_that_was_rounded_to_1_is_no_matter_of_range():
    args = jnp.full((64, 4), 0.2), jnp.ones((8, 64))  # logits of 12.8: 1 in float16
    cause = diagnose(saturated, "16-true")(*args).cause
    assert cause.kind == "precision"
    assert "an operand was rounded, as a probability to 1" in cause.text
    assert cause.fix == (
        "Use '16-mixed', whose parameters are float32, or use 'bf16-mixed', whose parameters are "
        "float32."
    )
    assert diagnose(saturated, "16-mixed")(*args).finite


def test_a_policy_that_would_be_silently_wrong_is_not_advised():
    with mock.patch("mpjax.numerics._advice._LOSS_OFF", -1.0):  # no loss is near enough
        args = jnp.full((64, 4), 0.2), jnp.ones((8, 64))
        fix = diagnose(saturated, "16-true")(*args).cause.fix
    assert fix.startswith("Use 'float32'. Do not use '16-mixed'")
    assert "Do not use 'bf16-mixed', whose parameters are float32: its loss is 12.8" in fix


def test_a_rounding_that_the_function_asks_for_is_named_instead_of_blaming_the_operand():
    def rounded(params, x):
        p = jax.nn.sigmoid(x @ params).astype(jnp.bfloat16)
        return -jnp.mean(jnp.log1p(-p.astype(jnp.float32)))

    cause = diagnose(rounded, "bf16-mixed")(jnp.full((64, 4), 0.2), jnp.ones((8, 64))).cause
    assert cause.kind == "everywhere"
    assert "itself rounds what that reads, to bf16 by convert_element_type" in cause.text
    assert cause.fix.startswith("Leave that cast out")


def test_a_loss_scale_that_is_too_high_is_named_with_the_one_that_fits():
    step = make(loss_scale=mpjax.DynamicLossScale(2.0**24))
    state, metrics = step(step.init(params()), batch())
    assert not metrics["grads_finite"]
    report = step.diagnose(state, batch(), metrics)
    first = report.first[0]
    assert (first.module, first.phase) == ("down", "backward")
    assert report.loss_scale == 2.0**24  # the scale of the skipped step, not of the state
    assert report.cause.kind == "loss_scale"
    fitting = report.cause.loss_scale
    assert f"DynamicLossScale({fitting:g})" in report.cause.fix
    for scale, finite in ((fitting, True), (2 * fitting, False)):
        start = make(loss_scale=mpjax.DynamicLossScale(scale)).init(params())
        assert step(start, batch())[1]["grads_finite"] == finite


@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed", "float32"])
@pytest.mark.parametrize(("dtype", "limit"), [("float16", 65504), ("float8_e4m3fn", 448)])
def test_a_cast_of_the_function_itself_is_not_to_be_mended_by_a_policy(policy, dtype, limit):
    def loss(w, x):
        with jax.named_scope("cell"):
            h = jnp.tanh(x @ w) * 1e5
            h = h.astype(dtype).astype(jnp.float32)
        return jnp.mean(h)

    cause = diagnose(loss, policy)(jnp.ones((8, 8)), jnp.ones((4, 8))).cause
    assert cause.kind == "range"
    assert f"(1e+05) passes {limit}" in cause.text
    assert "The function itself asks for" in cause.fix
    assert "PolicyMap" not in cause.fix


def low_alone(w, x):
    with jax.named_scope("norm"):
        small = jax.nn.sigmoid(x @ w - 20) @ jnp.ones((8, 8))  # 0 in float16
        return jnp.mean(small / jnp.linalg.norm(small, axis=1, keepdims=True)) * 1e-4


def cause_of_low_alone(policy):
    args = jnp.full((4, 8), 1e-4), jnp.abs(jnp.asarray(X)) + 1
    return diagnose(low_alone, policy, loss_scale=1)(*args).cause


def test_what_only_low_precision_makes_is_told_from_it():
    cause = cause_of_low_alone("16-mixed")
    assert cause.kind == "precision"
    assert "{'norm': 'float32'}" in cause.fix


def test_advice_calls_policies_by_the_names_that_were_typed():
    assert "mpjax.PolicyMap('16-mixed', {" in cause_of_low_alone("16-mixed").fix
    policies = mpjax.PolicyMap("mixed_float16", {"head": "O0"})
    with pytest.warns(mpjax.PolicyWarning, match="head"):  # there is none
        fix = cause_of_low_alone(policies).fix
    assert "mpjax.PolicyMap('mixed_float16', {'norm': 'float32', 'head': 'O0'})" in fix


@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed"])
def test_no_policy_is_advised_where_float32_overflows_too(policy):
    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)

    fix = diagnose(loss, policy)(jnp.eye(4) * 2.0**118, jnp.full((2, 4), 2.0**-7)).cause.fix
    assert "float32'" not in fix
    assert re.search("No policy mends that: look at the batch|no precision helps", fix)


def test_a_row_that_a_mask_covers_as_a_whole_is_told():
    def loss(w, x, mask):
        with jax.named_scope("attention"):
            return jnp.sum(jax.nn.softmax(jnp.where(mask, x @ w, -jnp.inf)) ** 2)

    mask = np.ones((8, 4), bool)
    fine = diagnose(loss, "bf16-mixed")(jnp.ones((4, 4)), X, mask)
    assert fine.finite
    mask[2] = False
    report = diagnose(loss, "bf16-mixed")(jnp.ones((4, 4)), X, mask)
    assert report.cause.kind == "masked"
    assert "attention" in report.cause.text


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed"])
def test_an_inf_among_data_is_told_from_a_mask(policy, value):
    def loss(w, batch):
        h = batch["x"] @ w["w"] @ jnp.ones((2, 2))
        return jnp.mean((jnp.tanh(h) - 1 + 0 * batch["mask"]) ** 2)

    mask = jnp.zeros((8, 1))
    report = diagnose(loss, policy)(
        {"w": jnp.ones((4, 2))}, {"x": jnp.asarray(X).at[0, 0].set(value), "mask": mask}
    )
    assert report.cause.kind == "leaf"
    assert "'batch/x' came in with 1 inf" in report.cause.text
    assert "If it is a mask" in report.cause.fix
    report = diagnose(loss, policy)(
        {"w": jnp.ones((4, 2))}, {"x": X, "mask": mask.at[0].set(value)}
    )
    assert report.cause.kind == "masked"
    assert "'batch/mask'" in report.cause.text


def test_a_scale_too_high_names_the_dtype_in_which_a_product_reads_the_cotangent():
    """The product's result is float32, as the last one of few columns: it rounds the cotangent."""

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params[0]) @ params[1] - 1) ** 2)

    params = [jnp.ones((4, 64)), jnp.ones((64, 1))]
    cause = diagnose(loss, "16-mixed", loss_scale=2.0**24)(params, X).cause
    assert cause.kind == "loss_scale"
    assert "a cotangent in dot_general" in cause.text
    assert "passes 65504." in cause.text


def test_a_gradient_beyond_range_at_scale_1_is_told_from_a_scale_too_high():
    def loss(w, x):
        with jax.named_scope("steep"):
            y = x @ w
        return jnp.sum(y) * 1e6

    report = diagnose(loss, "16-mixed", loss_scale=1024)(jnp.ones((4, 2)), X)
    assert report.cause.kind == "gradient_range"
    assert "A loss scale of 1 is too high as well" in report.cause.text
    # One below 1 does fit: nothing may be said of all scales.
    assert diagnose(loss, "16-mixed", loss_scale=2.0**-8)(jnp.ones((4, 2)), X).finite
    assert "No loss scale" not in report.cause.text


@pytest.mark.parametrize("jit", [False, True])
def test_an_index_out_of_range_is_named_as_that(jit):
    def loss(w, ids):
        with jax.named_scope("embed"):
            take = jax.jit(jnp.take, static_argnames="axis") if jit else jnp.take
            h = take(w, ids, axis=0)
        return jnp.mean(jnp.tanh(h) ** 2)

    report = diagnose(loss, "bf16-mixed")(jnp.ones((4, 2)), jnp.array([0, 4]))
    assert (report.first[0].module, report.first[0].operation) == ("embed", "gather")
    assert "an index is out of range" in report.cause.text
    assert "indices" in report.cause.fix
    assert "division" not in report.cause.fix
    assert diagnose(loss, "bf16-mixed")(jnp.ones((4, 2)), jnp.array([0, 3])).finite


def test_a_weight_beyond_range_is_not_called_an_activation():
    report = diagnose(lambda w, x: jnp.mean((x @ w) ** 2), "16-mixed")(jnp.full((4, 2), 1e5), X)
    assert report.cause.kind == "range"
    assert report.cause.text.startswith("a value (1e+05) passes 65504, the largest f16")


def test_a_parameter_that_nothing_reads_may_hide_its_nan_so():
    report = diagnose(lambda w, x: jnp.sum(x @ w["used"]), "bf16-mixed")(
        {"used": jnp.ones((4, 2)), "unused": jnp.full(3, jnp.nan)}, X
    )
    assert report.cause.kind == "leaf"
    assert "or nothing reads it" in report.cause.text


# -- what is benign ------------------------------------------------------------------------------


def test_guarded_and_masked_values_are_not_the_cause():
    def loss(w, x):
        with jax.named_scope("guarded"):
            a = jnp.where(x > 100, jnp.exp(x * 1000), 0.0)  # inf that is never chosen
        with jax.named_scope("masked"):
            scores = jnp.where(jnp.arange(4) < 2, x @ w, -jnp.inf)
            b = jax.nn.softmax(scores)
        with jax.named_scope("culprit"):
            c = jnp.exp(jnp.sum(x * x) * 1e6 + jnp.sum(w) * 0)
        return jnp.sum(a) + jnp.sum(b) + c

    report = diagnose(loss, "bf16-mixed")(jnp.ones((4, 4)), X)
    assert [(r.module, r.operation) for r in report.first[:1]] == [("culprit", "exp")]
    assert not any(r.module == "guarded" for r in report.first)
    apart = [r for r in report.rows if r.origin == "apart"]
    assert ("guarded", "exp") in [(r.module, r.operation) for r in apart]
    assert "apart, for it never got into" in str(report)


def test_gradients_that_were_taken_without_the_loss_scale_are_named():
    tx = mpjax.with_loss_scale(optax.sgd(1e-3), mpjax.DynamicLossScale())
    scale = mpjax.current_loss_scale(tx.init(params()))
    small = batch(x=X * 0.01)
    loss = mpjax.autocast(loss_fn, "16-mixed")
    both = jax.jit(lambda p, b: (jax.grad(loss)(p, b), mpjax.grad(loss, loss_scale=scale)(p, b)))
    plain, scaled = both(params(), small)
    report = diagnose(loss_fn, "16-mixed", loss_scale=scale, grads=plain)(params(), small)
    assert report.cause.kind == "unscaled"
    assert "updates are 32768 times too small" in report.cause.text
    assert "loss_scale=mpjax.current_loss_scale(opt_state)" in str(report)
    report = diagnose(loss_fn, "16-mixed", loss_scale=scale, grads=scaled)(params(), small)
    assert report.cause.kind == "none"
    with pytest.raises(ValueError, match=r"diagnose\(grads\): got 1 gradients(.|\n)*tx.update"):
        diagnose(loss_fn, "16-mixed", grads=[X])(params(), small)


def test_a_finite_run_gives_its_headroom():
    report = diagnose(loss_fn, "16-mixed", loss_scale=256)(params(), batch())
    assert report.finite
    assert report.cause.kind == "none"
    assert "nothing non-finite" in str(report)
    least = min((r for r in report.rows if r.dtype == "f16"), key=lambda r: r.headroom)
    assert least.headroom == pytest.approx(np.log2(65504) - np.log2(least.amax))
    assert f"{least.headroom:.1f} bits" in str(report)


# -- how it is shown -----------------------------------------------------------------------------


def test_a_report_fits_a_screen_and_goes_into_json_and_a_notebook():
    import json

    def deep(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"a_rather_long_module_name_{i}/and_one_inside_of_it/dense"):
                x = x @ w
        return jnp.sum(x)

    ws = [jnp.full((4, 4), 50.0)] * 30
    report = diagnose(deep, "16-mixed")(ws, X)
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines[:-2])) <= 118  # the advice may be longer
    assert len(report.rows) > 100
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["first"][0]["module"] == report.first[0].module
    assert "<table>" in report._repr_html_()


def test_a_model_without_names_has_rows_by_source_line():
    report = diagnose(lambda w, x: jnp.sum(x @ w), "16-mixed")(jnp.full((4, 4), 1e5), X)
    assert report.first[0].module == ""
    assert report.first[0].where.startswith("test_numerics_diagnose.py:")
    assert "named_scope" in report.cause.fix


def test_accumulation_tells_the_micro_batch():
    x = np.concatenate([X, X * 2e6, X])
    whole = {"x": x, "y": np.concatenate([X[:, :2]] * 3)}
    step = make(accumulate=3)
    state, metrics = step(step.init(params()), whole)
    report = step.diagnose(state, whole, metrics)
    assert (report.first[0].module, report.first[0].iteration) == ("up", (1,))


def test_extra_state_and_aux_take_part():
    def loss(p, extra, b):
        return loss_fn(p, b) * extra["gain"], ({"gain": extra["gain"] * 2}, {"seen": 1})

    step = mpjax.make_train_step(loss, optax.sgd(1e-3), "bf16-mixed", has_aux=True)
    state = step.init(params(), {"gain": jnp.float32(np.inf)})
    state, metrics = step(state, batch())
    report = step.diagnose(state, batch(), metrics)
    assert "'extra_state/gain'" in report.cause.text


def test_it_works_on_a_sharded_state_and_batch(devices):
    mesh = jax.sharding.Mesh(np.array(devices), "d")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = X.copy()
    x[5] *= 2e6
    placed = jax.device_put({"x": x, "y": X[:, :2].copy()}, spread)
    step = make()
    state = jax.device_put(
        step.init(params()), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    )
    state, metrics = step(state, placed)
    report = step.diagnose(state, placed, metrics)
    assert (report.cause.kind, report.first[0].module) == ("range", "up")


# -- bad input -----------------------------------------------------------------------------------


def test_state_without_metrics_is_looked_at_under_the_scale_that_it_has():
    step = make(loss_scale=mpjax.DynamicLossScale(512.0))
    report = step.diagnose(step.init(params()), batch())
    assert (report.loss_scale, report.finite) == (512.0, True)


# -- what is not finite and never gets anywhere ----------------------------------------------------


HIDING = {
    "tanh": lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) ** 2),
    "minimum": lambda p, x: jnp.mean(jnp.minimum(x @ p["w"], 3.0)),
    "where": lambda p, x: jnp.mean(jnp.where(jnp.isfinite(p["w"]), p["w"], 0.0)) * jnp.sum(x),
    "not read": lambda p, x: jnp.mean(x * p["v"]),
}


@pytest.mark.parametrize("policy", ["bf16-mixed", "float32"])
@pytest.mark.parametrize("name", HIDING)
def test_a_parameter_that_hides_its_inf_is_named_all_the_same(name, policy):
    params = {"w": jnp.ones((8, 8)).at[:, 0].set(jnp.inf), "v": jnp.float32(1)}
    report = diagnose(HIDING[name], policy)(params, jnp.ones((4, 8)))
    assert report.finite
    assert report.cause.kind == "leaf"
    assert report.cause.text.startswith("the parameter 'p/w' holds 8 inf among 64 elements")
    assert "the argument 'p/w' (8 inf of 64)" in str(report)
    step = mpjax.make_train_step(HIDING[name], optax.sgd(0.1), policy)
    with pytest.raises(ValueError, match="'w' is not finite"):
        step.init(params)


def test_a_mask_that_stays_where_it_was_is_mentioned_and_blamed_for_nothing():
    def loss(p, mask):
        return jnp.mean(jax.nn.softmax(p["w"] + mask)[:2] ** 2)

    mask = jnp.array([0.0, 0.0, -jnp.inf])
    report = diagnose(loss, "float32")({"w": jnp.ones(3)}, mask)
    assert report.cause.kind == "none"
    assert "nothing non-finite" not in str(report)
    assert "the argument 'mask' (1 inf of 3)" in str(report)
