"""`with_loss_scale` around every transformation that optax and optax.contrib export.

One table says how each is made and what its update needs; a test finds a new export that has no
row. Each row is then run: with gradients of every dtype, its state keeps its dtypes and shapes
(law 12), and with a bad batch among good ones it ends, bit for bit, where a run without that
batch ends (law 10).
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpjax
from mpjax import optim
from mpjax.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.no_leak_check("test_optim looks for leaks; here it would cost minutes"),
    pytest.mark.standard_promotion("optax adds arrays of different dtypes in places"),
    # Two rows are deprecated by optax, and dpsgd itself passes what optax deprecates.
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

SCALE = 2.0**12
PARAMS = {"w": jnp.array([[0.5, -1.25], [2.0, 0.75]]), "b": jnp.array([0.25, -0.0])}


def objective(params):
    return sum(jnp.sum((p - 0.5) ** 2) for p in jax.tree.leaves(params))


def plain_extra(grads):
    return {}


def value(grads):
    return {"value": jnp.float32(0.75)}


def line_search(grads):
    return {"value": objective(PARAMS), "value_fn": objective, "grad": grads}


def hessian(grads):
    return {"obj_fn": objective}


@dataclasses.dataclass(frozen=True)
class Row:
    """How a transformation is made, and what its update and its parameters are."""

    make: Callable[[], optax.GradientTransformation]
    extra: Callable[[Any], dict[str, Any]] = plain_extra
    params: Any = dataclasses.field(default_factory=lambda: PARAMS)
    per_example: bool = False


def always(step, **extra):
    return step >= 0


def magnitude(tree):
    return jax.tree.map(jnp.abs, tree)


MASK = {"w": True, "b": False}
LABELS = {"w": "one", "b": "two"}
PARTS = {"one": optax.adam(0.1), "two": optax.sgd(0.1, momentum=0.9)}
MATRICES = {"w": optax.contrib.MuonDimensionNumbers()}
LOOKAHEAD = optax.LookaheadParams(PARAMS, PARAMS)


def words(text):
    return text.split()


def with_rate(name, module=optax, **options):
    return Row(lambda: getattr(module, name)(0.1, **options))


def bare(name, module=optax, *args):
    return Row(lambda: getattr(module, name)(*args))


def wrapping(name, *args, module=optax):
    return Row(lambda: getattr(module, name)(optax.adam(0.1), *args))


# Every row is `name in optax: how it is made`; what is not made by a learning rate says how.
ALIASES = {
    name: with_rate(name)
    for name in words(
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb "
        "lars lion nadam nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam "
        "rmsprop rprop sgd sign_sgd signum sm3 yogi"
    )
} | {
    "lbfgs": Row(lambda: optax.lbfgs(0.1), line_search),
    "noisy_sgd": with_rate("noisy_sgd", key=0),
    "optimistic_adam": with_rate("optimistic_adam", optimism=0.5),
    "polyak_sgd": Row(optax.polyak_sgd, value),
}
TRANSFORMATIONS = {
    name: bare(name)
    for name in words(
        "centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta "
        "scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief "
        "scale_by_distance_over_gradients scale_by_factored_rms scale_by_lbfgs scale_by_lion "
        "scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm "
        "scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss scale_by_sign "
        "scale_by_sm3 scale_by_stddev scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans"
    )
} | {
    "adaptive_grad_clip": bare("adaptive_grad_clip", optax, 0.1),
    "add_decayed_weights": bare("add_decayed_weights", optax, 0.1),
    "add_noise": Row(lambda: optax.add_noise(0.1, 0.5, key=0)),
    "apply_every": bare("apply_every", optax, 2),
    "clip": bare("clip", optax, 0.1),
    "clip_by_block_rms": bare("clip_by_block_rms", optax, 0.1),
    "clip_by_global_norm": bare("clip_by_global_norm", optax, 0.1),
    "ema": bare("ema", optax, 0.9),
    "freeze": bare("freeze", optax, MASK),
    # Its updates are what it measures, so that they must be a tree like the parameters.
    "measure_with_ema": bare("measure_with_ema", optax, magnitude, 0.9),
    "scale": bare("scale", optax, -0.1),
    "scale_by_backtracking_linesearch": Row(
        lambda: optax.scale_by_backtracking_linesearch(4), line_search
    ),
    "scale_by_learning_rate": with_rate("scale_by_learning_rate"),
    "scale_by_polyak": Row(optax.scale_by_polyak, value),
    "scale_by_rprop": with_rate("scale_by_rprop"),
    "scale_by_schedule": bare("scale_by_schedule", optax, optax.linear_schedule(0.1, 0.0, 9)),
    "scale_by_zoom_linesearch": Row(
        lambda: optax.scale_by_zoom_linesearch(4, stepsize_precision=0.0), line_search
    ),
    "snapshot": bare("snapshot", optax, "norm", optax.tree.norm),
    "stateless": bare("stateless", optax, lambda updates, params: updates),
    "stateless_with_tree_map": bare("stateless_with_tree_map", optax, lambda g, p: -0.1 * g),
    "trace": bare("trace", optax, 0.9),
}
WRAPPERS = {
    "MultiSteps": Row(lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
    "apply_if_finite": wrapping("apply_if_finite", 2),
    "chain": wrapping("chain", optax.trace(0.9)),
    "conditionally_mask": wrapping("conditionally_mask", always),
    "conditionally_transform": wrapping("conditionally_transform", always),
    "flatten": wrapping("flatten"),
    "inject_hyperparams": Row(lambda: optax.inject_hyperparams(optax.adam)(0.1)),
    "inject_stateful_hyperparams": Row(
        lambda: optax.inject_stateful_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 9))
    ),
    "lookahead": Row(lambda: optax.lookahead(optax.adam(0.1), 2, 0.5), params=LOOKAHEAD),
    "masked": wrapping("masked", MASK),
    "multi_transform": bare("multi_transform", optax, PARTS, LABELS),
    "named_chain": bare("named_chain", optax, ("one", optax.adam(0.1))),
    "partition": bare("partition", optax, PARTS, LABELS),
    "selective_transform": Row(lambda: optax.selective_transform(PARTS["one"], freeze_mask=MASK)),
    "with_extra_args_support": wrapping("with_extra_args_support"),
}
CONTRIB = (
    {
        name: with_rate(name, optax.contrib)
        for name in words(
            "acprop ademamix adopt cocob dadapt_adamw galore madgrad muon prodigy "
            "schedule_free_adamw schedule_free_sgd scale_by_madgrad simplified_ademamix"
        )
    }
    | {
        name: bare(name, optax.contrib)
        for name in words(
            "dog dowg normalize scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob "
            "scale_by_galore scale_by_simplified_ademamix"
        )
    }
    | {
        "differentially_private_aggregate": Row(
            lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
            per_example=True,
        ),
        "dpsgd": Row(lambda: optax.contrib.dpsgd(0.1, 1.0, 0.1, 0), per_example=True),
        "hutchinson_estimator_diag_hessian": Row(
            optax.contrib.hutchinson_estimator_diag_hessian, hessian
        ),
        "mechanize": wrapping("mechanize", module=optax.contrib),
        "momo": Row(optax.contrib.momo, value),
        "momo_adam": Row(optax.contrib.momo_adam, value),
        "reduce_on_plateau": Row(lambda: optax.contrib.reduce_on_plateau(patience=1), value),
        "sam": Row(lambda: optax.contrib.sam(optax.adam(0.1), optax.sgd(0.01))),
        "scale_by_muon": Row(
            lambda: optax.contrib.scale_by_muon(weight_dimension_numbers=MATRICES),
            params={"w": PARAMS["w"]},
        ),
        "schedule_free": wrapping("schedule_free", 0.1, module=optax.contrib),
        "sophia": Row(lambda: optax.contrib.sophia(0.1), hessian),
        "split_real_and_imaginary": wrapping("split_real_and_imaginary", module=optax.contrib),
    }
)
TABLE = ALIASES | TRANSFORMATIONS | WRAPPERS | CONTRIB

# Exports that have to do with transformations and make none.
NO_FACTORY = {
    "apply_updates": "adds the updates that a transformation made",
    "init_empty_state": "is the init of transformations without state",
}
# What cannot work, each with its reason and what with_loss_scale says of it.
CANNOT = {
    "monitor": (
        Row(lambda: optax.monitor({"norm": optax.tree.norm})),
        "its state grows at the first update, so that nothing keeps it as it was (nor can scan)",
        "'measurements/norm' is only in the optimizer's new state",
    ),
}


def exported(module):
    """Returns the functions of a module that make a transformation, by annotation or source."""
    found = {}
    for name in dir(module):
        fun = getattr(module, name)
        if name.startswith("_") or not inspect.isfunction(fun):
            continue
        if "GradientTransformation" in inspect.getsource(fun):
            found[name] = fun
    return found


def test_every_transformation_that_optax_exports_has_a_row():
    names = {*exported(optax), *exported(optax.contrib)}
    assert len(names) > 100
    assert sorted(names - {*TABLE, *NO_FACTORY, *CANNOT}) == []
    known = {name for m in (optax, optax.contrib) for name in dir(m)}
    assert sorted({*TABLE, *NO_FACTORY, *CANNOT} - known) == []


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_work_says_why(name):
    row, reason, text = CANNOT[name]
    assert reason
    tx = mpjax.with_loss_scale(row.make())
    with pytest.raises(ValueError, match=text):
        tx.update(grads_of(row, 1, jnp.float32), tx.init(row.params), row.params)


def grads_of(row, seed, dtype):
    """Returns unscaled gradients in a dtype; those of lookahead are of the fast parameters."""
    params = row.params.fast if isinstance(row.params, optax.LookaheadParams) else row.params
    random = np.random.default_rng(seed)
    lead = (3,) if row.per_example else ()
    return jax.tree.map(lambda p: jnp.asarray(random.normal(size=lead + p.shape), dtype), params)


def stepper(tx, row):
    def step(params, state, grads):
        scale = mpjax.current_loss_scale(state).loss_scale
        scaled = jax.tree.map(lambda g: (g * scale.astype(g.dtype)).astype(g.dtype), grads)
        updates, state = tx.update(scaled, state, params, **row.extra(scaled))
        if not row.per_example:
            params = optax.apply_updates(params, updates)
        return params, state

    return step


# Once unscaled all gradients are float32: quick are both dtypes for optimizers, one for wrappers.
QUICK = {jnp.float16: ALIASES | WRAPPERS, jnp.float32: ALIASES}
BY_DTYPE = [
    *((names, dtype) for dtype, names in QUICK.items()),
    *(
        pytest.param(TABLE.keys() - names, dtype, marks=pytest.mark.slow)
        for dtype, names in QUICK.items()
    ),
]


READ_NO_GRADIENT = {"hutchinson_estimator_diag_hessian", "set_to_zero"}
"""A gradient that is applied to nothing judges no step; the first takes its own derivatives."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("names", "dtype"), BY_DTYPE)
def test_law_10_as_if_the_bad_batch_had_never_been(names, dtype):
    """Of each optimizer; all step in one program, which compiles in a fifth of the time."""
    rows = {name: TABLE[name] for name in sorted(names)}
    scale = mpjax.DynamicLossScale(SCALE)
    txs = {name: mpjax.with_loss_scale(row.make(), scale) for name, row in rows.items()}
    steps = {name: stepper(txs[name], row) for name, row in rows.items()}
    step = jax.jit(lambda at, grads: {n: steps[n](*at[n], grads[n]) for n in rows})
    first, second = (
        {name: grads_of(row, seed, dtype) for name, row in rows.items()} for seed in (1, 2)
    )
    bad = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.inf), first)

    def run(*batches):
        at = {name: (row.params, txs[name].init(row.params)) for name, row in rows.items()}
        for grads in batches:
            at = step(at, grads)
        return at

    skipped, clean = run(first, bad, second), run(first, second)
    for name in rows:
        (params, state), (clean_params, clean_state) = skipped[name], clean[name]
        assert int(state.skipped_steps) == (name not in READ_NO_GRADIENT), name
        if name in READ_NO_GRADIENT:
            continue
        assert bool(clean_state.grads_finite), name
        assert int(clean_state.skipped_steps) == 0, name
        kept = {name: (params, state.inner_state)}
        assert_bitwise_equal(kept, {name: (clean_params, clean_state.inner_state)})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", TABLE)
