"""Wrong uses of `mpjax.numerics`, of `mpjax.testing`, and of functions with amax histories."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from _wrong_shared import PARAMS, POLICY, SGD, A, T, V, X, each, loss_fn, model, step, told

import mpjax
import mpjax.nnx
from mpjax import numerics, testing

DELAYED = mpjax.QuantizedPolicy("bf16-mixed", mpjax.DelayedScaling(amax_history_len=2))
CURRENT = mpjax.QuantizedPolicy("bf16-mixed", mpjax.Float8CurrentScaling())
WIDE = dict.fromkeys("abc", jnp.ones((64, 64)))
ROWS_OF = jnp.ones((4, 64))
BAD_X = X.at[0, 0].set(jnp.inf)
ASK = {
    name: functools.partial(getattr(numerics, name), **more)
    for name, more in (
        ("diagnose", {}), ("compare", {}), ("exponents", {}), ("suggest", {"tolerance": 1e-2}),
    )
}  # fmt: skip


def deep(params, batch):
    """Three products: the first layer stays as it is, and so has no history."""
    for w in params.values():
        batch = batch @ w
    return jnp.mean(batch**2)


def made(seen=X, made_by=None, **options):
    """Returns a step, its first state, the state after it, and its metrics."""
    made_by = made_by or step(policy="bf16-mixed", donate=False, **options)
    state = made_by.init(PARAMS)
    return made_by, state, *made_by(state, seen)


def diagnosed(change=lambda metrics: metrics, **options):
    made_by, state, _, metrics = made(**options)
    return made_by.diagnose(state, X, change(metrics))


def donated():
    made_by, state, _, metrics = made(made_by=step())
    return made_by.diagnose(state, X, metrics)


def after_another():
    made_by, _, after, metrics = made()
    return made_by.diagnose(after, X, metrics | {"grads_finite": False})


def gone():
    tree = {"scale": jnp.ones(4)}
    jax.jit(lambda t: jax.tree.map(jnp.negative, t), donate_argnums=0)(tree)
    return numerics.lost_updates(tree, {"scale": jnp.ones(4)})


@functools.cache
def histories():
    fast = mpjax.with_amax_history(deep, DELAYED)
    return fast, fast.init(WIDE, ROWS_OF)


def of_state_without_history():
    made_by = step(deep, policy=DELAYED)
    state = made_by.init(WIDE, batch=ROWS_OF)
    return made_by.diagnose(state._replace(amax_history=None), ROWS_OF)


def needs_values(params, batch):
    return loss_fn(params, batch) if batch[0, 0] > 0 else jnp.sum(batch)


# fmt: off
ROWS = {
    "step.diagnose": [
        (donated, V, "'params/w', f32[2,2], was donated | that the step"),
        (after_another, V, "step.diagnose: the metrics are of another step"),
        *each(lambda v: diagnosed(lambda _: v), T,
            "metrics must be those that the step returned; got", {}, {"loss": 1.0}, 3),
        (lambda: diagnosed(seen=BAD_X), V, "another step: they say loss inf | finite gradients"),
        (lambda: step(axis_name="d").diagnose(step(axis_name="d").init(PARAMS), X), V,
            "runs inside a shard_map over 'd' | numerics.diag"),
        (lambda: step(axis_name="d").diagnose(3, X), T, "must be the state"),
        (of_state_without_history, V, "no amax histories, which | step.adopt(state"),
        *each(lambda v: step(watch=v), V, "make_train_step(watch): must be a whole | =100",
            *(0, -1, 2.5, True, "all")),
        (lambda: step(lost_updates="all"), T,
            "make_train_step(lost_updates): must be True or False"),
    ],
    "numerics": [
        *(
            row
            for name, ask in ASK.items()
            for row in (
                (lambda ask=ask: ask(loss_fn, "bf16-mixed", progress="yes"), T,
                    f"numerics.{name}(progress): got 'yes'. | True, False, None"),
                (lambda ask=ask: ask(loss_fn, "bf16-mixed", PARAMS, X), T,
                    f"numerics.{name}: takes loss_fn, policy without a name; got 4 arguments. | "
                    f"Allowed | Type numerics.{name}(loss_fn, policy)(params, batch)"),
                (lambda ask=ask: ask(loss_fn, policies="bf16-mixed"), T,
                    f"numerics.{name}: unknown keyword policies= | Type policy="),
                (lambda ask=ask: ask(loss_fn, DELAYED), V,
                    f"numerics.{name}: | another program | step.diagnose | Float8CurrentScaling"),
            )
        ),
        *told(lambda name: ASK[name](needs_values, "bf16-mixed")(PARAMS, X), T,
            "numerics.{}: the function cannot be traced", *((n, n) for n in ASK)),
        (lambda: numerics.diagnose(lambda w: jnp.sum(np.exp(w)), "float32")(jnp.ones(3)), T,
            "cannot be traced | jnp in place of np"),
        (lambda: numerics.diagnose(3, "float32"), T, "must be a function; got int"),
        *(
            row
            for made in (step(), mpjax.nnx.make_train_step(model(), SGD, None, loss_fn))
            for row in told(lambda see, made=made: see(made, POLICY), T, "{}",
                (numerics.diagnose, "numerics.diagnose: got a train step. | Allowed | step.diagno"
                    "se(state, batch, metrics)"),
                (numerics.exponents, "got a train step. | numerics.exponents(loss_fn, policy)(par"))
        ),
        *told(lambda args: numerics.diagnose(jnp.sum, "float32")(*args), T,
            "numerics.diagnose: got {} | the param", ((), "no arguments"),
            ((jnp.arange(3),), "a first argument without a float")),
        (lambda: jax.jit(numerics.diagnose(lambda w: jnp.sum(w)))(jnp.ones(3)), T,
            "'w' is traced | outside of jax.jit"),
        *told(lambda v: numerics.compare(loss_fn, "float32", reference=v), V, "{}",
            ("float64", "64-bit types are off"), ("f16", "unknown reference 'f16' | 'float64'")),
        *each(lambda v: numerics.suggest(loss_fn, "bf16-mixed", tolerance=v), V,
            "at least 1.2e-07, what float32 itself rounds; got",
            *(0, -1.0, 1e-9, float("nan"), "1%", True, None)),
        *told(lambda v: numerics.suggest(loss_fn, "bf16-mixed", tolerance=v), V,
            "suggest(tolerance): must be a fraction below 1; got {}",
            (5, "5, which is 500%. | For 5 percent | type tolerance=0.05."), (1.0, "1.0, wh")),
        (lambda: numerics.suggest(loss_fn, "bf16-mixed", tolerance=1e-6)(
            {"w": jnp.array([[0.3, 0.7], [1.1, -0.2]])}, X / 3), V,
            "all 0 named modules in float32 | named_scope"),
        (lambda: numerics.suggest(
            loss_fn, mpjax.PolicyMap("bf16-mixed", {"a": "float32"}), tolerance=1e-2), T,
            "got a PolicyMap, and it makes one"),
        (lambda: numerics.suggest(loss_fn, "float32", tolerance=1e-2), V,
            "computes in f32: nothing is low | reverse=True"),
        (lambda: numerics.find_promotions(needs_values)(PARAMS, X), T,
            "numerics.find_promotions: the function cannot be traced"),
        *told(lambda read: read(numerics.diagnose(loss_fn, POLICY, progress=False)(PARAMS, X)), A,
            "Report: has no attribute {}", (lambda r: r.kind, "'kind'. | .cause.kind"),
            (lambda r: r.gradient, "'gradient'. | Did you mean .gradients?"),
            (lambda r: r.xyz, "'xyz'. | It has .function, .policy, .loss_scale")),
        (lambda: step().diagnose(step().init(PARAMS), X, progress="no"), T,
            "step.diagnose(progress): got 'no'."),
        (lambda: numerics.find_promotions(loss_fn, PARAMS, X), T,
            "numerics.find_promotions: | got 3 arguments. | numerics.find_promotions(fun)(params"),
        (lambda: numerics.find_promotions({"w": 1}), T,
            "find_promotions: the first | find_promotions(fun)"),
        (gone, V, "lost_updates: 'params/scale', f32 | was donated"),
        *told(lambda trees: numerics.lost_updates(*trees), V, "{}",
            (({"a": X, "b": X}, {"a": X}), "numerics.lost_updates: the trees differ; 'b'"),
            (({"a": jnp.ones(2)}, {"a": jnp.ones(3)}),
                "leaf 'a' has shape (2,), its update (3,)")),
        (lambda: numerics.to_scalars(3), T, "must be a mapping; got int"),
        (lambda: jax.jit(numerics.to_scalars)({"loss": jnp.ones(())}), T,
            "the metrics are traced"),
    ],
    "explain and measure": [
        (lambda: mpjax.explain(loss_fn, POLICY)(PARAMS, X).row, A, "attribute 'row'. | .rows"),
        (lambda: mpjax.measure(loss_fn, [POLICY], budget=1)(PARAMS, X).best, A,
            "Measurement: has no attribute 'best'. | .taken"),
        (lambda: mpjax.explain(loss_fn, "bf16-mixed", PARAMS, X), T,
            "explain: takes fun, policy | got 4 | Type explain(fun, policy)(params, batch)"),
        (lambda: mpjax.explain(loss_fn, dtype=jnp.float16), T, "dtype= | Type policy='16-mixed'"),
        (lambda: mpjax.measure(loss_fn, ["bf16-mixed"], PARAMS, X), T,
            "measure: takes fun, policies | got 4 | Type measure(fun, policies)(params, batch)"),
        (lambda: mpjax.measure(loss_fn, policy="bf16-mixed"), T, "policy= | Type policies="),
    ],
    "testing": [
        (lambda: testing.assert_dtypes(PARAMS, "bf16-mixed", role="gradient"), V,
            "unknown role 'gradient'"),
        (lambda: testing.assert_products(loss_fn, PARAMS, X, dtype="bf17"), V,
            "assert_products(dtype): no dtype is called 'bf17'"),
        (lambda: testing.assert_within_rounding(X, X, "bf17"), V,
            "assert_within_rounding(dtype): no dtype"),
    ],
    "amax histories": [
        (lambda: mpjax.autocast(deep, DELAYED)(WIDE, ROWS_OF), V,
            "with_amax_history(deep, policy)"),
        (lambda: step(deep, policy=DELAYED).init(WIDE), V,
            "step.init(params, batch=batch), or step.adopt(state, batch=batch); in mpjax.nnx"),
        (lambda: step(deep, policy=DELAYED)(step(deep).init(WIDE), ROWS_OF), V,
            "step.adopt(state, batch=batch)"),
        (lambda: histories()[0].apply([1], WIDE, ROWS_OF), T, "got list as the history"),
        (lambda: mpjax.with_amax_history(deep, DELAYED).apply(
            histories()[1], WIDE | {"d": WIDE["a"]}, ROWS_OF), V,
            "histories are of another function"),
        (lambda: mpjax.with_amax_history(deep, CURRENT), V, "has no recipe with a history"),
        (lambda: mpjax.with_amax_history(jax.grad(deep), DELAYED).init(WIDE, ROWS_OF), V,
            "Differentiate outside"),
    ],
}
# fmt: on
