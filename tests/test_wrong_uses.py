"""What a person may get wrong, a row each: what was got, what is allowed, what to type.

No row compiles more than a small array: what is wrong is said where it is given, or while a step
is traced.
"""

import operator
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
import mpjax.linen
import mpjax.nnx
import mpjax.optim
from mpjax._scaling.loss_scale import owned

pytestmark = pytest.mark.no_leak_check("pytest.raises keeps the frame that holds the tracer")

PARAMS = {"w": jnp.ones((2, 2))}
X = jnp.ones((4, 2))
SGD = optax.sgd(0.1)
POLICY = "bf16-mixed"


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"]) ** 2)


def per_row(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"]) ** 2, axis=1)


def with_state(params: Any, extra: Any, batch: Any) -> Any:
    return loss_fn(params, batch), extra


def step(fun: Any = loss_fn, tx: Any = SGD, policy: Any = None, **options: Any) -> Any:
    return mpjax.make_train_step(fun, tx, policy, **options)


def traced(made: Any, *state: Any, batch: Any = X) -> Any:
    return made.lower(made.init(*(state or (PARAMS,))), batch)


def traced_call(fun: Any) -> Any:
    made = step(fun)
    return made(made.init(PARAMS), X)


def wrap(tx: Any = SGD, scale: Any = 8.0, **options: Any) -> Any:
    return mpjax.with_loss_scale(tx, scale, **options)


def state_of(tx: Any = None) -> Any:
    return (tx or wrap()).init(PARAMS)


def model() -> Any:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def changed(loss: Any) -> Any:
    return lambda params, extra, batch: (loss_fn(params, batch), loss(extra))


def donated() -> Any:
    made = step()
    state = made.init(PARAMS)
    state.params["w"].delete()
    return made(state, X)


def other_state() -> Any:
    made, other = step(tx=optax.adam(0.1)), step(tx=optax.sgd(0.1, momentum=0.9))
    return made.lower(other.init(PARAMS), X)


def flax_state() -> Any:
    return TrainState.create(apply_fn=None, params=PARAMS, tx=SGD)


def entered(policy: Any) -> None:
    with mpjax.default_policy(policy):
        pass


def deleted() -> Any:
    params = {"w": jnp.ones(2)}
    params["w"].delete()
    return params


LS, DLS, SLS = mpjax.LossScale, mpjax.DynamicLossScale, mpjax.StaticLossScale
VG: Any = mpjax.value_and_grad
Row = tuple[Callable[[], Any], type[Exception], tuple[str, ...]]


def block(context: Any) -> None:
    with context:
        pass


def two(params: Any, x: Any, y: Any) -> Any:
    return loss_fn(params, x) + jnp.sum(y)


def unmatched(pattern: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpjax.PolicyMap(POLICY, {pattern: "float32"}).cast_to_param({"layer": PARAMS})


def branching(params: Any, batch: Any) -> Any:
    return loss_fn(params, batch) if jnp.sum(batch) > 0 else 0.0  # the line of the user


def note_of(run: Callable[[], Any]) -> Any:
    try:
        run()
    except jax.errors.ConcretizationTypeError as error:
        raise ValueError("\n".join(error.__notes__)) from None


def with_flax_hidden(name: str) -> Any:
    code = f"import sys; sys.modules['flax'] = None; sys.modules['optax'] = None; import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    raise ImportError(done.stderr)


T, V, A = TypeError, ValueError, AttributeError

CONTEXT = (
    "no context manager",
    "jit has traced already",
    "Type @mpjax.autocast(",
    "full_precision",
)
TORCH = ("torch.autocast", "Allowed", "no context manager")
MAP = mpjax.PolicyMap("16-mixed", {"norm": "float32"})
INT8 = "int8_from_mixed_float16"
ROWS: dict[str, list[Row]] = {
    "autocast as other libraries have it": [
        (lambda: block(mpjax.autocast(POLICY)), T, ("with autocast('bf16-mixed')", *CONTEXT)),
        (lambda: block(mpjax.autocast()), T, CONTEXT),
        (lambda: block(mpjax.autocast("16-mixed")), T, ("@mpjax.autocast('16-mixed')", *CONTEXT)),
        (lambda: block(mpjax.autocast(policy="O1")), T, ("@mpjax.autocast('O1')", *CONTEXT)),
        (lambda: block(mpjax.autocast(rules={"exp": "full"})), T, CONTEXT),
        (lambda: block(mpjax.autocast(MAP)), T, ("@mpjax.autocast(PolicyMap('16-mixed'", *CONTEXT)),
        (lambda: mpjax.autocast("cuda"), T, ("'cuda', a device", "Allowed", "@mpjax.autocast")),
        (
            lambda: mpjax.autocast("cuda", dtype=jnp.float16, enabled=True),
            T,
            ("a device, dtype=, enabled=", "@mpjax.autocast('16-mixed')", *TORCH),
        ),
        (lambda: mpjax.autocast("cuda", enabled=False), T, ("'32-true'", *CONTEXT)),
        (lambda: mpjax.autocast(device_type="cuda", dtype=jnp.float16), T, ("'16-mixed'", *TORCH)),
        (lambda: mpjax.autocast(dtype=jnp.float32), T, ("autocast('32-true')", *TORCH)),
        (lambda: mpjax.autocast(cache_enabled=False), T, ("got cache_enabled=", *TORCH)),
        (lambda: mpjax.autocast(False), T, ("got False", "'32-true'", *CONTEXT)),
        (lambda: mpjax.autocast(True), T, ("got True", *TORCH)),
        (lambda: mpjax.autocast(loss_fn, "cuda"), V, ("'cuda' is a device", "'16-mixed'")),
        (lambda: mpjax.autocast(loss_fn, True), V, ("got True", "Accepted", "'32-true'")),
        (lambda: mpjax.autocast(jnp.ones(2)), V, ("an array, f32[2]", "autocast(fun,")),
        (lambda: mpjax.autocast(loss_fn, amp_dtype=jnp.float16), T, ("Type policy='16-mixed'",)),
        (lambda: mpjax.full_precision(enabled=False), T, ("got enabled=False", "Leave the block")),
        (lambda: mpjax.autocast("cuda", jnp.float16), T, ("a device", "autocast('16-mixed')")),
        (lambda: mpjax.autocast("cuda:0", jnp.bfloat16), T, ("a device", "'bf16-mixed'")),
        (lambda: mpjax.autocast("cpu", "bf16-mixed"), T, ("a device", "'bf16-mixed'")),
        (
            lambda: mpjax.autocast(device_type="cuda"),
            T,
            ("device_type=", "torch.autocast", "autocast(fun, 'bf16-mixed')", *CONTEXT),
        ),
        (lambda: mpjax.autocast(enabled=False), T, ("enabled=", "'32-true'", "full_precision")),
        (lambda: mpjax.autocast(dtype=jnp.bfloat16), T, ("dtype=", "torch.autocast", *CONTEXT)),
    ],
    "policies as other libraries have them": [
        (lambda: mpjax.get_policy(POLICY).variable_dtype, A, ("Here it is .param_dtype",)),
        (lambda: mpjax.get_policy(POLICY).dtype, A, ("Here it is .compute_dtype",)),
        (lambda: mpjax.get_policy(POLICY).reduce_dtype, A, ("averaged in float32",)),
        (lambda: mpjax.get_policy(POLICY).compute_dtyp, A, ("Did you mean .compute_dtype?",)),
        (lambda: mpjax.get_policy("int8_from_float32").get_config, A, ("Here it is .to_dict()",)),
        (lambda: mpjax.get_policy(INT8).source_name, A, ("Here it is .base",)),
        (lambda: mpjax.get_policy(POLICY).convert_input, A, ("Here it is .cast_to_compute",)),
        (lambda: mpjax.get_policy(POLICY).keep_batchnorm_fp32, A, ("nothing: autocast",)),
        (lambda: MAP.default_policy, A, ("PolicyMap", "Here it is .default")),
        (lambda: MAP.compute_dtype, A, (".policy_for(path).compute_dtype",)),
        (lambda: MAP.update({"a": "f32"}), A, ("PolicyMap(policies.default, {'head'",)),
        (lambda: operator.setitem(MAP, "a", "f32"), T, ("is immutable", "{'a': policy, **")),
        (lambda: operator.delitem(MAP, "norm"), T, ("is immutable", "Make another")),
        (
            lambda: mpjax.PolicyMap(default_policy=POLICY),
            T,
            ("default_policy=", "Allowed: default, rules", "Type default="),
        ),
        (lambda: mpjax.PolicyMap(POLICY, policy_map={}), T, ("Type rules=",)),
        (lambda: mpjax.Policy("mixed_float16"), V, ("one dtype of three", "get_policy('mixed_f")),
        (lambda: mpjax.Policy(reduce_dtype="f32"), T, ("reduce_dtype=: gradients are averaged",)),
        (lambda: mpjax.Policy(param="f32"), T, ("param=", "Allowed", "Type param_dtype=")),
        (lambda: mpjax.get_policy(["f32", "f16", "f32"]), V, ("a list", "Policy('f32', 'f16',")),
        (lambda: mpjax.get_policy("f32,f16,f32"), V, ("Type 'p=f32,c=f16,o=f32'",)),
        (lambda: mpjax.get_policy({"compute": "f16"}), V, ("Allowed", "'bf16-mixed'")),
        (lambda: mpjax.get_policy("transformer-engine"), V, ("'float8_from_mixed_bfloat16'.",)),
        (lambda: mpjax.get_policy("transformer-engine-float16"), V, ("8_from_mixed_float16'.",)),
        (lambda: mpjax.get_policy("HYBRID"), V, ("8 bits", "Type 'float8_from_mixed_bfloat16'")),
        (lambda: mpjax.get_policy("8bit"), V, ("8 bits", "Type 'int8_from_mixed_bfloat16'")),
        (lambda: mpjax.get_policy("gptq"), V, ("no products of 4 bits", "int8_from_mixed")),
        (lambda: mpjax.get_policy("highest"), V, ("float32 products", "dot_precision='tf32'")),
        (lambda: mpjax.get_policy("medium"), V, ("float32 products", "dot_precision='tf32'")),
        (lambda: mpjax.get_policy("O4"), V, ("'O4'", "Accepted", "get_policy('bf16-mixed')")),
        (
            lambda: mpjax.QuantizedPolicy("int8", POLICY),
            T,
            ("a recipe", "Allowed", "Type QuantizedPolicy('bf16-mixed', 'int8')"),
        ),
        (lambda: mpjax.DelayedScaling(fp8_format="HYBRID"), T, ("Allowed", "fprop='e4m3'")),
        (lambda: mpjax.Int8CurrentScaling(fp8_dpa=True), T, ("attention", "Drop fp8_dpa=:")),
        (lambda: mpjax.MXFP8BlockScaling(enabled=False), T, ("Allowed", "without recipe")),
        (lambda: mpjax.Float8BlockScaling(margn=1), T, ("Float8BlockScaling:", "Type margin=")),
        (lambda: mpjax.Float8CurrentScaling(fprop="hybrid"), V, ("Allowed", "Float8CurrentSc")),
        (lambda: mpjax.get_policy("nf4"), V, ("no products of 4 bits", "int8_from_mixed_bfloat16")),
        (lambda: mpjax.get_policy("int4"), (T, V), ("4",)),
        (lambda: mpjax.get_policy("4bit"), V, ("no products of 4 bits", "mpjax.quantize")),
        (
            lambda: mpjax.PolicyMap({"norm*": "float32"}),
            T,
            ("no default policy", "Type PolicyMap('bf16-mixed', {'norm*': 'float32'})"),
        ),
        (
            lambda: mpjax.PolicyMap(POLICY, {"a*": "float32"})["a/b"],
            KeyError,
            ("no rule has the pattern 'a/b'", "Patterns: 'a*'", "policies.policy_for('a/b')"),
        ),
        (lambda: unmatched(".*/w"), UserWarning, ("signs of a regular", "Type 're:.*/w'")),
        (lambda: unmatched("^layer"), UserWarning, ("signs of a regular", "Type 're:^layer'")),
        (lambda: unmatched(r"la\w+/w"), UserWarning, ("signs of a regular", "Type 're:la")),
        (lambda: unmatched("(layer|block)/w"), UserWarning, ("Type 're:(layer|block)/w'",)),
        (lambda: unmatched("lay/w"), UserWarning, ("Nearest: 'layer/w'",)),
    ],
    "steps as other libraries have them": [
        (
            lambda: step(two).init(PARAMS),
            T,
            ("two(params, x, y)", "def two(params, batch): x, y = batch", "step(state, (x, y))"),
        ),
        (lambda: step()(step().init(PARAMS), X, X), T, ("2 arguments", "step(state, (x, y))")),
        (lambda: step()(step().init(PARAMS)), T, ("0 arguments", "step(state, (x, y))")),
        (lambda: step().init(), V, ("got None", "mpjax.nnx.make_train_step", "step.init()")),
        (
            lambda: mpjax.nnx.make_train_step(model(), SGD, None, lambda m, x: 0.0).init(PARAMS),
            T,
            ("got a dict", "Type step.init()"),
        ),
        (
            lambda: step(tx=optax.MultiSteps(SGD, 2)),
            T,
            ("MultiSteps", "accumulate=4", "gradient_transformation()"),
        ),
        (
            lambda: note_of(lambda: traced_call(branching)),
            V,
            ("At test_wrong_uses.py:", "# the line of the user", "jax.lax.cond"),
        ),
        (
            lambda: with_flax_hidden("mpjax.nnx"),
            ImportError,
            ("mpjax.nnx: needs flax, which is not installed", "pip install flax"),
        ),
        (lambda: with_flax_hidden("mpjax.train"), ImportError, ("mpjax.train: needs optax",)),
    ],
    "make_train_step": [
        (lambda: step(tx=optax.adam), T, ("function adam", "Allowed", "optax.adam(1e-3)")),
        (lambda: step(tx=optax.sgd), T, ("function sgd", "Allowed", "optax.sgd(1e-3)")),
        (lambda: step(tx=0.1), T, ("got 0.1", "Allowed", "optax.adamw(0.1)")),
        (lambda: step(tx=None), T, ("got None", "Allowed", "optax.adamw(1e-3)")),
        (lambda: step(tx="adam"), T, ("got 'adam'", "Allowed", "optax.adamw(1e-3)")),
        (lambda: step(tx=(SGD, SGD)), T, ("got a tuple", "optax transformation", "optax.adamw")),
        (lambda: step(tx=lambda lr: SGD), T, ("<lambda>", "Allowed", "Call it")),
        (
            lambda: step(tx=nnx.Optimizer(model(), SGD, wrt=nnx.Param)),
            T,
            ("an nnx.Optimizer", "Allowed", "optimizer.tx"),
        ),
        (lambda: mpjax.make_train_step(SGD, loss_fn), T, ("loss function", "order", "Swap")),
        (lambda: mpjax.make_train_step(POLICY, loss_fn), T, ("'bf16-mixed'", "order", "Swap")),
        (lambda: mpjax.make_train_step(loss_fn, POLICY, SGD), T, ("tx", "'bf16-mixed'", "optax")),
        (lambda: step(policy=SGD), T, ("as the policy", "make_train_step(loss_fn, tx,")),
        (lambda: step(None), T, ("got None", "loss_fn(params, batch)", "without parentheses")),
        (lambda: step(loss_fn(PARAMS, X)), T, ("got f32[]", "Allowed", "without parentheses")),
        (lambda: step(nn.Dense), T, ("the class Dense", "Allowed", "loss_fn")),
        (lambda: step(model()), T, ("an nnx.Module", "Allowed", "def loss_fn(params, batch)")),
        (lambda: step(nn.Dense(2)), T, ("linen module", "Allowed", "def loss_fn(params, batch)")),
        (lambda: step(policy="fp16-mixed"), V, ("'fp16-mixed'", "Accepted", "'16-mixed'")),
        (lambda: step(policy="bf16"), V, ("two things", "'bf16-mixed'", "'bfloat16'")),
        (lambda: step(policy=jnp.bfloat16), V, ("bfloat16 alone", "'bf16-mixed'", "'bfloat16'")),
        (lambda: step(policy=jnp.float16), V, ("float16 alone", "'16-mixed'", "'float16'")),
        (lambda: step(policy=jnp.dtype("bfloat16")), V, ("bfloat16 alone", "'bf16-mixed'")),
        (lambda: step(policy=True), V, ("True", "Accepted", "'bf16-mixed'")),
        (lambda: step(accumulate=0), V, ("got 0", "at least 1", "Type")),
        (lambda: step(accumulate=2.0), V, ("got 2.0", "whole number", "Type")),
        (lambda: step(accumulate=True), V, ("got True", "whole number", "Type")),
        (lambda: step(has_aux=1), T, ("has_aux", "got 1", "True or False", "has_aux=True")),
        (lambda: step(weighted="mask"), T, ("weighted", "got 'mask'", "weighted=True")),
        (lambda: step(donate=(0,)), T, ("donate", "got a tuple", "donate=True")),
        (lambda: step(axis_name=0), T, ("axis_name", "got 0", "axis_name='data'")),
        (lambda: step(loss_scale="dynamic"), T, ("'dynamic'", "Allowed", "DynamicLossScale()")),
        (lambda: step(loss_scale=DLS), T, ("DynamicLossScale", "Allowed", "DynamicLossScale()")),
        (lambda: step(loss_scale=0.0), V, ("got 0.0", "Allowed", "2**15")),
        (lambda: step(loss_scale=True), T, ("got True", "Allowed", "DynamicLossScale()")),
        (lambda: step(max_consecutive_skips=0), V, ("got 0", "at least 1", "50")),
        (lambda: step(tx=wrap(), loss_scale=8.0), V, ("holds one", "Drop")),
        (
            lambda: step(tx=optax.chain(wrap(), optax.identity()), loss_scale=8.0).init(PARAMS),
            V,
            ("holds one", "Drop"),
        ),
        *(
            (lambda name=name, v=v: step(**{name: v}), T, (f"{name}=", "Allowed", said))
            for name, v, said in (
                ("fp16", True, "Type policy='16-mixed'"),
                ("bf16", True, "Type policy='bf16-mixed'"),
                ("amp_dtype", "float16", "Type policy='16-mixed'"),
                ("dtype", jnp.float16, "Type policy='16-mixed'"),
                ("dtype_policy", "mixed_float16", "Type policy="),
                ("gradient_clip_val", 1.0, "clip_by_global_norm(1.0), optax.adamw(1e-3)) as tx"),
                ("max_grad_norm", 1.0, "clip_by_global_norm(1.0), optax.adamw(1e-3)) as tx"),
                ("grad_accum", 2, "Type accumulate="),
                ("every_k_schedule", 2, "Type accumulate="),
                ("in_axes", 0, "Type accumulate_axes="),
                ("mutable", ["batch_stats"], "step.init(params, extra_state)"),
                ("rngs", 1, "step.init(params, extra_state)"),
                ("params", 1, "step.init(params)"),
                ("master_weights", True, "with_master_weights(tx)"),
                ("keep_batchnorm_fp32", True, "Drop keep_batchnorm_fp32=: statistics"),
                ("loss_scaler", 1, "Type loss_scale="),
                ("dynamic", True, "Type loss_scale=mpjax.DynamicLossScale()"),
                ("enabled", False, "Type policy='32-true'"),
                ("enabled", True, "Drop enabled=."),
                ("opt", SGD, "Type tx="),
            )
        ),
        (lambda: step().init(PARAMS).apply_gradients(grads=PARAMS), A, ("step(state, batch)",)),
        (lambda: step().init(PARAMS).batch_stats, A, ("Here it is .extra_state",)),
        (lambda: step().init(PARAMS).replace(params=1), A, ("._replace(",)),
        (lambda: step().init(PARAMS).loss_scale, A, ("current_loss_scale(state)",)),
        (lambda: step().init(PARAMS).parms, A, ("TrainState", "Did you mean .params?")),
        (lambda: step(scaler=DLS()), T, ("scaler=", "Allowed", "Type loss_scale=")),
        (lambda: step(precision="16-mixed"), T, ("precision=", "Allowed", "Type policy=")),
        (lambda: step(opt_level="O1"), T, ("opt_level=", "Allowed", "Type policy=")),
        (lambda: step(dtype=jnp.bfloat16), T, ("dtype=", "Allowed", "Type policy=")),
        (lambda: step(accumulate_grad_batches=2), T, ("Allowed", "Type accumulate=")),
        (lambda: step(gradient_accumulation_steps=2), T, ("Allowed", "Type accumulate=")),
        (lambda: step(optimizer=SGD), T, ("optimizer=", "Allowed", "Type tx=")),
        (lambda: step(axis="data"), T, ("axis=", "Allowed", "Type axis_name=")),
        (lambda: step(donate_argnums=0), T, ("donate_argnums=", "Type donate=")),
        (lambda: step(accumlate=2), T, ("accumlate=", "Allowed", "Type accumulate=")),
        (lambda: step(zzz=2), T, ("zzz=", "Allowed", "Drop zzz=")),
        (
            lambda: step(tx=wrap(scale=None), policy="16-mixed").init(PARAMS),
            V,
            ("float16", "with_loss_scale(tx)", "with_loss_scale(tx, mpjax.DynamicLossScale())"),
        ),
        (
            lambda: step(tx=optax.chain(optax.clip(1.0), wrap())).init(PARAMS),
            V,
            ("behind 1 of its chain", "Allowed", "with_loss_scale(optax.chain("),
        ),
        (
            lambda: mpjax.nnx.make_train_step(
                model(), optax.chain(optax.clip(1.0), wrap()), POLICY, loss_fn
            ).init(),
            V,
            ("behind 1 of its chain", "Allowed", "with_loss_scale(optax.chain("),
        ),
    ],
    "step.init": [
        (lambda: step().init({}), V, ("no parameters", "step.init(model.init(key, x)")),
        (lambda: step().init(None), V, ("no parameters", "step.init(")),
        (lambda: step().init(step().init(PARAMS)), T, ("a whole state", "Allowed", "state.params")),
        (lambda: step().init(flax_state()), T, ("Flax TrainState", "Allowed", "step.adopt(state)")),
        (lambda: step().init(nn.Dense(2)), T, ("not initialised", "Allowed", "model.init(key, x)")),
        (lambda: step().init(model()), T, ("nnx.Module", "Allowed", "nnx.make_train_step(model")),
        (
            lambda: step().init(nnx.Optimizer(model(), SGD, wrt=nnx.Param)),
            T,
            ("nnx.Optimizer", "Allowed", "nnx.make_train_step(model"),
        ),
        (
            lambda: step().init(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))),
            T,
            ("activation", "Allowed", "eqx.partition(model, eqx.is_inexact_array)"),
        ),
        (lambda: step().init({"w": "no"}), T, ("'w' is 'no'", "Allowed", "eqx.partition")),
        (lambda: step().init({"n": jnp.arange(3)}), T, ("'n' is i32[3]", "Allowed", "extra state")),
        (lambda: step().init({"n": 3}), T, ("'n' is 3", "Allowed", "extra state")),
        (lambda: step().init({"k": jax.random.key(0)}), T, ("'k'", "Allowed", "extra state")),
        (
            lambda: step().init({"params": PARAMS, "batch_stats": PARAMS}),
            V,
            ("Flax's variables", "extra state", "variables['batch_stats']"),
        ),
        (lambda: step().init({"w": jnp.full(2, jnp.nan)}), V, ("'w'", "2 nan", "initializer")),
        (lambda: step().init({"w": jnp.full(2, jnp.inf)}), V, ("'w'", "2 inf", "initializer")),
        (lambda: step().init(deleted()), V, ("'w' has been deleted", "donate=False")),
        (
            lambda: step(jax.checkpoint(mpjax.autocast(loss_fn, POLICY))).init(PARAMS, {"m": X}),
            T,
            ("loss_fn(params, batch)", "cannot take", "without it", "extra_state"),
        ),
        (
            lambda: step().init(PARAMS, {"m": X}),
            T,
            (
                "loss_fn(params, batch) cannot",
                "too many",
                "Allowed",
                "Type step.init(params) without",
                "def loss_fn(",
            ),
        ),
        (
            lambda: step(with_state).init(PARAMS),
            T,
            ("with_state", "'batch'", "Allowed", "Type step.init(params, extra_state)"),
        ),
    ],
    "step": [
        (lambda: step()(PARAMS, X), T, ("got a dict", "step.init(params)")),
        (lambda: step()(X, step().init(PARAMS)), T, ("first argument", "step.init(params)")),
        (lambda: step()(flax_state(), X), T, ("got a TrainState", "step.init(params)")),
        (donated, V, ("donated", "Allowed", "state, metrics = step(state, batch)", "donate=False")),
        (other_state, V, ("another optimizer", "step.init(params)")),
        (
            lambda: step(policy="bf16-true").lower(step().init(PARAMS), X),
            V,
            ("another policy", "'w' is f32[2,2]", "step.adopt(state)"),
        ),
        (
            lambda: step(policy="16-mixed").lower(step().init(PARAMS), X),
            V,
            ("no loss scale", "a dynamic loss scale", "step.adopt(state)"),
        ),
        (lambda: traced(step(per_row)), T, ("per_row", "f32[4]", "floating scalar", "Reduce it")),
        (lambda: traced(step(lambda p, b: 1)), T, ("floating scalar", "Reduce it")),
        (lambda: traced(step(lambda p, b: None)), T, ("floating scalar", "Reduce it")),
        (lambda: traced(step(lambda p, b: (loss_fn(p, b), 1))), T, ("(", "has_aux=True")),
        (lambda: traced(step(has_aux=True)), T, ("(loss, aux)", "has_aux=")),
        (lambda: traced(step(weighted=True)), T, ("(loss, weight)", "weighted=True")),
        (
            lambda: traced(step(lambda p, e, b: loss_fn(p, b)), PARAMS, {"m": X}),
            T,
            ("(loss, new_extra_state)", "step.init"),
        ),
        (
            lambda: traced(step(with_state, has_aux=True), PARAMS, {"m": X}),
            T,
            ("(new_extra_state, aux)", "has_aux="),
        ),
        (
            lambda: traced(step(changed(lambda e: {"n": e["m"]})), PARAMS, {"m": X}),
            V,
            ("extra state", "'n' is only in what the loss", "same keys"),
        ),
        (
            lambda: traced(step(changed(lambda e: {})), PARAMS, {"m": X}),
            V,
            ("extra state", "'m' is only in what it was given", "same keys"),
        ),
        (
            lambda: traced(step(changed(lambda e: {"m": e["m"][0]})), PARAMS, {"m": X}),
            V,
            ("'m' was f32[4,2]", "f32[2]", "shape"),
        ),
        (lambda: traced(step(accumulate=3)), V, ("f32[4,2]", "3 micro-batches", "multiple")),
        (
            lambda: traced(step(axis_name="data")),
            NameError,
            ("'data' is no axis", "Allowed", "leave it out"),
        ),
    ],
    "step.adopt": [
        (lambda: step().adopt(PARAMS), T, ("a dict", "Allowed", "step.adopt({'step'")),
        (lambda: step().adopt(None), T, ("None", "Allowed", "step.adopt({'step'")),
        (lambda: step().adopt(X), T, ("f32[4,2]", "Allowed", "step.adopt({'step'")),
        (
            lambda: step().adopt(step().init(PARAMS), {"m": X}),
            T,
            ("too many", "Allowed", "Type step.adopt(state) without"),
        ),
        (
            lambda: step(with_state).adopt(step().init(PARAMS)),
            T,
            ("with_state", "Allowed", "extra_state= to step.adopt"),
        ),
        (
            lambda: step(tx=optax.adam(0.1)).adopt(step().init(PARAMS)),
            V,
            ("only in", "same optimizer", "tx.init(params)"),
        ),
        (
            lambda: mpjax.optim.adopt_state(SGD, {"a": jnp.ones(2)}, PARAMS),
            V,
            ("only in", "same optimizer", "tx.init(params)"),
        ),
        (
            lambda: mpjax.nnx.adopt_state(model(), model()),
            T,
            ("a Linear", "Allowed", "nnx.Optimizer"),
        ),
    ],
    "value_and_grad": [
        (lambda: VG(loss_fn(PARAMS, X), loss_scale=None), T, ("got f32[]", "value_and_grad(loss")),
        (lambda: VG(None, loss_scale=None), T, ("must be a function", "value_and_grad(loss_fn")),
        (lambda: VG(loss_fn, loss_scale="auto"), T, ("'auto'", "Allowed", "DynamicLossScale()")),
        (lambda: VG(loss_fn, loss_scale=0), V, ("got 0", "Allowed", "2**15")),
        (lambda: VG(loss_fn, loss_scale=jnp.inf), V, ("got inf", "Allowed", "2**15")),
        (lambda: VG(loss_fn, loss_scale=X), T, ("f32[4,2]", "real number", "vmap")),
        (lambda: VG(loss_fn, loss_scale=LS), T, ("LossScale", "Allowed", "DynamicLossScale()")),
        (lambda: VG(loss_fn, loss_scale=state_of()), T, ("Allowed", "DynamicLossScale()")),
        (
            lambda: VG(loss_fn, loss_scale=8.0, unscale=False),
            V,
            ("False", "Allowed", "current_loss"),
        ),
        (
            lambda: VG(loss_fn, loss_scale=owned(SLS(8)), unscale=True),
            V,
            ("twice", "Leave unscale="),
        ),
        (lambda: VG(loss_fn, loss_scale=8.0, unscale=0), T, ("got 0", "None, True or False")),
        (lambda: VG(loss_fn, loss_scale=8.0, scaling=1), T, ("scaling=", "Type loss_scale=")),
        (lambda: VG(loss_fn, dynamic_scale=1), T, ("dynamic_scale=", "Type loss_scale=")),
        (lambda: VG(loss_fn, loss_scale=8.0, argnum=1), T, ("argnum=", "Type argnums=")),
        (lambda: VG(loss_fn, loss_scale=8.0, axis="x"), T, ("axis=", "Type axis_name=")),
        (lambda: VG(loss_fn, loss_scale=8.0, dtype="f16"), T, ("dtype=", "Type policy=")),
        (lambda: mpjax.grad(loss_fn, scale=8.0), T, ("scale=", "Allowed", "Type loss_scale=")),
        (
            lambda: VG(loss_fn, loss_scale=1, policy="bf61"),
            V,
            ("'bf61'", "Accepted", "Did you mean"),
        ),
        (lambda: VG(per_row, loss_scale=1)(PARAMS, X), T, ("per_row", "f32[4]", "Reduce it")),
        (
            lambda: VG(loss_fn, 0, True, loss_scale=1)(PARAMS, X),
            T,
            ("(loss, aux)", "f32[]", "Return (loss, aux)"),
        ),
        (
            lambda: VG(loss_fn, loss_scale=1, axis_name="x")(PARAMS, X),
            NameError,
            ("'x' is no axis", "Allowed", "leave it out"),
        ),
        (
            lambda: mpjax.nnx.value_and_grad(loss_fn, loss_scale="x"),
            T,
            ("'x'", "Allowed", "DynamicLossScale()"),
        ),
        (
            lambda: mpjax.nnx.value_and_grad(loss_fn, loss_scale=8.0, unscale=False),
            V,
            ("False", "Allowed", "current_loss_scale(opt_state)"),
        ),
    ],
    "loss scales": [
        (lambda: DLS(init_scale=8), T, ("init_scale=", "Allowed", "Type loss_scale=")),
        (lambda: DLS(initial_scale=8), T, ("initial_scale=", "Allowed", "Type loss_scale=")),
        (lambda: DLS(8, period=10), T, ("period=", "Allowed", "Type growth_interval=")),
        (lambda: DLS(8, factor=2), T, ("factor=", "Type growth_factor= and backoff_factor=")),
        (lambda: DLS(8, min_scale=2), T, ("min_scale=", "Type min_loss_scale=")),
        (lambda: DLS(8, minimum_scale=2), T, ("minimum_scale=", "Type min_loss_scale=")),
        (lambda: DLS(8, fin_steps=2), T, ("fin_steps=", "Type counter=")),
        (lambda: DLS(init_value=8), T, ("init_value=", "Type loss_scale=")),
        (lambda: DLS(8, scale_window=9), T, ("scale_window=", "Type growth_interval=")),
        (lambda: DLS(8, scale_factor=9), T, ("Type growth_factor= and backoff_factor=",)),
        (lambda: DLS(8, hysteresis=2), T, ("Drop hysteresis=: every overflow",)),
        (lambda: DLS(enabled=False), T, ("enabled=", "mpjax.NoOpLossScale()")),
        (lambda: DLS(8).get_scale(), A, ("DynamicLossScale", "Here it is .loss_scale")),
        (lambda: DLS(8).step(SGD), A, ("mpjax.with_loss_scale(tx, loss_scale)",)),
        (lambda: DLS(8).update(), A, (".adjust(grads_finite)",)),
        (lambda: DLS(8).unscale_(SGD), A, (".unscale(grads)",)),
        (lambda: DLS(8).state_dict(), A, ("a pytree",)),
        (lambda: DLS(8).value_and_grad(loss_fn), A, ("mpjax.value_and_grad(loss_fn",)),
        (lambda: SLS(8).period, A, ("StaticLossScale", "of a mpjax.DynamicLossScale")),
        (lambda: mpjax.NoOpLossScale().get_scale(), A, ("NoOpLossScale", ".loss_scale")),
        (lambda: mpjax.get_loss_scale("dynamic"), V, ("mpjax.DynamicLossScale()",)),
        (lambda: DLS(8, growth_intervall=2), T, ("Allowed", "Type growth_interval=")),
        (lambda: SLS(scale=8), T, ("scale=", "Allowed", "Type loss_scale=")),
        (lambda: DLS(0), V, ("got 0", "Allowed", "2**15")),
        (lambda: DLS(-8), V, ("got -8", "Allowed", "2**15")),
        (lambda: DLS("8"), T, ("'8'", "real number", "Type a number")),
        (lambda: DLS(2.0**30), V, ("outside", "bounds", "max_loss_scale")),
        (lambda: DLS(8, min_loss_scale=16), V, ("outside", "bounds", "min_loss_scale")),
        (lambda: DLS(8, min_loss_scale=4, max_loss_scale=2), V, ("above", "Swap them")),
        (lambda: DLS(8, growth_factor=1), V, ("got 1", "more than 1", "2.")),
        (lambda: DLS(8, growth_factor=0.5), V, ("got 0.5", "more than 1", "2.")),
        (lambda: DLS(8, backoff_factor=2), V, ("got 2", "between 0 and 1", "0.5")),
        (lambda: DLS(8, growth_interval=0), V, ("got 0", "at least 1", "2000")),
        (lambda: DLS(8, growth_interval=1.5), V, ("got 1.5", "whole number", "2000")),
        (lambda: DLS(8, counter=-1), V, ("got -1", "at least 0", "0")),
        (lambda: DLS(8).adjust(1), V, ("boolean scalar", "all_finite(grads)")),
        (lambda: DLS(8).adjust(jnp.ones(2, bool)), V, ("bool[2]", "jnp.all(flags)")),
        (lambda: setattr(DLS(8), "loss_scale", 4), A, ("immutable", "Make another")),
        (lambda: SLS(float("nan")), V, ("got nan", "Allowed", "2**15")),
        (lambda: mpjax.select_tree(1, X, X), V, ("boolean scalar", "all_finite(grads)")),
        (lambda: mpjax.select_tree(True, {"a": X}, {"b": X}), V, ("'a' is only in",)),
        (lambda: mpjax.select_tree(True, X, X.astype("bfloat16")), V, ("f32", "bf16", "astype")),
        (lambda: mpjax.all_finite(PARAMS, "x"), NameError, ("'x'", "Allowed", "leave it out")),
    ],
    "with_loss_scale": [
        (lambda: wrap(None), T, ("got None", "Allowed", "optax.adamw(1e-3)")),
        (lambda: wrap(optax.adam), T, ("function adam", "Allowed", "optax.adam(1e-3)")),
        (lambda: wrap(1e-3), T, ("got 0.001", "Allowed", "optax.adamw(0.001)")),
        (lambda: wrap(DLS(), SGD), T, ("DynamicLossScale", "Allowed", "optax.adamw(1e-3)")),
        (lambda: wrap(SGD, SGD), T, ("Allowed", "DynamicLossScale()")),
        (lambda: wrap(SGD, "dynamic"), T, ("'dynamic'", "Allowed", "DynamicLossScale()")),
        (lambda: wrap(SGD, POLICY), T, ("'bf16-mixed'", "Allowed", "DynamicLossScale()")),
        (lambda: wrap(max_consecutive_skips=0), V, ("got 0", "at least 1", "50")),
        (lambda: wrap(max_consecutive_skips=2.5), V, ("got 2.5", "whole number", "50")),
        (lambda: wrap(max_skips=2), T, ("Allowed", "Type max_consecutive_skips=")),
        (lambda: wrap(max_consecutive_errors=2), T, ("Type max_consecutive_skips=",)),
        (lambda: wrap(init_scale=2), T, ("Allowed", "Type loss_scale=")),
        (lambda: wrap(dynamic_growth_steps=9), T, ("DynamicLossScale(growth_interval=...) as",)),
        (lambda: wrap(min_scale=1.0), T, ("DynamicLossScale(min_loss_scale=...) as loss_scale",)),
        (lambda: wrap(dynamic=True), T, ("Type loss_scale=mpjax.DynamicLossScale()",)),
        (lambda: wrap(inner_optimizer=SGD), T, ("Type inner=",)),
        (lambda: wrap(precision="16-mixed"), T, ("mpjax.get_loss_scale(policy) as loss_scale",)),
        (lambda: wrap(wrap()).init(PARAMS), V, ("twice", "Allowed", "Drop one")),
        (lambda: wrap().init({"w": jnp.full(2, jnp.nan)}), V, ("'w'", "2 nan", "initializer")),
        (
            lambda: wrap().update(PARAMS, SGD.init(PARAMS), PARAMS),
            V,
            ("LossScaleState", "tx.init(params)"),
        ),
        (
            lambda: wrap().update({"v": X}, state_of(), PARAMS),
            V,
            ("'v' is only in the gradients", "parameters that you pass"),
        ),
        (
            lambda: wrap().update({"a": X, "b": X}, state_of()),
            V,
            ("made for", "tx.init(params)"),
        ),
        (lambda: mpjax.current_loss_scale(PARAMS), V, ("no loss scale", "with_loss_scale(tx")),
        (lambda: mpjax.current_loss_scale(None), V, ("NoneType", "with_loss_scale(tx")),
        (
            lambda: mpjax.current_loss_scale([state_of(), state_of()]),
            V,
            ("2 loss scales", "opt_state[0]"),
        ),
        (
            lambda: mpjax.current_loss_scale(state_of(optax.chain(optax.clip(1.0), wrap()))),
            V,
            ("behind 1 of its chain (state: EmptyState)", "Allowed", "Move them inside"),
        ),
        (lambda: mpjax.raise_if_diverged(PARAMS), V, ("no loss scale", "with_loss_scale(tx")),
        (
            lambda: jax.eval_shape(mpjax.raise_if_diverged, state_of()),
            V,
            ("inside a traced function", "on the host"),
        ),
    ],
    "autocast": [
        (
            lambda: mpjax.autocast(X, POLICY),
            T,
            ("f32[4,2]", "Allowed", "autocast(fun, 'bf16-mixed'"),
        ),
        (lambda: mpjax.autocast(PARAMS, POLICY), T, ("Allowed", "autocast(fun, 'bf16-mixed')")),
        (lambda: mpjax.autocast(POLICY, loss_fn), T, ("function as the policy", "autocast(fun")),
        (lambda: mpjax.autocast(loss_fn, "bf16"), V, ("two things", "'bf16-mixed'")),
        (lambda: mpjax.autocast(loss_fn, jnp.bfloat16), V, ("alone", "'bf16-mixed'", "'bfloat16'")),
        (lambda: mpjax.autocast(jnp.float16), V, ("alone", "'16-mixed'", "'float16'")),
        (lambda: mpjax.autocast(loss_fn, "tf32"), V, ("'tf32'", "dot_precision='tf32'")),
        (lambda: mpjax.autocast(loss_fn, "float8"), V, ("'float8'", "8 bits", "Accepted")),
        (lambda: mpjax.autocast(loss_fn, "no"), V, ("'no'", "Accepted", "'32-true'")),
        (lambda: mpjax.autocast(loss_fn, dtype="bf16"), T, ("dtype=", "Allowed", "'bf16-mixed'")),
        (lambda: mpjax.autocast(loss_fn, enabled=True), T, ("enabled=", "Allowed")),
        (lambda: mpjax.autocast(POLICY)(3), T, ("got 3", "Allowed", "autocast(fun")),
        (
            lambda: mpjax.autocast(loss_fn, POLICY, rules="full"),
            V,
            ("'full'", "Accepted", "widest"),
        ),
        (
            lambda: mpjax.autocast(loss_fn, POLICY, rules={"softmax": "full"}),
            V,
            ("'softmax'", "'exp'", "make_jaxpr"),
        ),
        (
            lambda: mpjax.autocast(loss_fn, POLICY, rules={"matmul": "low"}),
            V,
            ("'matmul'", "'dot_general'", "make_jaxpr"),
        ),
        (
            lambda: mpjax.autocast(loss_fn, POLICY, rules={"tahn": "full"}),
            V,
            ("'tahn'", "'tanh'", "make_jaxpr"),
        ),
        (
            lambda: mpjax.autocast(loss_fn, POLICY, rules=["tanh"]),
            T,
            ("tanh", "Accepted", 'rules={"tanh": "full"}'),
        ),
        (
            lambda: mpjax.autocast(loss_fn, POLICY, dot_precision="tf23"),
            V,
            ("'tf23'", "Accepted", "tf32"),
        ),
        (
            lambda: mpjax.full_precision(loss_fn),
            T,
            ("no arguments", "Allowed", "@full_precision()"),
        ),
    ],
    "policies": [
        (lambda: mpjax.get_policy("bf16"), V, ("two things", "'bf16-mixed'", "'bfloat16'")),
        (lambda: mpjax.get_policy("BF16"), V, ("two things", "'bf16-mixed'", "'bfloat16'")),
        (lambda: mpjax.get_policy("fp16"), V, ("two things", "'16-mixed'", "'float16'")),
        (lambda: mpjax.autocast("FP16"), V, ("two things", "'16-mixed'", "'float16'")),
        (lambda: step(policy="fp16"), V, ("two things", "'16-mixed'", "'float16'")),
        (lambda: mpjax.get_policy("amp"), V, ("'amp'", "Accepted", "'16-mixed'")),
        (lambda: mpjax.get_policy("float16-mixed"), V, ("Accepted", "get_policy('16-mixed')")),
        (lambda: mpjax.get_policy("bfloat16-mixed"), V, ("Accepted", "get_policy('bf16-mixed')")),
        (lambda: mpjax.get_policy("O5"), V, ("'O5'", "Accepted", "get_policy('p=bf16,c=bf16")),
        (lambda: mpjax.get_policy(8), V, ("'8'", "Accepted")),
        (lambda: mpjax.get_policy("fp8"), V, ("'fp8'", "8 bits", "Accepted")),
        (lambda: mpjax.get_policy("int8"), T, ("int8 is no dtype", "Accepted", "Use 'bfloat16'")),
        (lambda: mpjax.get_policy(jnp.int32), T, ("int32 is no dtype", "Accepted")),
        (lambda: mpjax.get_policy(X), V, ("Accepted", "Type")),
        (lambda: mpjax.get_policy({}), V, ("the keys []", "Allowed")),
        (lambda: mpjax.get_policy("p=f32,x=f16"), V, ("'x'", "Allowed", "p=f32,c=bf16,o=f32")),
        (lambda: mpjax.get_policy("c=f16,c=f16"), V, ("twice", "once")),
        (lambda: mpjax.Policy("f32", "f17"), V, ("'f17'", "Accepted", "Did you mean")),
        (lambda: mpjax.Policy(compute_dtype="int8"), T, ("int8", "Accepted")),
        (lambda: setattr(mpjax.Policy(), "x", 1), A, ("immutable", "Make another")),
        (lambda: mpjax.PolicyMap(POLICY, {"a": None}), V, ("'a'", "None", "Allowed", "'32-true'")),
        (lambda: mpjax.PolicyMap(POLICY, {"a": "f17"}), V, ("'f17'", "Accepted")),
        (lambda: mpjax.PolicyMap(POLICY, {"": "f32"}), V, ("''", "encoder/norm*")),
        (lambda: mpjax.PolicyMap(POLICY, {"re:(": "f32"}), V, ("regular expression", "re.escape")),
        (
            lambda: mpjax.PolicyMap(POLICY, "norm"),
            T,
            ("'norm'", "Allowed", "PolicyMap('bf16-mixed'"),
        ),
        (lambda: mpjax.PolicyMap(POLICY, ["norm"]), T, ("'norm'", "Allowed", "PolicyMap(")),
        (lambda: mpjax.PolicyMap(mpjax.PolicyMap(POLICY)), T, ("PolicyMap", "Allowed", "rules")),
        (lambda: mpjax.default_policy(), T, ("policy",)),  # and nothing of a block never entered
        (lambda: entered("bf15"), V, ("'bf15'", "Accepted")),
        (lambda: entered(jnp.bfloat16), V, ("bfloat16 alone", "'bf16-mixed'")),
        (lambda: mpjax.check_support(POLICY, "h1000"), V, ("'h1000'",)),
        (lambda: mpjax.get_policy("64-true").cast_to_param(X), V, ("float64", "64-bit")),
    ],
    "names of other libraries": [
        (lambda: mpjax.GradScaler, A, ("'GradScaler'", "DynamicLossScale", "make_train_step")),
        (lambda: mpjax.DynamicScale, A, ("'DynamicScale'", "Here it is mpjax.DynamicLossScale")),
        (lambda: mpjax.LossScaleOptimizer, A, ("'LossScaleOptimizer'", "with_loss_scale(tx")),
        (lambda: mpjax.amp, A, ("'amp'", "autocast(fun")),
        (lambda: mpjax.initialize, A, ("'initialize'", "make_train_step")),
        (lambda: mpjax.Accelerator, A, ("'Accelerator'", "make_train_step")),
        (lambda: mpjax.set_global_policy, A, ("default_policy",)),
        (lambda: mpjax.DTypePolicy, A, ("Here it is mpjax.get_policy",)),
        (lambda: mpjax.force_full_precision, A, ("mpjax.full_precision",)),
        (lambda: mpjax.filter_value_and_grad, A, ("mpjax.value_and_grad", "eqx.partition")),
        (lambda: mpjax.cuda.amp, A, ("autocast(fun", "torch.cuda.amp")),
        (lambda: mpjax.no_grad, A, ("jax.lax.stop_gradient",)),
        (lambda: mpjax.te.fp8_autocast, A, ("float8_from_mixed_bfloat16",)),
        (lambda: mpjax.config, A, ("mpjax.default_policy",)),
        (lambda: mpjax.optim.MultiSteps, A, ("'mpjax.optim'", "accumulate=4")),
        (lambda: mpjax.optim.adamw, A, ("'mpjax.optim'", "It is optax's: type optax.adamw")),
        (lambda: mpjax.nnx.Optimizer, A, ("'mpjax.nnx'", "type flax.nnx.Optimizer")),
        (lambda: mpjax.nnx.GradScaler, A, ("'mpjax.nnx'", "mpjax.DynamicLossScale")),
        (lambda: mpjax.linen.Dense, A, ("'mpjax.linen'", "flax.linen.Dense")),
        (lambda: mpjax.train.make_trainstep, A, ("Did you mean mpjax.train.make_train_step?",)),
        (lambda: mpjax.numerics.diagnos, A, ("Did you mean mpjax.numerics.diagnose?",)),
        (lambda: mpjax.pods.chek, A, ("Did you mean mpjax.pods.check?",)),
        (lambda: mpjax.set_policy, A, ("mpjax.nnx.set_policy",)),
    ],
    "Flax": [
        (lambda: mpjax.nnx.set_policy(nn.Dense(2)), T, ("Dense",)),
        (lambda: mpjax.nnx.set_policy(PARAMS), T, ("dict",)),
        (lambda: mpjax.nnx.set_policy(model(), "bf61"), V, ("'bf61'", "Accepted")),
        (lambda: mpjax.linen.with_policy(model(), POLICY), T, ("Linear",)),
        (lambda: mpjax.linen.with_policy(nn.Dense(2), "bf61"), V, ("'bf61'", "Accepted")),
        (
            lambda: mpjax.nnx.make_train_step(loss_fn, SGD, POLICY, loss_fn),
            T,
            ("NNX module", "function loss_fn", "mpjax.make_train_step(loss_fn, tx, policy)"),
        ),
        (
            lambda: mpjax.nnx.make_train_step(model(), SGD, POLICY),
            T,
            ("got None", "Allowed", "make_train_step(model, tx"),
        ),
        (
            lambda: mpjax.nnx.make_train_step(model(), SGD, POLICY, loss_fn, optimizer=SGD),
            T,
            ("optimizer=", "Allowed", "Type tx="),
        ),
        (
            lambda: mpjax.nnx.make_train_step(model(), SGD, POLICY, loss_fn, wrt=nnx.BatchStat),
            V,
            ("no variables", "wrt=nnx.Param"),
        ),
    ],
}
TABLE = [(area, number, *row) for area, rows in ROWS.items() for number, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("call", "error", "said"), [row[2:] for row in TABLE], ids=[f"{r[0]} {r[1]}" for r in TABLE]
)
def test_a_wrong_use_is_refused_with_what_to_type(
    call: Callable[[], Any], error: type[Exception], said: tuple[str, ...]
):
    with pytest.raises(error) as found:
        call()
    text = str(found.value)
    assert [phrase for phrase in said if phrase not in text] == [], text


def test_the_table_is_long_enough_to_be_one():
    assert len(TABLE) >= 150
    assert all(said for *_, said in TABLE)
