"""Wrong uses of gradients, loss scales, and optimizers with one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _helpers import as_owned
from _wrong_shared import (
    INF,
    NAN,
    PARAMS,
    POLICY,
    SGD,
    VG,
    A,
    T,
    V,
    X,
    each,
    loss_fn,
    per_row,
    step,
    told,
    wrap,
)
from flax import nnx

import mpjax
import mpjax.nnx

LS, DLS, SLS = mpjax.LossScale, mpjax.DynamicLossScale, mpjax.StaticLossScale
KEY = jax.random.key(0)
FIELDS = (
    *("loss_scale", "counter", "growth_factor", "backoff_factor"),
    *("growth_interval", "min_loss_scale", "max_loss_scale"),
)
READERS = (mpjax.current_loss_scale, mpjax.raise_if_diverged)
OVERWRITTEN = {"_overwrite_with_gradient": {"amax": jnp.ones(2)}}


MLP = eqx.nn.MLP(2, 2, 2, 1, key=KEY)
GRADIENTS = (VG, mpjax.grad, mpjax.nnx.value_and_grad, mpjax.nnx.grad)
NAMES = ("value_and_grad", "grad") * 2
DROPOUT = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
WEIGHTS, INT8 = {"w": jnp.ones((64, 64))}, "int8_from_mixed_bfloat16"


def state_of(tx=None):
    return (tx or wrap()).init(PARAMS)


# fmt: off
ROWS = {
    "a step as a state": [
        (lambda: mpjax.current_loss_scale(mpjax.make_train_step(loss_fn, SGD)), V,
            "got a train step, which is no state | Allowed | state = step.init(params)"),
    ],
    "value_and_grad": [
        (lambda: VG(loss_fn, loss_scale="auto"), T, "'auto' | Allowed | DynamicLossScale()"),
        (lambda: VG(loss_fn, loss_scale=X), T, "real number | f32[4,2] | vmap"),
        *each(lambda v: VG(loss_fn, loss_scale=v), T,
            "got a | . | Allowed | Type loss_scale=mpjax.current_loss_scale(opt_state).",
            state_of(), (optax.EmptyState(), state_of())),
        (lambda: VG(loss_fn, loss_scale=SGD.init(PARAMS)), T,
            "got a tuple. | Allowed | DynamicLossScale()"),
        (lambda: VG(loss_fn, loss_scale=8.0, unscale=False), V,
            "got False | nothing would unscale | Allowed | current_loss_scale(opt_state)"),
        (lambda: VG(loss_fn, loss_scale=as_owned(SLS(8)), unscale=True), V,
            "got True | twice | Leave unscale= out"),
        (lambda: VG(loss_fn, loss_scale=8.0, unscale=0), T, "None, True or False | got 0"),
        (lambda: VG(loss_fn, loss_scale=8.0, argnum=1), T, "argnum= | Type argnums="),
        (lambda: VG(loss_fn, growth_interval=9), T,
            "Type loss_scale=mpjax.DynamicLossScale(growth_interval=...) instead"),
        (lambda: VG(loss_fn, loss_scale=1, policy="bf61"), V, "'bf61' | Accepted | Did you mean"),
        (lambda: mpjax.nnx.value_and_grad(loss_fn, loss_scale="x"), T,
            "'x' | Allowed | DynamicLossScale()"),
        (lambda: mpjax.nnx.value_and_grad(loss_fn, loss_scale=8.0, unscale=False), V,
            "False | Allowed | current_loss_scale(opt_state)"),
        *each(lambda made: made(loss_fn), T,  # who wants none says None
            ": loss_scale= is missing. | None for none. | (loss_fn, loss_scale=mpjax.current_loss",
            *GRADIENTS),
        (lambda: mpjax.nnx.grad(loss_fn, 8.0), T,
            "grad: got 8.0 as the second argument. | Type grad(loss_fn, loss_scale=8.0)."),
        *told(lambda v: VG(loss_fn, v), T, "value_and_grad: got {}",
            ("16-mixed", "the policy '16-mixed' as the second | (loss_fn, policy='16-mixed', lo"),
            (DLS(), "a DynamicLossScale as the second argument. | (loss_fn, loss_scale=it)."),
            (8.0, "8.0 as the second argument. | (loss_fn, loss_scale=8.0).")),
        *told(lambda made: made(loss_fn, PARAMS, X, loss_scale=None), T,
            "{}: got a dict as the second argument, argnums. | Allowed | Type {}(loss_fn, loss_"
            "scale=...)(params, batch): the function",
            *((made, name) for made, name in zip(GRADIENTS, NAMES, strict=True))),
        (lambda: VG(loss_fn, PARAMS), T, "got a dict as the second argument | (params, batch): t"),
        (lambda: VG(loss_fn, PARAMS, X, X, loss_scale=None), T, "4 arguments. | (params, batch):"),
        (lambda: VG(loss_fn, POLICY, loss_scale=None), T, "got the policy 'bf16-mixed' as the "),
        *told(lambda made: made(lambda p: 0.0, loss_scale=8.0)(MLP), T,
            "(<lambda>): leaf 'activation' is the function relu, which is no | eqx.partition(model",
            (VG, ""), (mpjax.grad, "")),
        *told(lambda made: made(lambda m: 0.0, loss_scale=8.0)(DROPOUT), T,
            "'rngs/count/value' is u32[], which has no gradient. | Type mpjax.nnx.value_and_grad(f",
            (VG, ""), (mpjax.grad, "")),
        (lambda: VG(lambda p: 0.0, loss_scale=8.0)(PARAMS | {"n": np.arange(3)}), T,
            "leaf 'n' is i64[3], which has no gradient. | another argument, or type allow_int"),
        (lambda: VG(lambda p, n: 0.0, argnums=(0, 1), loss_scale=8.0)(PARAMS, 3), T,
            "an argument is 3, which has no gradient."),
        (lambda: VG(lambda p: 0.0, allow_int=True, loss_scale=8.0)(PARAMS | {"n": "x"}), T,
            "leaf 'n' is 'x', which is no array."),
        (lambda: mpjax.grad(loss_fn, loss_scale=None)(mpjax.quantize(WEIGHTS, INT8), X), T,
            "value_and_grad(loss_fn): got weights in 8 bits | Differentiate mpjax.dequantize(par"),
        *told(lambda v: VG(v, loss_scale=8), T,
            "value_and_grad: the first argument must be a function; got {}. | Type "
            "value_and_grad(loss", (jnp.float32(1), "f32[]"), (None, "NoneType")),
        *told(lambda v: VG(lambda w: v, loss_scale=8)(jnp.float32(1)), T,
            "value_and_grad(<lambda>): the loss must be a floating scalar; got {} | Reduce it",
            (jnp.ones(32, jnp.bfloat16), "bf16[32]."), (jnp.ones((1,)), "f32[1]."),
            (jnp.int32(3), "i32[]."), (jnp.array(True), "bool[]."), (jnp.complex64(1), "c64[]."),
            (jnp.ones((), jnp.float8_e5m2), "f8_e5m2[]."), (3, "int."), (None, "NoneType."),
            ("loss", "str."), ((jnp.ones(()), 1), "tuple."), ({"loss": jnp.ones(())}, "dict.")),
        *told(lambda fun: VG(fun, loss_scale=1)(PARAMS, X), T,
            "value_and_grad(loss_fn): the loss {} | Give the loss function itself, without jax.val",
            (jax.value_and_grad(loss_fn), "came with gradients."),
            (jax.grad(loss_fn), "is gradients.")),
        (lambda: VG(lambda w: w**2, loss_scale=1)(jnp.ones(3)), T,
            "the loss must be a floating scalar; got f32[3]. | Reduce it"),
        (lambda: VG(jax.grad(lambda w: jnp.sum(w**2)), loss_scale=1)(jnp.ones(3)), T,
            "got f32[3]. | Reduce it | If it is jax.grad(loss_fn), give loss_fn itself:"),
        *each(lambda aux: VG(lambda w: (jnp.sum(w), aux), loss_scale=1)(jnp.ones(2)), T,
            "got tuple. | set has_aux=True", jnp.ones(()), jnp.ones(3), {"n": 1}),
        (lambda: VG(per_row, loss_scale=1)(PARAMS, X), T, "(per_row) | f32[4] | Reduce it"),
        *told(lambda v: VG(lambda w: v, has_aux=True, loss_scale=8)(jnp.float32(1)), T,
            "value_and_grad(<lambda>): has_aux=True needs a pair (loss, aux); got {} | Return "
            "(loss, aux)", (jnp.ones(()), "f32[]"), ((jnp.ones(()),), ""), ([jnp.ones(()), 1], ""),
            ((1.0, 2, 3), "")),
        *told(lambda v: VG(loss_fn, loss_scale=v), T,
            "value_and_grad(loss_scale): got {} | Allowed: NoOpLossScale() | DynamicLossScale()",
            ("dynamic", "'dynamic'"), (True, ""), (object(), ""), (DLS, ""), (LS, ""), ([8.0], ""),
            ({"loss_scale": 8}, "")),
        *each(lambda v: VG(loss_fn, loss_scale=v), V,
            "StaticLossScale(loss_scale): must be a positive | got {} | Allowed",
            *(0, -1.0, NAN, INF)),
        *each(lambda wrap: wrap(VG(loss_fn, loss_scale=8, axis_name="batch"))(PARAMS, X[None]),
            NameError,
            "value_and_grad(axis_name): 'batch' is no axis of the surrounding transformation | "
            "Allowed | leave it out", lambda fun: fun,
            lambda fun: jax.vmap(fun, axis_name="i", in_axes=(None, 0))),
    ],
    "loss scales": [
        (lambda: DLS(enabled=False), T, 'enabled= | mpjax.NoOpLossScale()'),
        (lambda: mpjax.NoOpLossScale().get_scale(), A, 'NoOpLossScale | .loss_scale'),
        (lambda: mpjax.get_loss_scale("dynamic"), V, 'mpjax.DynamicLossScale()'),
        *each(mpjax.get_loss_scale, V, "get_loss_scale: got {}, | mpjax.StaticLossScale({})",
            *(2**15, 1024.0)),
        (lambda: DLS(8, 0, 2000, 2), T,  # the order of jmp
            "DynamicLossScale: takes loss_scale without a name; got 4 | growth_factor=, | "
            "growth_interval=, | counter= | For the order of jmp, type DynamicLossScale("
            "loss_scale, counter=..., growth_interval=..., growth_factor=..., backoff_factor=...)"),
        (lambda: DLS(8, 0), T, "got 2 | type DynamicLossScale(loss_scale, counter=...)."),
        (lambda: mpjax.StaticLossScale(8, 0), T, "got 2 | Drop the others."),
        *told(lambda given: DLS(**given), T, "DynamicLossScale: unknown keyword {}",
            ({"initial_scale_power": 16}, "initial_scale_power=. | Type loss_scale=2**16 instead"),
            *(({name: 7}, f"{name}=. | Type counter= instead of {name}=.")
                for name in ("growth_tracker", "_growth_tracker")),
            ({"loss_scale_max": 7}, "loss_scale_max=. | Drop loss_scale_max=.")),
        *told(lambda name: getattr(DLS(), name), A, "DynamicLossScale: has no attribute {}",
            *((name, f"'{name}'. | Here it is {here}") for name, here in (
                *(("cur_scale", ".loss_scale."), ("init_scale", ".loss_scale.")),
                *(("scale_window", ".growth_interval"), ("growth_tracker", ".counter")),
                *(("_growth_tracker", ".counter"), ("set_growth_interval", "another loss scale")),
                ("set_growth_factor", "another loss scale: mpjax.DynamicLossScale(growth_factor="),
            ))),
        (lambda: mpjax.Float8CurrentScaling("e4m3"), T, "takes nothing without a name | (fprop="),
        (lambda: DLS(8, growth_intervall=2), T, "Allowed | Type growth_interval="),
        (lambda: SLS(scale=8), T, "scale= | Allowed | Type loss_scale="),
        *(
            row
            for cls, field in (
                *((DLS, f) for f in ("loss_scale", "min_loss_scale", "max_loss_scale")),
                (SLS, "loss_scale"),
            )
            for row in each(
                lambda v, cls=cls, field=field: cls(**{field: v}),
                V,
                f"{cls.__name__}({field}): must be a positive finite number; got | "
                "Allowed: 2**-126",
                *(0, -1, 10**400, 2.0**-149, 2.0**-127, 2.0**127, INF, -INF, NAN, 1e39),
            )
        ),
        *told(lambda options: DLS(**options), V, "DynamicLossScale{}",
            ({"growth_factor": 1}, "(growth_factor): must be more than 1 and finite | 2."),
            ({"growth_factor": 1 + 1e-9}, "(growth_factor): must be more than 1 | in float32"),
            ({"growth_factor": NAN}, "(growth_factor): must be more than 1"),
            ({"backoff_factor": 1}, "(backoff_factor): must lie between 0 and 1 | 0.5"),
            ({"backoff_factor": 1 - 1e-9}, "(backoff_factor): must lie between 0 and 1, in flo"),
            ({"backoff_factor": 0}, "(backoff_factor): must lie between 0 and 1"),
            ({"backoff_factor": NAN}, "(backoff_factor): must lie between 0 and 1"),
            ({"growth_interval": 0}, "(growth_interval): must be a whole number of at least 1; g"),
            ({"growth_interval": 1.5}, "(growth_interval): must be a whole number | 2000"),
            ({"growth_interval": 2**31}, "(growth_interval): must be a whole number"),
            ({"counter": -1}, "(counter): must be a whole number of at least 0; got -1"),
            ({"min_loss_scale": 8, "max_loss_scale": 4},
                ": min_loss_scale 8 is above max_loss_scale 4 | Swap them"),
            ({"loss_scale": 1, "min_loss_scale": 2},
                ": loss_scale 1 is outside [2, 1.67772e+07] | min_loss_scale"),
            ({"loss_scale": 2.0**25},
                ": loss_scale 3.35544e+07 is outside | Start within the bounds | max_loss_scale")),
        *(
            row
            for field in FIELDS
            for row in each(
                lambda v, field=field: DLS(**{field: v}),
                T,
                f"DynamicLossScale({field}): must be a real number; got | Type a number",
                *("2", None, True, 1j, jnp.ones(2), np.ones((1, 1)), [1.0]),
            )
        ),
        *each(DLS().adjust, V,
            "DynamicLossScale.adjust(grads_finite): must be a boolean scalar; got "
            "| all_finite(grads) | jnp.all(flags)",
            *(1, None, jnp.ones(2, bool), 1.0)),
        *each(lambda scale: setattr(scale, "loss_scale", 3), A,
            "is immutable; got loss_scale = 3. | Make another", *(SLS(2), DLS(2))),
        *each(lambda scale: delattr(scale, "loss_scale"), A,
            "is immutable; cannot delete loss_scale", *(SLS(2), DLS(2))),
    ],
    "select_tree and all_finite": [
        *told(lambda pred: mpjax.select_tree(pred, 1.0, 2.0), V,
            "select_tree(pred): must be a boolean scalar; got {}. | all_finite(grads)", (1, "int"),
            ("yes", "str"), (None, "NoneType"), (jnp.array([True]), "bool[1]"),
            (np.ones((2, 2), bool), "bool[2,2]"), (jnp.zeros(1, jnp.bfloat16), "bf16[1]"),
            (KEY, "key<fry>[]"), (jax.ShapeDtypeStruct((2,), jnp.float16), "f16[2]")),
        *told(lambda trees: mpjax.select_tree(True, *trees), V, "{}",
            (({"w": X}, {"v": X}), "'w' is only in the first tree"),
            (({}, {"v": X}), "'v' is only in the second"),
            (((1.0,), [1.0]), "differ in their containers; got tuple and list"),
            (({"l": [X]}, {"l": [X[0]]}), "select_tree at 'l/0': | f32[4,2] and f32[2]"),
            ((X, X.astype("bfloat16")), "got f32[4,2] and bf16[4,2] | astype"),
            (([1], [1.0]), "select_tree at '0': | got int and float"),
            (("relu", "gelu"), "got 'relu' and 'gelu'"),
            (("relu", X), "the trees differ; got 'relu' and "),
            ((KEY, jax.random.key(0, impl="rbg")), "got key<fry>[] and key<rbg>[]"),
            ((KEY, jnp.ones(())), "got key<fry>[] and f32[]")),
        (lambda: mpjax.all_finite(PARAMS, "batch"), NameError,
            "all_finite(axis_name): 'batch' is no axis | Allowed: an axis of the mesh | leave it "
            "out"),
        (lambda: jax.vmap(lambda x: mpjax.all_finite(x, ("i", "batch")), axis_name="i")(X),
            NameError, "'batch' is no axis"),
    ],
    "with_loss_scale": [
        (lambda: wrap(None), T, "got None | Allowed | optax.adamw(1e-3)"),
        (lambda: wrap(optax.adam), T, "function adam | Allowed | optax.adam(1e-3)"),
        (lambda: wrap(1e-3), T, "got 0.001 | Allowed | optax.adamw(0.001)"),
        (lambda: wrap(DLS(), SGD), T,
            "got a DynamicLossScale as the optimizer | Swap them: mpjax.with_loss_scale(tx, loss_"),
        *told(lambda read: read(wrap()), V, "{}: got the optimizer | in its state. | {}(opt_state)",
            *((read, read.__name__) for read in READERS)),
        *told(lambda given: mpjax.raise_if_diverged(*given), V, "raise_if_diverged: | {}",
            (({"loss": X, "loss_scale": X, "diverged": X},),
                "no loss scale; got a dict. | Allowed | raise_if_diverged(state) | step(state"),
            ((PARAMS, state_of()), "got a LossScaleState in | raise_if_diverged(opt_state, pa"),
            ((PARAMS, step().init(PARAMS)), "got a TrainState in | state comes first"),
            ((SGD.init(PARAMS), PARAMS), "no loss scale; got a tuple. | Wrap the optimizer")),
        (lambda: mpjax.current_loss_scale(PARAMS), V, "got a dict. | Allowed | step(state, batch)"),
        (lambda: wrap().update(state_of(), PARAMS, PARAMS), V,
            "no LossScaleState; got a dict. | gradients come first: tx.update(grads, opt_st"),
        (lambda: wrap().update(PARAMS, state_of(), mpjax.grad(loss_fn, loss_scale=8)(PARAMS, X)), V,
            "gradients in place of the parameters | gradients come first: tx.update(grads, opt_st"),
        (lambda: mpjax.all_finite(PARAMS, PARAMS), T, "axis_name): got dict | Type one tree"),
        (lambda: mpjax.value_and_grad(lambda w: (jnp.sum(w), jnp.max(w)), loss_scale=8.0)(X), T,
            "has_aux=True. | its weight: make_train_step(..., weighted=True)"),
        (lambda: mpjax.autocast(loss_fn, DLS()), V, "loss scale has a place | loss_scale=it"),
        (lambda: wrap(SGD, SGD), T, "Allowed | DynamicLossScale()"),
        *told(lambda name: wrap(**{name: 2.0}), T, "unknown keyword {}",
            *((name, f"{name}=. | Type loss_scale=mpjax.DynamicLossScale({own}=...) instead of ")
                for name, own in (
                    *(("min_loss_scale", "min_loss_scale"), ("period", "growth_interval")),
                    *(("init_scale", "loss_scale"), ("factor", "growth_factor=..., backoff_factor"))
                ))),
        (lambda: wrap(SGD, POLICY), T, "'bf16-mixed' | Allowed | DynamicLossScale()"),
        *told(lambda inside: wrap(inside).init(PARAMS), V,
            "holds a loss scale already{} | Drop one of", (wrap(), " | twice"),
            (optax.chain(optax.clip(1.0), wrap()), ""), (optax.masked(wrap(), True), "")),
        (lambda: mpjax.current_loss_scale(None), V, "NoneType | with_loss_scale(tx"),
        (lambda: mpjax.current_loss_scale([state_of(), state_of()]), V,
            "2 loss scales | opt_state[0]"),
        (lambda: mpjax.current_loss_scale(state_of(optax.chain(optax.clip(1.0), wrap()))), V,
            "behind 1 of its chain (state: EmptyState) | Allowed | Move them inside"),
        *told(lambda tx: mpjax.current_loss_scale(state_of(tx)), V, "current_loss_scale: | {}",
            (optax.MultiSteps(wrap(), 2).gradient_transformation(),
                "optax.MultiSteps is around | Allowed | with_loss_scale(optax.MultiSteps("),
            (optax.chain(optax.contrib.sam(wrap(), SGD, sync_period=2)),
                "the state SAMState is around | still scaled | Allowed | Put with_loss_scale ar"),
            (optax.partition({"on": wrap(), "off": optax.adam(0.1)}, {"w": "on"}),
                "some groups | not 'off' | still scaled | with_loss_scale(optax.partition(")),
        (lambda: jax.eval_shape(mpjax.raise_if_diverged, state_of()), V,
            "inside a traced function. | Call it on the host"),
        *each(lambda v: wrap(max_consecutive_skips=v), V,
            "max_consecutive_skips | whole number of at least 1, or None; got {} | 50",
            *(0, -1, 1.5, True, "3")),
        *each(lambda v: wrap(SGD, v), T,
            "with_loss_scale(loss_scale): got | Allowed: NoOp | DynamicLossScale()",
            *("dynamic", True, object())),
        *each(lambda read: read(SGD.init(PARAMS)), V,
            "holds no loss scale; got a tuple. | Wrap the optim | with_loss_scale(tx",
            *READERS),
        (lambda: wrap().update(PARAMS | {"v": X}, state_of(), PARAMS), V,
            "'v' is only in the gradients | parameters that you pass"),
        (lambda: wrap().update({"a": X, "b": X}, state_of()), V,
            "made for (1,) gradients; got 2. | Make a | tx.init(params)"),
        (lambda: wrap().update(PARAMS, (), PARAMS), V,
            "no LossScaleState; got a tuple. | Make it with tx.init(params)"),
        (lambda: wrap().update(OVERWRITTEN, wrap().init(OVERWRITTEN)), V,
            "params is missing. | Type tx.update(grads, opt_st"),
    ],
}
# fmt: on
