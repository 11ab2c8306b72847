"""Wrong uses of whole steps, for functions and for models of Flax."""

import functools
import json
import subprocess
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _wrong_shared import (
    PARAMS,
    POLICY,
    SGD,
    A,
    T,
    V,
    W,
    X,
    each,
    loss_fn,
    model,
    note_of,
    per_row,
    step,
    told,
    wrap,
)
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import sparse

import mpjax
import mpjax.linen
import mpjax.nnx
import mpjax.optim
import mpjax.train

DLS = mpjax.DynamicLossScale
GROWTH = ("growth_interval", "growth_factor", "backoff_factor")
ADAM = optax.adam(0.1)
RNGS = nnx.Rngs(0)
ASKING = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), lambda g, state, params=None, *, curvature, **_: (g, state)
)
SPARSE = sparse.BCOO.fromdense(jnp.eye(4))


def with_state(params, extra, batch):
    return loss_fn(params, batch), extra


def traced(made, *state, batch=X):
    return made.lower(made.init(*(state or (PARAMS,))), batch)


def nnx_step():
    return mpjax.nnx.make_train_step(model(), SGD, None, lambda m, x: jnp.mean(m(x)))


def first_state(made):
    return made.init(PARAMS) if isinstance(made, mpjax.train.TrainStep) else made.init()


def traced_call(fun):
    made = step(fun)
    return made(made.init(PARAMS), X)


def changed(loss):
    return lambda params, extra, batch: (loss_fn(params, batch), loss(extra))


def donated():
    made = step()
    state = made.init(PARAMS)
    state.params["w"].delete()
    return made(state, X)


def gone(made):
    """Returns a state whose arrays a step took."""
    state = first_state(made)
    for array in jax.tree.leaves(state):
        array.delete()
    return state


def traced_from(tx, change):
    made = step(tx=tx)
    return made.lower(change(made.init(PARAMS)), X)


def other_state():
    made, other = step(tx=optax.adam(0.1)), step(tx=optax.sgd(0.1, momentum=0.9))
    return made.lower(other.init(PARAMS), X)


def flax_state():
    return TrainState.create(apply_fn=None, params=PARAMS, tx=SGD)


def deleted():
    params = {"w": jnp.ones(2)}
    params["w"].delete()
    return params


def block(context):
    with context:
        pass


def two(params, x, y):
    return loss_fn(params, x) + jnp.sum(y)


def of_parts(w, batch):
    return jnp.mean(w * batch["x"]) * jnp.mean(batch["more"])


def branching(params, batch):
    return loss_fn(params, batch) if jnp.sum(batch) > 0 else 0.0  # the line of the user


