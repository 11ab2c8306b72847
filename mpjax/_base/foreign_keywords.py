"""Translates keywords of other libraries to those of mpjax, for messages: tables, as data."""

LOSS_SCALE: dict[str, str] = {
    "init_scale": "loss_scale",
    "initial_scale": "loss_scale",
    "initial_loss_scale": "loss_scale",
    "init_loss_scale": "loss_scale",
    "init_value": "loss_scale",
    "initial": "loss_scale",
    "scale": "loss_scale",
    "scaling": "loss_scale",
    "period": "growth_interval",
    "growth_steps": "growth_interval",
    "dynamic_growth_steps": "growth_interval",
    "increment_period": "growth_interval",
    "scale_window": "growth_interval",
    "loss_scale_window": "growth_interval",
    "min_loss_scaling": "min_loss_scale",
    "minimum_scale": "min_loss_scale",
    "min_scale": "min_loss_scale",
    "max_scale": "max_loss_scale",
    "factor": "growth_factor and backoff_factor",
    "scale_factor": "growth_factor and backoff_factor",
    "multiplier": "growth_factor and backoff_factor",
    "increase_factor": "growth_factor",
    "decrease_factor": "backoff_factor",
    "fin_steps": "counter",
    "growth_tracker": "counter",
    "_growth_tracker": "counter",
    "initial_scale_power": "loss_scale=2**{}",
    "hysteresis": "nothing: every overflow lowers the scale",
    "delayed_shift": "nothing: every overflow lowers the scale",
    "enabled": "mpjax.NoOpLossScale() in its place",
    "device": "nothing: JAX moves it with the state",
}
_OWN = (
    *("growth_factor", "backoff_factor", "growth_interval"),
    *("min_loss_scale", "max_loss_scale", "counter"),
)


def _of_dynamic(meant: str) -> str:
    """Returns what stands for a keyword of a loss scale where the loss scale is an argument."""
    if meant.startswith(("nothing", "mpjax")):
        return meant
    typed = meant if "=" in meant else f"{meant.replace(' and ', '=..., ')}=..."
    return f"loss_scale=mpjax.DynamicLossScale({typed})"


