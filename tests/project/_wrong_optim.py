"""Wrong uses of optimizers that round and store low, of recipes, of measure, and of devices."""

import enum
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _optimizers import OWNERS
from _wrong_shared import NAN, PARAMS, POLICY, SGD, T, V, W, X, each, loss_fn, step, told, wrap

import mpjax
from mpjax import optim

ADAM, INT8 = optax.adam(0.1), "int8_from_mixed_bfloat16"
CENTRED = optax.rmsprop(0.1, centered=True)
HALF = {"w": jnp.ones((2, 2), jnp.bfloat16)}
KERNELS = {"kernel": jnp.ones((64, 64))}
FP8 = enum.Enum("Format", ("E4M3", "HYBRID"))  # as Transformer Engine's
STORES = (
    lambda tx: optim.with_state_dtypes(tx, mu_dtype="bf16", nu_dtype="bf16"),
    optim.with_quantized_state,
    lambda tx: optim.with_quantized_state(tx, "float8"),
)


def owned_state():
    return optim.with_master_weights(SGD).init(HALF)


def two_owners(outer, inner=optim.with_kahan):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the inner one, which sees float32
        return outer(inner(SGD)).init(HALF)


# fmt: off
ROWS = {
    "owners of the rounding": [
        *each(lambda v: optim.with_master_weights(SGD, bits=v), V,
            "(bits): must be 32 or 24; got {}. | 32 ", *(16, 23, "24", True, None, 32.5)),
        *each(lambda v: optim.with_stochastic_rounding(SGD, v), T,
            "(seed): must be an integer or one PRNG key; got ",
            *(1.5, True, "x", np.zeros(2, np.uint32))),
        *each(lambda own: own(SGD).update(HALF, own(SGD).init(HALF)), V,
            "update: params is missing. | Type tx.update(grads, opt_stat", *OWNERS.values()),
        (lambda: two_owners(optim.with_kahan,
            lambda tx: mpjax.with_loss_scale(optim.with_stochastic_rounding(tx))), V,
            "with_kahan: it was given an optimizer that owns the rounding already "
            "(with_stochastic_rounding). | Allowed: one of | Drop one; | optax.partition."),
        (lambda: two_owners(lambda tx: step(tx=tx, policy="bf16-true", rounding="stochastic")), V,
            "it was given an optimizer that owns the rounding"),
        *told(lambda own: own(SGD).init(PARAMS), W,
            "{}: no parameter is float16 or bfloat16; 'w' is f32[2,2]: here it does nothing. | Tra",
            *((own, name) for own, name in (
                (OWNERS["master"], "with_master_weights"), (OWNERS["kahan"], "with_kahan"),
                (optim.with_stochastic_rounding, "with_stochastic_rounding")))),
        (lambda: optim.with_master_weights(SGD, dtype="float32"), T,
            "with_master_weights: unknown keyword dtype=. | Allowed: inner, bits. | Type bits=32"),
        (lambda: optim.with_stochastic_rounding(SGD, key=0), T, "key=. | Type seed="),
        (lambda: optim.with_kahan(optimizer=SGD), T, "optimizer=. | Type inner="),
    ],
    "what is no optimizer": [
        *(
            row
            for wrap in (*OWNERS.values(), *STORES)
            for row in told(
                wrap,
                T,
                "with_ | (inner): must be an optax transformation; got {}",
                (1e-3, "0.001. | Type optax.adamw(0.001)"),
                (optax.adam, "the function adam. | Call it: optax.adam(1e-3)"),
                (None, "None. | optax.adamw(1e-3)"),
            )
        ),
        (lambda: optim.bytes_per_parameter(PARAMS, SGD), T,
            "bytes_per_parameter: got a dict as the optimizer | Swap | bytes_per_parameter(tx, pa"),
        *told(lambda call: call(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))), T,
            "{}: parameter 'activation' is the function relu, which is no array. | Allowed | eqx.fi"
            "lter(model, eqx.is_inexact_array)).", (lambda m: wrap(ADAM).init(m), "scale.init"),
            (lambda m: optim.bytes_per_parameter(ADAM, m), "bytes_per_parameter")),
        (lambda: optim.bytes_per_parameter(optax.adam, PARAMS), T,
            "bytes_per_parameter(tx): must be | Call it: optax.adam(1e-3)"),
        *told(lambda state: optim.apply_updates(state, HALF), T,
            "apply_updates: got a {} in the place of the parameters | Swap | (params, updates, o",
            (owned_state(), "MasterWeightsState"),
            (optax.adam(0.1).init(HALF), "ScaleByAdamState")),
        *told(lambda state: optim.moment_spread(HALF, state), T,
            "moment_spread: got a {} in the place of the parameters. | the state, then the para"
            "meters. | Swap | (opt_state, params)", (ADAM.init(HALF), "ScaleByAdamState"),
            (optim.with_quantized_state(ADAM).init(HALF), "QuantizedState")),
        *told(lambda state: optim.full_params(state, HALF), T,
            "full_params: got a {} in the place of the parameters | Swap | (params, opt_state)",
            (owned_state(), "MasterWeightsState"), (optax.adam(0.1).init(HALF), "ScaleByAdamState"),
            ({"opt": owned_state()}, "MasterWeightsState")),
    ],
    "stored moments": [
        *told(lambda options: optim.with_quantized_state(ADAM, **options), T,
            "with_quantized_state: unknown keyword {}",
            ({"bits": 8}, "bits=. | Allowed: inner, kind, block_size, rules. | Type kind='int8' i"),
            ({"dtype": "int8"}, "dtype=. | Type kind='int8' instead of dtype=."),
            ({"blocksize": 64}, "blocksize=. | Type block_size="),
            ({"optim_bits": 8}, "optim_bits=. | Type kind='int8' instead of optim_bits=.")),
        (lambda: optim.with_quantized_state("int8", ADAM), T,
            "got 'int8' as the optimizer, and an | Swap them: mpjax.optim.with_quantized_state(tx"),
        (lambda: optim.with_state_dtypes(ADAM, dtype="bfloat16"), T,
            "with_state_dtypes: unknown keyword dtype=. | Type mu_dtype= and nu_dtype="),
        (lambda: optim.with_state_dtypes(ADAM, "bfloat16"), T,
            "takes inner without a name; got 2 arguments. | Allowed, by name: mu_dtype=, nu_dtype"),
        *(
            row
            for name in ("mu_dtype", "nu_dtype")
            for row in each(
                lambda v, name=name: optim.with_state_dtypes(ADAM, **{name: v}),
                T,
                f"({name}): | is no dtype of a moment. | Allowed: bfloat16 | For 8 bits use w",
                *("int8", jnp.int32, jnp.float8_e4m3fn, "complex64"),
            )
        ),
        *told(lambda options: optim.with_state_dtypes(ADAM, **options), V, "{}",
            ({"nu_dtype": "f16"}, "(nu_dtype): float16 makes 0 of | Type 'bfloat16'"),
            ({"mu_dtype": "f64"}, "(mu_dtype): float64 is no dtype to store a moment"),
            ({"mu_dtype": "bf17"}, "(mu_dtype): unknown dtype 'bf17'")),
        *each(lambda store: store(SGD).init({"w": jnp.ones((64, 64))}), V,
            "has no moments that can be stored | Allowed: mu, nu, trace, | Wrap an opt", *STORES),
        *each(lambda store: store(CENTRED).init({"w": jnp.ones((64, 64))}), V,
            "has no moments that can be stored | not the mu and nu of a centred", *STORES),
        *each(lambda v: optim.with_quantized_state(ADAM, block_size=v), V,
            "(block_size): must be a whole number of at least 2, or None; got {}",
            *(0, 1, -256, 2.5, True, "rows")),
        (lambda: jax.eval_shape(optim.with_quantized_state(ADAM).init, {"w": jnp.ones((8, 1021))}),
            W,
            "256 does not divide the last axis of 'w', 1021: it is cut into 4 blocks of 256, the "
            "last of 253. | It works, and is slower"),
        *told(lambda v: optim.with_quantized_state(ADAM, **v), V, "{}",
            ({"rules": {"a": "int4"}}, "(rules): the rule 'a' says 'int4'. | Accepted: '"),
            ({"kind": "int4"}, "unknown kind 'int4'. | Accepted: 'int8', 'float8'")),
        (lambda: optim.with_quantized_state(ADAM, rules={"tail": "int8"}).init(PARAMS), W,
            "(rules): rule 1 of 1, 'tail', matches none"),
    ],
    "norms": [
        *each(lambda v: optim.clip_by_global_norm(v), V,
            "(max_norm): must be positive; got {} | Type, for ex", *(0, -1.0, NAN)),
        *told(lambda v: optim.clip_by_global_norm(v), T,
            "(max_norm): must be a number; got {} | optax.chain(mpjax.optim.clip_by_global_norm(1",
            (PARAMS, "a dict"), ("1", "'1'"), (None, "None"), (True, "True")),
        (lambda: optim.global_norm("w"), T, "global_norm: a leaf is no array; got 'w' | arrays"),
        (lambda: optim.global_norm(jnp.ones(2, jnp.complex64)), T,
            "global_norm: a leaf is complex; got c64[2]"),
    ],
    "recipes": [
        *told(mpjax.get_policy, (V, T), "{}",
            ("int4_from_mixed_bfloat16",
                "no 'int4' products. | XLA compiles no 4-bit product for a CPU"),
            ("int8_from_", "has no base behind it. | Accepted: int8_from_mixed_bfloat16"),
            ("fp7_from_float32", "Accepted: int8_from_float32, float8_from_float32"),
            ("float8_from_float64", "names float64. | Allowed: 16- and 32-bit policies"),
            *((f"int8_from_{base}",
                f"'{base}' is no base. | Accepted | Did you mean get_policy('int8_from_{meant}')")
                for base, meant in (
                    *(("mixed_bfloat17", "mixed_bfloat16"), ("mixed_bf16", "mixed_bfloat16")),
                    *(("mixed-fp16", "mixed_float16"), ("mixed_float32", "float32")),
                    *(("bf16", "mixed_bfloat16"), ("nothing", "mixed_bfloat16")))),
            ("float8_from_mixed_float32", "get_policy('float8_from_float32')"),
            ("q=Float8Current", "Did you mean 'Float8CurrentScaling'"),
            ("q=Int4Scaling()", "XLA compiles no 4-bit product"),
            ("q=Float8CurrentScaling(history=3)",
                "has no argument 'history'. | Allowed: fprop, dgrad"),
            ("q=Float8CurrentScaling(", "cannot read the recipe"),
            ("q=print(1)", "cannot read the recipe"),
            ("p=float8_e4m3fn", "type 'float8_from_mixed_bfloat16'"),
            ("p=int8", "type 'int8_from_mixed_bfloat16'")),
        *told(lambda options: mpjax.Float8CurrentScaling(**options), V, "{}",
            ({"fprop": "int8"}, "Type mpjax.Int8Current"),
            ({"fprop": "float8_e3m4"}, "type 'e4m3' or 'e5m2'"),
            ({"dgrad": "e5m2"}, "e5m2 for both operands"), ({"dgrad": ("e5m2",)}, "not two dtypes"),
            ({"granularity": "row"}, "Allowed: 'tensor'"), ({"margin": -1}, "from 0 to 8"),
            (dict.fromkeys(("fprop", "dgrad", "wgrad")), "quantises no product")),
        *told(lambda given: getattr(mpjax, given[0])(**given[1]), T, "{}",
            *((("DelayedScaling", {"fp8_format": v}), f"fp8_format=. | Allowed | {said}")
                for v, said in (
                    (FP8.E4M3, "Type fprop='e4m3', dgrad='e4m3', wgrad='e4m3' instead of fp8_fo"),
                    ("E4M3", "Type fprop='e4m3', dgrad='e4m3', wgrad='e4m3' instead of fp8_form"),
                    (FP8.HYBRID, "Drop fp8_format=: HYBRID is the default, e4m3 forward and"))),
            *(((kind, {"fp8_format": v}), f"{kind}: | Drop fp8_format=: it multiplies e4m3 alone.")
                for kind in ("MXFP8BlockScaling", "Float8BlockScaling")
                for v in (FP8.E4M3, FP8.HYBRID)),
            *(((kind, {"scaling_factor_compute_algo": None}),
                "Drop scaling_factor_compute_algo=: a scale follows from the largest value.")
                for kind in ("Float8CurrentScaling", "DelayedScaling")),
            *((("Float8CurrentScaling", {name: 16}),
                f"Type mpjax.DelayedScaling({own}=...) instead of {name}=.")
                for name, own in (
                    *(("amax_history_len", "amax_history_len"),
                        ("amax_history_length", "amax_history_len")),
                    ("amax_compute_algo", "amax_compute_algo"))),
            (("Float8BlockScaling", {"w_block_scaling_dim": 2}),
                "Drop w_block_scaling_dim=: each block is 1 x 128."),
            (("Int8CurrentScaling", {"fp8_format": "E4M3"}), "mpjax.Float8CurrentScaling()")),
        (lambda: mpjax.Float8CurrentScaling(margin=0.5), T, "a whole number"),
        (lambda: mpjax.Int8CurrentScaling(fprop="e4m3"), V, "Type mpjax.Float8Current"),
        (lambda: mpjax.Int8CurrentScaling(fprop="int4"), V, "no 4-bit product"),
        *told(lambda options: mpjax.DelayedScaling(**options), V, "{}",
            ({"amax_history_len": 0}, "Allowed: a whole number from 1"),
            ({"amax_compute_algo": "mean"}, "Allowed: 'max', 'most_recent'"),
            ({"granularity": "channel"}, "Allowed: 'tensor'")),
        *told(lambda change: change(mpjax.get_policy(INT8)), AttributeError, "{}",
            (lambda p: setattr(p, "recipe", 3), "QuantizedPolicy: is | dPolicy(recipe="),
            (lambda p: setattr(p.recipe, "margin", 3), "cannot assign to field 'margin'")),
        *each(lambda use: use(mpjax.quantize(KERNELS, INT8)["kernel"]), T,
            "autocast(fun, 'bf16-mixed')(params, ...), or fun", lambda w: jnp.ones((2, 64)) @ w,
            lambda w: w @ jnp.ones((64, 2)), jnp.asarray),
        (lambda: np.asarray(mpjax.quantize(KERNELS, INT8)["kernel"]), T,
            "Type np.asarray(x.dequantize())"),
        (lambda: step(policy=INT8).init(mpjax.quantize(KERNELS, INT8)), T,
            "Type step.init(mpjax.dequantize(params))"),
        *(
            (lambda policy=policy: mpjax.quantize({"b": jnp.ones(5)}, policy), W,
                f"b: [5] | Name smaller ones: PolicyMap('{base}', {{'head/*': '{policy}'}})")
            for policy, base in (("int8_from_mixed_float16", "16-mixed"),
                ("float8_from_mixed_bfloat16", "bf16-mixed"))
        ),
        (lambda: mpjax.QuantizedPolicy(POLICY, 8), T, "got 8 as a recipe"),
        (lambda: mpjax.QuantizedPolicy("int8_from_float32"), T, "Allowed: a Policy"),
        (lambda: mpjax.QuantizedPolicy(mpjax.PolicyMap("float32")), T, "PolicyMap"),
        (lambda: mpjax.QuantizedPolicy.from_dict({}), V, "got no 'recipe'"),
        (lambda: mpjax.QuantizedPolicy().to_jmp(), T, "policy.base.to_jmp"),
        *told(lambda given: mpjax.quantize(KERNELS, **given), T, "quantize: unknown keyword {}",
            ({"bits": 8}, "bits=. | Allowed: params, policy, channel_axis. | Type policy='int8_fr"),
            ({"bits": 4}, "bits=. | 'int8_from_mixed_bfloat16', as 8 bits are the fewest here,"),
            ({"dtype": "int8"}, "dtype=. | Type policy='int8_from_mixed_bfloat16' instead of dt"),
            ({"axis": 0}, "axis=. | Type channel_axis= instead of axis=.")),
        *told(lambda given: mpjax.quantize(KERNELS, **given), V, "{}",
            ({"policy": POLICY}, "has no recipe"),
            ({"policy": INT8, "channel_axis": 0}, "Allowed: -1, -2"),
            ({"policy": mpjax.QuantizedPolicy(recipe=mpjax.MXFP8BlockScaling())},
                "a scale for each 32 values"),
            ({"policy": mpjax.QuantizedPolicy(recipe=mpjax.Float8CurrentScaling(fprop=None))},
                "leaves the forward product")),
    ],
    "measure": [
        (lambda: mpjax.measure(loss_fn, POLICY), V, "is no list of policies. | Give a seq"),
        (lambda: mpjax.measure(loss_fn, []), V, "is no list of policies"),
        *each(lambda v: mpjax.measure(loss_fn, v), V, "policies={} is no list of policies. | Give",
            mpjax.get_policy(POLICY), loss_fn, None),
        *told(lambda v: mpjax.measure(v, loss_fn), T, "measure: the first argument must be a functi"
            "on; got {}. | Type measure(fun, policies)(", ([POLICY], "list"), (POLICY, "str")),
        (lambda: mpjax.measure(loss_fn, ["bf16_mixd"]), V, "unknown policy 'bf16_mixd'"),
        (lambda: mpjax.measure(loss_fn, budget=0), V, "budget=0 leaves no time. | Give seconds"),
        (lambda: mpjax.measure(loss_fn)(PARAMS, jax.ShapeDtypeStruct((4, 2), jnp.float32)), V,
            "loss_fn cannot run on a shape: | Give arrays"),
        (lambda: mpjax.measure(loss_fn)(PARAMS, X.T), V,
            "loss_fn fails on these arguments: TypeError"),
    ],
    "devices": [
        # older than any that JAX runs on
        *told(lambda device: mpjax.check_support("32-true", device), V,
            "check_support: unknown device | {}", ("h10", "Did you mean 'h100'"),
            ("v5", "Did you mean | 'v5e'"), ("sm_", "Did you mean | 'sm_"),
            ("3.5", "`python -m mpjax table` lists all of them"), ("", "E.g. device='h100'"),
            ("Xeon v4", "`python -m mpjax table` lists all of them"),
            ("tpu-v9", "Did you mean 'tpuv")),
        *each(lambda device: mpjax.check_support("32-true", device), T,
            "check_support: no device: | Type jax.devices()", *(3, jax.devices, ["v5e"])),
        *(
            row
            for device in (None, "a100", "v5e")
            for row in each(
                lambda policy, device=device: mpjax.check_support(policy, device),
                V,
                "check_support: | cannot run on | 64-bit types are off | jax_enable_x64 | "
                "'32-true'",
                *("64-true", "p=f64,c=f32,o=f32", "p=f32,c=f32,o=f64"),
            )
        ),
        (lambda: mpjax.check_support("bf16-mixd", "v5e"), V,
            "get_policy: unknown policy 'bf16-mixd'"),
    ],
}
# fmt: on