def test_law_12_state_keeps_its_dtypes_with_gradients_of_any(name, dtype):
    row = TABLE[name]
    tx = mpjax.with_loss_scale(row.make(), mpjax.StaticLossScale(SCALE))

    def update(state, grads):
        return tx.update(grads, state, row.params, **row.extra(grads))

    state = jax.eval_shape(tx.init, row.params)
    updates, new = jax.eval_shape(update, state, grads_of(row, 1, dtype))
    chex.assert_trees_all_equal_structs(new, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    assert not any(x.weak_type for x in jax.tree.leaves(new))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {np.dtype(np.float32)}


def low(tree):
    """Returns parameters in bfloat16, the containers as they are."""
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TABLE)
def test_law_12_rounding_and_storing_keep_every_dtype_of_every_optimizer(name):
    row = TABLE[name]
    params, fast = low(row.params), grads_of(row, 1, jnp.float32)
    stored = optim.with_state_dtypes(row.make(), mu_dtype="bf16", nu_dtype="bf16")
    try:
        jax.eval_shape(stored.init, params)
    except ValueError as error:  # no moments: nothing to store
        assert "has no moments that can be stored" in str(error)  # noqa: PT017 - else it goes on
        stored = row.make()
    for tx in (optim.with_master_weights(stored, bits=24), optim.with_kahan(row.make())):
        state = jax.eval_shape(tx.init, params)

        def update(state, grads, tx=tx):
            return tx.update(grads, state, params, **row.extra(grads))

        updates, new = jax.eval_shape(update, state, fast)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", ["int8", pytest.param("float8", marks=pytest.mark.slow)])