@functools.cache
def errors_without(*hidden):
    """Returns what the modules that need others say where those are not installed."""
    code = f"""
import importlib, json, sys
sys.modules |= dict.fromkeys({hidden})
said = {{}}
for name in ("mpjax.nnx", "mpjax.train"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        said[name] = str(error)
print(json.dumps(said))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return json.loads(done.stdout)


def with_flax_hidden(name):
    raise ImportError(errors_without("flax", "optax")[name])


# fmt: off
ROWS = {
    "steps as other libraries have them": [
        (lambda: step(two).init(PARAMS), T,
            "two(params, x, y) | def two(params, batch): x, y = batch | step(state, (x, y))"),
        (lambda: step()(step().init(PARAMS), X, X), T, "2 arguments | step(state, (x, y))"),
        (lambda: step()(step().init(PARAMS)), T, "0 arguments | step(state, (x, y))"),
        *(
            row
            for made in (step(), nnx_step())
            for row in told(lambda named, made=made: made(first_state(made), **named), T,
                "one batch, without names; got {}", ({"batch": X}, "batch=. | Type step(state, ba"),
                ({"x": X, "y": X}, "x=, y=. | Allowed | step(state, (x, y))"))
        ),
        (lambda: step().init(), V, "got None | mpjax.nnx.make_train_step | step.init()"),
        (lambda: mpjax.nnx.make_train_step(model(), SGD, None, lambda m, x: 0.0).init(PARAMS), T,
            "got a dict | Type step.init()"),
        (lambda: step(tx=optax.MultiSteps(SGD, 2)), T,
            "MultiSteps | accumulate=4 | gradient_transformation()"),
        (lambda: note_of(lambda: traced_call(branching)), V,
            "At _wrong_steps.py: | # the line of the user | jax.lax.cond"),
        (lambda: with_flax_hidden("mpjax.nnx"), ImportError,
            "mpjax.nnx: needs flax, which is not installed | pip install flax"),
        (lambda: with_flax_hidden("mpjax.train"), ImportError, "mpjax.train: needs optax"),
    ],
    "make_train_step": [
        (lambda: step(policy=True), V, "True | Accepted | 'bf16-mixed'"),
        *(
            (lambda name=name, v=v: step(**{name: v}), T, f"{name}= | Allowed | {said}")
            for name, v, said in (
                ("fp16", True, "Type policy='16-mixed'"),
                ("gradient_clip_val", 1.0, "clip_by_global_norm(1.0), optax.adamw(1e-3)) as tx"),
                ("master_weights", True, "with_master_weights(tx)"),
                ("enabled", False, "Type policy='32-true'"),
                ("loss_id", 1, "Drop loss_id=: a step has one loss; | A loss scale for each loss"),
                ("num_losses", 3, "Drop num_losses=: a step has one loss"),
                ("delay_unscale", True, "Type accumulate= instead of delay_unscale=."),
                ("min_loss_scales", 1.0, "Drop min_loss_scales=."),
                *((name, 1.0, "clip_by_global_norm(1.0), optax.adamw(1e-3)) as tx instead of")
                    for name in ("gradient_clipping", "clip_grad", "grad_clip", "clip_norm")),
                *((name, 1.0, "Type optax.chain(optax.clip(1.0), optax.adamw(1e-3)) as tx")
                    for name in ("clipvalue", "clip_value", "clip_grad_value")),
                *((name, 2.0, f"Type loss_scale=mpjax.DynamicLossScale({own}=...) instead")
                    for name, own in (
                        *(("min_loss_scale", "min_loss_scale"), ("init_scale", "loss_scale")),
                        *(("max_loss_scale", "max_loss_scale"), ("period", "growth_interval")),
                        *((own, own) for own in GROWTH))),
                ("hysteresis", 2, "Drop hysteresis=: every overflow lowers the scale."),
                ("initial_scale_power", 16, "DynamicLossScale(loss_scale=2**16) instead"),
            )
        ),
        (lambda: step().init(PARAMS).parms, A, 'TrainState | Did you mean .params?'),
        (lambda: step(tx=optax.adam), T, "function adam | Allowed | optax.adam(1e-3)"),
        (lambda: step(tx=0.1), T, "got 0.1 | Allowed | optax.adamw(0.1)"),
        (lambda: step(tx=None), T, "got None | Allowed | optax.adamw(1e-3)"),
        (lambda: step(tx=(SGD, SGD)), T, "optax transformation | got a tuple | optax.adamw"),
        (lambda: step(tx=lambda lr: SGD), T, "<lambda> | Allowed | Call it"),
        (lambda: step(tx=nnx.Optimizer(model(), SGD, wrt=nnx.Param)), T,
            "an nnx.Optimizer | Allowed | optimizer.tx"),
        (lambda: mpjax.make_train_step(SGD, loss_fn), T, "loss function | order | Swap"),
        (lambda: mpjax.make_train_step(POLICY, loss_fn), T, "'bf16-mixed' | order | Swap"),
        (lambda: mpjax.make_train_step(loss_fn, POLICY, SGD), T,
            "got the policy 'bf16-mixed' as the optimizer. | order | Swap | , 'bf16-mixed')"),
        (lambda: step(tx="adam"), T, "must be an optax transformation; got 'adam'. | optax.adam"),
        (lambda: step(tx=mpjax.get_policy(POLICY)), T, "the policy 'p=f32,c=bf16,o=f32' as the"),
        *told(lambda tx: step(tx=tx).init(PARAMS), V, "make_train_step(tx): | {}",
            (optax.MultiSteps(wrap(), 2).gradient_transformation(),
                "MultiSteps is around with_loss_scale | Allowed | with_loss_scale(optax.Multi"),
            (optax.chain(optax.MultiSteps(wrap(scale=None), 2).gradient_transformation()),
                "MultiSteps is around with_loss_scale | accumulate=4"),
            (optax.apply_if_finite(wrap(), 3),
                "state ApplyIfFiniteState is around with_loss_scale | chain | Put with_lo"),
            (optax.chain(optax.conditionally_transform(wrap(), lambda step: step < 3)),
                "ConditionallyTransformState | still scaled | Put with_loss_scale around it"),
            (optax.contrib.mechanize(wrap()), "MechanicState | Put with_loss_scale around it"),
            (optax.contrib.sam(SGD, SGD, opaque_mode=True), "grad_fn | Type opaque_mode=False"),
            (wrap(optax.contrib.sam(SGD, SGD, opaque_mode=True)), "grad_fn | grad_fn=grad_fn"),
            (optax.lookahead(SGD, 2, 0.5), "params.fast | with_loss_scale(optax.l")),
        (lambda: step(tx=optax.lookahead(SGD, 2, 0.5)).init(
            optax.LookaheadParams.init_synced(PARAMS)), V, "optax.lookahead | params.fast"),
        (lambda: step(policy=SGD), T, "as the policy | make_train_step(loss_fn, tx,"),
        (lambda: step(None), T, "got None | loss_fn(params, batch) | without parentheses"),
        (lambda: step(loss_fn(PARAMS, X)), T, "got f32[] | Allowed | without parentheses"),
        (lambda: step(nn.Dense), T, "the class Dense | Allowed | loss_fn"),
        (lambda: step(model()), T, "an nnx.Module | Allowed | def loss_fn(params, batch)"),
        (lambda: step(nn.Dense(2)), T, "linen module | Allowed | def loss_fn(params, batch)"),
        (lambda: step(policy="fp16-mixed"), V, "'fp16-mixed' | Accepted | '16-mixed'"),
        (lambda: step(policy="bf16"), V, "two things | 'bf16-mixed' | 'bfloat16'"),
        (lambda: step(policy=jnp.bfloat16), V, "bfloat16 alone | 'bf16-mixed' | 'bfloat16'"),
        (lambda: step(has_aux=1), T, "has_aux | True or False | got 1 | has_aux=True"),
        (lambda: step(weighted="mask"), T, "weighted | got 'mask' | weighted=True"),
        (lambda: step(axis_name=0), T, "axis_name | got 0 | axis_name='data'"),
        *told(lambda params: step().init(PARAMS).with_params(params), V, "state.with_params: | {}",
            ({"v": X}, "'w' is only in the parameters of the state. | Give all of them"),
            ({"w": X}, "parameter 'w' is f32[4,2], and that of the state f32[2,2]. | step.init(p"),
            ({"w": jnp.full((2, 2), jnp.nan)}, "'w' is not finite: f32[2,2], 0 inf, 4 nan")),
        (lambda: step().init(PARAMS).replace(params=PARAMS), A, "Here it is .with_params(params)"),
        (lambda: step(loss_scale="dynamic"), T,
            "make_train_step(loss_scale): got 'dynamic'. | Allowed | DynamicLossScale()"),
        (lambda: step(loss_scale=0.0), V, "got 0.0 | Allowed | 2**15"),
        (lambda: step(loss_scale=True), T, "got True | Allowed | DynamicLossScale()"),
        (lambda: step(max_consecutive_skips=0), V, "at least 1 | got 0 | 50"),
        (lambda: step(tx=wrap(), policy="16-mixed", loss_scale=8.0), V,
            "got a loss_scale, and an optimizer that holds one | Drop"),
        (lambda: step(tx=optax.chain(wrap(), optax.identity()), loss_scale=8.0).init(PARAMS), V,
            "holds one | Drop"),
        (lambda: step(accumlate=2), T, "accumlate= | Allowed | Type accumulate="),
        (lambda: step(zzz=2), T, "zzz= | Allowed | Drop zzz="),
        (lambda: step(tx=wrap(scale=None), policy="16-mixed").init(PARAMS), V,
            "float16 | with_loss_scale(tx) | with_loss_scale(tx, mpjax.DynamicLossScale())"),
        (lambda: step(tx=optax.chain(optax.clip(1.0), wrap())).init(PARAMS), V,
            "behind 1 of its chain | Allowed | with_loss_scale(optax.chain("),
        (
            lambda: mpjax.nnx.make_train_step(
                model(), optax.chain(optax.clip(1.0), wrap()), POLICY, loss_fn
            ).init(), V, "behind 1 of its chain | Allowed | with_loss_scale(optax.chain("),
        *each(lambda v: step(accumulate=v), V,
            "(accumulate): must be a whole number of at least 1 | got {} | Type",
            *(0, -2, 1.5, 2.0, True, None)),
        *each(lambda v: step(policy="bf16-true", rounding=v), V,
            "(rounding): unknown rounding {}. | Accepted: 'nearest', 'stoch",
            *("stochastik", "up", 1, True)),
    ],
    "step.init": [
        (lambda: step().init({}), V, "no parameters | step.init(model.init(key, x)"),
        (lambda: step().init(None), V, "no parameters | step.init("),
        (lambda: step().init(step().init(PARAMS)), T, "a whole state | Allowed | state.params"),
        (lambda: step().init(flax_state()), T, "Flax TrainState | Allowed | step.adopt(state)"),
        (lambda: step().init(nn.Dense(2)), T, "not initialised | Allowed | model.init(key, x)"),
        (lambda: step().init(model()), T, "nnx.Module | Allowed | nnx.make_train_step(model"),
        (lambda: step().init(nnx.Optimizer(model(), SGD, wrt=nnx.Param)), T,
            "nnx.Optimizer | Allowed | nnx.make_train_step(model"),
        (lambda: step().init(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))), T,
            "activation | Allowed | eqx.partition(model, eqx.is_inexact_array)"),
        (lambda: step().init({"w": "no"}), T, "'w' is 'no' | Allowed | eqx.partition"),
        (lambda: step().init({"n": jnp.arange(3)}), T, "'n' is i32[3] | Allowed | extra state"),
        *each(lambda key: step().init(key, X), T,
            "step.init: it takes parameters, and got a PRNG key. | model.init(key, x)['params']",
            jax.random.key(0), jax.random.PRNGKey(0)),
        (lambda: step().init({"n": 3}), T, "'n' is 3 | Allowed | extra state"),
        (lambda: step().init({"k": jax.random.key(0)}), T, "'k' | Allowed | extra state"),
        (lambda: step().init({"params": PARAMS, "batch_stats": PARAMS}), V,
            "Flax's variables | extra state | variables['batch_stats']"),
        *(
            (lambda init=init, bad=bad: init({"ok": X, "head": {"w": jnp.full(2, bad, "f2")}}), V,
                f"parameter 'head/w' is not finite: | 2], {counts} | initializer")
            for init in (step().init, wrap().init)
            for bad, counts in ((jnp.nan, "0 inf, 2 nan"), (jnp.inf, "2 inf, 0 nan"))
        ),
        *told(lambda call: call(jax.eval_shape(lambda: PARAMS)), T,
            "step.{}: parameter 'w' is the shape f32[2,2], and | Type jax.eval_shape(step.{}, ",
            (step().init, "init"),
            (lambda shapes: step().adopt(step().init(PARAMS)._replace(params=shapes)), "adopt")),
        (lambda: step().init(deleted()), V, "'w' has been deleted | donate=False"),
        (lambda: step(jax.checkpoint(mpjax.autocast(loss_fn, POLICY))).init(PARAMS, {"m": X}), T,
            "loss_fn(params, batch) | cannot take | without it | extra_state"),
        (lambda: step().init(PARAMS, {"m": X}), T,
            "loss_fn(params, batch) cannot | too many | Allowed | Type step.init(params) without "
            "| def loss_fn( | A batch goes into the step itself: step(state, batch)"),
        (lambda: step(with_state).init(PARAMS), T,
            "with_state | 'batch' | Allowed | Type step.init(params, extra_state)"),
    ],
    "step": [
        (lambda: step()(X, step().init(PARAMS)), T, "first argument | step.init(params)"),
        (lambda: step()(flax_state(), X), T, "got a TrainState | step.init(params)"),
        (donated, V, "donated | Allowed | state, metrics = step(state, batch) | donate=False"),
        *told(lambda use: use(gone(step())), V,
            "{}: the state | donated | Allowed | state, metrics = step(state, | donate=False",
            *((use, where) for where, use in (
                ("step.adopt", lambda state: step().adopt(state)),
                ("state.with_params", lambda state: state.with_params(PARAMS)),
                ("raise_if_diverged", mpjax.raise_if_diverged),
                ("current_loss_scale", mpjax.current_loss_scale),
                ("full_params", lambda state: mpjax.optim.full_params(state.params, state)),
                ("moment_spread", mpjax.optim.moment_spread),
                ("adopt_state", lambda s: mpjax.optim.adopt_state(wrap(), s.opt_state, PARAMS))))),
        *told(lambda use: use(nnx_step()), V, "step.{}( | donated | Allowed | donate=False",
            (lambda made: made.merge(gone(made)), "merge"),
            (lambda made: made.update(model(), gone(made)), "update")),
        (other_state, V, "another optimizer | step.init(params)"),
        (lambda: traced_from(ADAM, lambda s: s._replace(params={"w": jnp.ones((2, 3))})), V,
            "do not fit the optimizer's state: 'inner_state/0/mu/w' is f32[2,2], and that of these "
            "parameters f32[2,3]. | step.init(params). | state.with_params(params)"),
        (lambda: step(policy="bf16-true").lower(step().init(PARAMS), X), V,
            "another policy | 'w' is f32[2,2] | step.adopt(state)"),
        (lambda: step(policy="16-mixed").lower(step().init(PARAMS), X), V,
            "no loss scale | a dynamic loss scale | step.adopt(state)"),
        (lambda: traced(step(per_row)), T, "per_row | floating scalar | f32[4] | Reduce it"),
        (lambda: traced(step(lambda p, b: None)), T, "floating scalar | Reduce it"),
        (lambda: traced(step(lambda p, b: (loss_fn(p, b), 1))), T, "( | has_aux=True"),
        *told(lambda tx: traced(step(tx=tx)), V,
            "make_train_step(tx): the optimizer asks for {}=, which | Write the step | {}=...).",
            (optax.contrib.hutchinson_estimator_diag_hessian(), "obj_fn"), (ASKING, "curvature"),
            (optax.chain(ASKING, SGD), "curvature")),
        (lambda: traced(step(weighted=True)), T, "(loss, weight) | weighted=True"),
        (lambda: traced(step(lambda p, x: (jnp.sum(x > 0), loss_fn(p, x)), weighted=True)), T,
            "(weighted=True): got i32[] as the loss, and f32[] as its weight. | Swap | return"),
        (lambda: traced(step(with_state, has_aux=True), PARAMS, {"m": X}), T,
            "(new_extra_state, aux) | has_aux="),
        (lambda: traced(step(changed(lambda e: {"n": e["m"]})), PARAMS, {"m": X}), V,
            "extra state | 'n' is only in what the loss | same keys"),
        (lambda: traced(step(changed(lambda e: {})), PARAMS, {"m": X}), V,
            "extra state | 'm' is only in what it was given | same keys"),
        (lambda: traced(step(changed(lambda e: {"m": e["m"][0]})), PARAMS, {"m": X}), V,
            "'m' was f32[4,2] | f32[2] | shape"),
        (lambda: traced(step(axis_name="data")), NameError,
            "'data' is no axis | Allowed | leave it out"),
        *each(lambda call: call(step())(PARAMS, X), T,
            "must be the state; got a dict. | Make it with step.init(params)", lambda made: made,
            lambda made: made.lower),
        *told(lambda given: given[0](step())(*given[1:]), T, "train step: {}",
            *((
                (call, step().init(PARAMS), {"x": X, "names": [bad]}),
                f"batch leaf 'names/0' is {shown} | which is no array of numbers | Drop it"
            )
                for call in (lambda made: made, lambda made: made.lower)
                for bad, shown in (("a", "'a'"), (np.array(["a"]), "str32[1]"), (jnp.tanh, "")))),
        (lambda: traced(step(), batch="a"), T, "the batch is 'a' | Drop it"),
        (lambda: step(with_state)(step(with_state).init(PARAMS, {"name": "a"}), X), T,
            "extra state leaf 'name' is 'a' | Drop it"),
        *told(lambda fun: traced(step(fun)), T, "(loss_fn): the loss {} | Give the loss function i",
            (jax.value_and_grad(loss_fn), "came with gradients"), (jax.grad(loss_fn), "is gra")),
        (lambda: traced(step(lambda p, b: 1)), T, "the loss must be a floating scalar | Reduce it"),
        (lambda: traced(step(has_aux=True)), T, "must return (loss, aux); got f32[] | has_aux="),
        (lambda: traced(step(lambda p, e, b: loss_fn(p, b)), PARAMS, {"m": X}), T,
            "must return (loss, new_extra_state); got f32 | step.init"),
        *told(lambda v: traced(step(accumulate=2), batch=v), V, "{}, which its parts would keep | "
            "Give a dense array, or accumulate_axes=",
            (SPARSE, "the batch | is a BCOO of shape (4, 4)"),
            ({"x": X, "graph": SPARSE}, "'graph' | BCOO of shape (4, 4)"),
        ),
        (lambda: traced(step(accumulate=3), batch={"label": X}), V,
            "batch leaf 'label': f32[4,2] does not split into 3 micro-batches. | Make the first | "
            "multiple"),
        *(
            (lambda axes=axes: traced(step(of_parts, accumulate=4, accumulate_axes=axes),
                jnp.float32(1), batch={"x": jnp.arange(16.0), "more": jnp.ones(4)}), error, said)
            for axes, error, said in (
                ("x", T, "(accumulate_axes): got 'x' as an axis"),
                ({"x": 0}, V, "no prefix | Type accumulate_axes={'more': 0, 'x': 0}"),
                ({"x": 1, "more": None}, V, "'x': f32[16] has no axis 1"),
                ({"x": 0, "more": 0}, V, "'more': is f32[4] | or None for what every"),
            )
        ),
        (lambda: traced(step(mpjax.autocast(loss_fn, "16-mixed"), policy=POLICY)), W,
            "autocast(loss_fn): autocast to | c=f16 | inside a train step of p=f32,c=bf16,o=f32 | "
            "Type make_train_step(loss_fn, tx"),
    ],
    "step.adopt": [
        (lambda: step().adopt(PARAMS), T, "a dict | Allowed | step.adopt({'step'"),
        (lambda: step().adopt(None), T, "None | Allowed | step.adopt({'step'"),
        (lambda: step().adopt(X), T, "f32[4,2] | Allowed | step.adopt({'step'"),
        (lambda: step().adopt(step().init(PARAMS), {"m": X}), T,
            "too many | Allowed | Type step.adopt(state) without"),
        (lambda: step(with_state).adopt(step().init(PARAMS)), T,
            "with_state | Allowed | extra_state= to step.adopt"),
        (lambda: step(tx=optax.adam(0.1)).adopt(step().init(PARAMS)), V,
            "only in | same optimizer | tx.init(params)"),
        (lambda: mpjax.optim.adopt_state(SGD, {"a": jnp.ones(2)}, PARAMS), V,
            "only in | same optimizer | tx.init(params)"),
        (lambda: mpjax.optim.adopt_state(SGD.init(PARAMS), SGD, PARAMS), T,
            "as the optimizer | in this order: the optimizer, the state | adopt_state(tx, opt_s"),
        (lambda: mpjax.nnx.adopt_state(model(), model()), T, "a Linear | Allowed | nnx.Optimizer"),
    ],
    "Flax": [
        (lambda: mpjax.nnx.set_policy(model(), "bf61"), V, "'bf61' | Accepted"),
        (lambda: mpjax.linen.with_policy(nn.Dense(2), "bf61"), V, "'bf61' | Accepted"),
        (lambda: mpjax.nnx.make_train_step(model(), SGD, POLICY, loss_fn, optimizer=SGD), T,
            "optimizer= | Allowed | Type tx="),
        *(
            row
            for name in ("set_policy", "tabulate")
            for row in told(
                getattr(mpjax.nnx, name),
                T,
                f"{name}: | {{}}",
                (nn.Dense(2), "got a Dense | mpjax.linen.with_policy"),
                ({"w": 1}, "got a dict"),
                (nnx.Linear, "got a "),
            )
        ),
        (lambda: mpjax.nnx.name_operations({}), T,
            "name_operations: got a dict. | Allowed: a flax.nnx"),
        *told(lambda v: mpjax.linen.with_policy(v, POLICY), T, "with_policy: got | {}",
            (lambda x: x, "autocast"), ("Dense", "a str"), (nn.Dense(2).init, "a method"),
            (model(), "a Linear | mpjax.nnx.set_policy(model, 'bf16-mixed')")),
        *each(lambda v: mpjax.linen.tabulate(v, X), T, "tabulate: got",
            *(lambda x: x, "Dense", nn.Dense(2).init)),
        (lambda: mpjax.linen.with_policy(nn.Dense(2), "p=f32,c=f64,o=f32"), V,
            "with_policy: float64 was asked for"),
        (lambda: mpjax.nnx.set_policy(model(), "64-true"), V, "set_policy: float64 was asked for"),
        (lambda: mpjax.linen.apply_gradients(flax_state(), grads=PARAMS), V,
            "holds no loss scale | Wrap the optimizer"),
        (lambda: block(mpjax.nnx.undo_skipped(nnx.Optimizer(model(), SGD, wrt=nnx.Param))), V,
            "undo_skipped: | holds no loss scale | Wrap the optimizer"),
        (lambda: block(mpjax.nnx.undo_skipped(model(), nnx.Optimizer(model(), SGD, wrt=nnx.Param))),
            T, "first | the nnx.Optimizer; got an nnx.Module. | undo_skipped(optimizer, model)"),
        *told(lambda call: call(nnx_step()), T, "must be the state; got a {}. | step.init(), a",
            (lambda made: made.update(made.init(), model()), "Linear"),
            (lambda made: made.merge({"loss": X}), "dict"),
            *((lambda made, name=name: getattr(made, name)(PARAMS, X), "dict")
                for name in ("__call__", "lower", "diagnose"))),
        (lambda: nnx_step()(PARAMS, X), T, "got a dict. | Make it with step.init(), and"),
        (lambda: nnx_step().update(model(), PARAMS), T, "step.update(model, state): the second"),
        *told(lambda other: nnx_step().update(other, nnx_step().init()), V,
            "step.update(model, state): | {} | Give a model of the form | step.merge(state) makes",
            (nnx.Linear(3, 2, rngs=RNGS), "'kernel' is f32[3,2] in the given | f32[2,2] in the s"),
            (nnx.Sequential(model()), "the parameters differ; 'bias' is only in the state.")),
        (lambda: nnx_step().update({}, nnx_step().init()), T, "got a dict in | step.merge(state)"),
        *told(lambda other: nnx_step().init(other), V, "nnx step.init: | {} | step.merge(state) ma",
            (nnx.Linear(3, 2, rngs=RNGS), "f32[3,2] in the given model, and f32[2,2] in the model"),
            (nnx.Sequential(model()), "the parameters differ; 'bias' is only in the model of the")),
        (lambda: mpjax.nnx.grad(lambda m, x: m(x) ** 2, loss_scale=2.0)(model(), X), T,
            "value_and_grad(<lambda>) | got f32[4,2]"),
        (lambda: mpjax.nnx.grad(loss_fn, loss_scale="2"), T, "value_and_grad(loss_scale)"),
        (lambda: mpjax.nnx.grad(X, loss_scale=2.0), T, "must be a function"),
        *told(lambda given: mpjax.nnx.make_train_step(*given), T, "{}",
            ((loss_fn, SGD, None, loss_fn),
                "must be an NNX module; got the function loss_fn | mpjax.make_train_step(loss_fn, "
                "tx, policy)"),
            ((nnx.Linear, SGD, None, loss_fn), "must be an NNX module; got the class"),
            ((model(), SGD, None),
                "loss_fn must be a function; got None | Allowed | make_train_step(model, tx"),
            ((model(), optax.adam, None, loss_fn), "Call it: optax.adam(1e-3)"),
            ((model(), loss_fn, None, SGD), "loss_fn must be a function; got a")),
        (lambda: mpjax.nnx.make_train_step(nnx.Dropout(0.1), SGD, None, loss_fn), V,
            "has no variables of wrt | wrt=nnx.Param"),
    ],
}
# fmt: on