_DYNAMIC = {
    name: _of_dynamic(meant) for name, meant in (LOSS_SCALE | {own: own for own in _OWN}).items()
}
STATIC: dict[str, str] = {
    **{name: meant.removeprefix("loss_scale=") for name, meant in _DYNAMIC.items()},
    **{name: meant for name, meant in LOSS_SCALE.items() if meant.startswith("loss_scale")},
}
_CLIP = "optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)) as tx"
_CLIP_VALUES = "optax.chain(optax.clip(1.0), optax.adamw(1e-3)) as tx"
_ONE_LOSS = (
    "nothing: a step has one loss; for several, docs/migrate/apex.md has the section "
    "'A loss scale for each loss'"
)
_EXTRA = "step.init(params, extra_state), and a loss_fn(params, extra_state, batch),"
_SCALE: dict[str, str] = {
    **_DYNAMIC,
    "scaling": "loss_scale",
    "scaler": "loss_scale",
    "loss_scaler": "loss_scale",
    "grad_scaler": "loss_scale",
    "scale": "loss_scale",
    "dynamic_scale": "loss_scale",
    "dynamic_loss_scale": "loss_scale=mpjax.DynamicLossScale()",
    "dynamic": "loss_scale=mpjax.DynamicLossScale()",
}
_POLICY: dict[str, str] = {
    "precision": "policy",
    "opt_level": "policy",
    "mixed_precision": "policy",
    "dtype_policy": "policy",
    "dtype": "policy='bf16-mixed'",
    "amp_dtype": "policy='bf16-mixed'",
    "compute_dtype": "policy='bf16-mixed'",
    "amp": "policy='bf16-mixed'",
    "bf16": "policy='bf16-mixed'",
    "fp16": "policy='16-mixed'",
    "fp8": "policy='float8_from_mixed_bfloat16'",
}
AXIS: dict[str, str] = dict.fromkeys(("axis", "axes", "axis_names", "pmap_axis"), "axis_name")
GRADIENTS: dict[str, str] = {
    **_SCALE,
    **_POLICY,
    **AXIS,
    "argnum": "argnums",
    "aux": "has_aux",
    "reduce_axes": "axis_name",
}
DIAGNOSIS: dict[str, str] = {**_SCALE, **_POLICY, "aux": "has_aux"}
_SKIPS: dict[str, str] = {
    **AXIS,
    "max_skips": "max_consecutive_skips",
    "max_errors": "max_consecutive_skips",
    "max_consecutive_errors": "max_consecutive_skips",
}
STEP: dict[str, str] = {
    **_SCALE,
    **_POLICY,
    **_SKIPS,
    "opt": "tx",
    "optimizer": "tx",
    "loss": "loss_fn",
    "aux": "has_aux",
    "accumulate_grad_batches": "accumulate",
    "accumulate_steps": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "grad_accum": "accumulate",
    "grad_accum_steps": "accumulate",
    "accumulation_steps": "accumulate",
    "num_microbatches": "accumulate",
    "every_k_schedule": "accumulate",
    "in_axes": "accumulate_axes",
    "donate_argnums": "donate",
    "delay_unscale": "accumulate",
    **dict.fromkeys(
        (
            *("gradient_clip_val", "gradient_clipping", "gradient_clip", "clip_gradients"),
            *("clip_grad_norm", "clip_grad", "grad_clip", "grad_clip_norm", "max_grad_norm"),
            *("max_norm", "global_clipnorm", "clipnorm", "clip_norm", "clip"),
        ),
        _CLIP,
    ),
    **dict.fromkeys(("clipvalue", "clip_value", "clip_grad_value"), _CLIP_VALUES),
    "loss_id": _ONE_LOSS,
    "num_losses": _ONE_LOSS,
    "master_weights": "mpjax.optim.with_master_weights(tx) as tx",
    "keep_batchnorm_fp32": "nothing: statistics of norms are computed in float32",
    "mutable": _EXTRA,
    "batch_stats": _EXTRA,
    "skip_nonfinite": "nothing: a step that is not finite is skipped",
    "skip_nonfinite_updates": "nothing: a step that is not finite is skipped",
    "rng": _EXTRA,
    "rngs": _EXTRA,
    "key": _EXTRA,
    "params": "step.init(params), and no params here,",
    "jit": "nothing: the step is jitted; under jax.disable_jit() it is not",
    "enabled": "policy='32-true'",
}
NNX_STEP: dict[str, str] = {**STEP, "filter": "wrt"}
WRAPPER: dict[str, str] = {
    **_SCALE,
    **_SKIPS,
    "opt": "inner",
    "tx": "inner",
    "optimizer": "inner",
    "inner_optimizer": "inner",
    "enabled": "loss_scale=None, which skips and does not scale,",
    "policy": "mpjax.get_loss_scale(policy) as loss_scale",
    "precision": "mpjax.get_loss_scale(policy) as loss_scale",
}
"""Keywords of wrappers of optimizers."""
POLICY_KEYWORDS: dict[str, str] = {
    "params": "param_dtype",
    "param": "param_dtype",
    "variable_dtype": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "reduce_dtype": "nothing: gradients are averaged in float32",
    "buffer_dtype": "nothing: what is no parameter keeps its dtype",
    "cast_forward_inputs": "nothing: autocast casts what products read",
    "keep_low_precision_grads": "nothing: gradients are float32",
    "name": "mpjax.get_policy(name)",
    "policy": "mpjax.get_policy(name)",
    "dtype": "mpjax.get_policy(dtype)",
}
MAP_KEYWORDS: dict[str, str] = {
    "default_policy": "default",
    "policy": "default",
    "policy_map": "rules",
    "policies": "rules",
    "map": "rules",
}
RECIPE: dict[str, str] = {
    "fp8_format": "nothing: HYBRID is the default, e4m3 forward and e5m2 for gradients",
    "fp8_format=E4M3": "fprop='e4m3', dgrad='e4m3', wgrad='e4m3'",
    "dtype": "fprop",
    "interval": "nothing: scales follow at every step",
    "scaling_factor_compute_algo": "nothing: a scale follows from the largest value",
    "reduce_amax": "nothing: XLA reduces over all shards of an array",
    "fp8_dpa": "nothing: attention's products of two activations are in 16 bits",
    "fp8_mha": "nothing: attention's products of two activations are in 16 bits",
    "override_linear_precision": "fprop=None, dgrad=None or wgrad=None",
    "enabled": "a policy without recipe, such as 'bf16-mixed',",
    "amax_history_len": "mpjax.DelayedScaling(amax_history_len=...)",
    "amax_history_length": "mpjax.DelayedScaling(amax_history_len=...)",
    "amax_compute_algo": "mpjax.DelayedScaling(amax_compute_algo=...)",
}
_ALONE = "nothing: it multiplies e4m3 alone"
_BLOCK: dict[str, str] = {"fp8_format": _ALONE, "fp8_format=E4M3": _ALONE}
_TILE = "nothing: each block is 1 x 128"
_FLOAT8 = "mpjax.Float8CurrentScaling()"
RECIPE_OF: dict[str, dict[str, str]] = {
    "DelayedScaling": {"amax_history_length": "amax_history_len"},
    "MXFP8BlockScaling": _BLOCK,
    "Float8BlockScaling": {
        **_BLOCK,
        **{f"{each}_block_scaling_dim": _TILE for each in ("x", "w", "grad")},
    },
    "Int8CurrentScaling": {"fp8_format": _FLOAT8, "fp8_format=E4M3": _FLOAT8},
}
"""Entries that differ from those of `RECIPE`, by the name of a recipe."""
ATTENTION: dict[str, str] = {
    "q": "query",
    "k": "key",
    "v": "value",
    "causal": "is_causal",
    "softmax_scale": "scale",
    "attn_mask": "mask= (booleans) or bias= (added to the logits)",
    "attention_mask": "mask= (booleans) or bias= (added to the logits)",
    "key_padding_mask": "key_value_seq_lengths",
    "window_size": "local_window_size",
    "dropout_p": "jax.nn.softmax and a dropout of its result, written out,",
    "dropout_p=0.0": "nothing: there is no dropout",
    "enable_gqa": "nothing: there may be fewer heads of keys than of queries",
}
QUANTIZE: dict[str, str] = {
    **dict.fromkeys(
        ("bits", "dtype", "qtype", "weight_qtype", "mode", "kind", "weights"),
        "policy='int8_from_mixed_bfloat16'",
    ),
    "bits=4": "policy='int8_from_mixed_bfloat16', as 8 bits are the fewest here,",
    "recipe": "policy=mpjax.QuantizedPolicy('bf16-mixed', recipe)",
    "axis": "channel_axis",
    "tree": "params",
    "model": "params",
}
EXPLAIN: dict[str, str] = {**_POLICY, "precision": "dot_precision"}
AUTOCAST: dict[str, str] = {name: meant for name, meant in EXPLAIN.items() if name != "dtype"}
_OF_A_POLICY = ("precision", "mixed_precision", "dtype_policy", "opt_level", "name", "dtype")
POLICIES_OF: dict[str, str] = dict.fromkeys(_OF_A_POLICY, "policy")
"""Keywords for a policy, of functions that take one for other things."""
SPEC: dict[str, str] = dict.fromkeys((*_OF_A_POLICY, "policy"), "spec")
NORM: dict[str, str] = {
    **AXIS,
    **dict.fromkeys(("max_delta", "clip_norm", "clip_value", "norm"), "max_norm"),
}
QUANTIZED: dict[str, str] = {
    **dict.fromkeys((*_OF_A_POLICY, "policy"), "base"),
    **dict.fromkeys(("mode", "quantization", "fp8_recipe", "quantize"), "recipe"),
}