def test_moments_in_8_bits_are_finite_in_every_optimizer_whatever_the_signs_of_gradients(kind):
    """One that is taken for a second moment, and is of either sign, would make its block NaN."""
    rows, stored = {}, {}
    for name, row in (ALIASES | TRANSFORMATIONS | CONTRIB).items():
        tx = optim.with_quantized_state(row.make(), kind, rules={"*": kind})
        with contextlib.suppress(ValueError):  # no moments: nothing to store
            jax.eval_shape(tx.init, row.params)
            rows[name], stored[name] = row, tx
    assert {"adamw", "sm3", "yogi", "adafactor", "muon", "ademamix"} <= set(rows)

    @jax.jit
    def step(states, grads):
        made = {
            n: stored[n].update(grads[n], states[n], rows[n].params, **rows[n].extra(grads[n]))
            for n in rows
        }
        return {n: updates for n, (updates, _) in made.items()}, {
            n: s for n, (_, s) in made.items()
        }

    states = {name: tx.init(rows[name].params) for name, tx in stored.items()}
    for seed in range(3):
        fast = {name: grads_of(row, seed, jnp.float32) for name, row in rows.items()}
        updates, states = step(states, fast)
    spoilt = {name for name in rows if not mpjax.all_finite(updates[name])}
    assert spoilt == set()
