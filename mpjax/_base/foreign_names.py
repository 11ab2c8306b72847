"""Translates names of other libraries to mpjax's, for messages: tables, as data."""

POLICY_ROWS: tuple[tuple[str, str, str], ...] = (
    ("32-true", "f32 f32 f32", "Lightning"),
    ("16-mixed", "f32 f16 f32", "Lightning"),
    ("bf16-mixed", "f32 bf16 f32", "Lightning"),
    ("16-true", "f16 f16 f16", "Lightning"),
    ("bf16-true", "bf16 bf16 bf16", "Lightning"),
    ("64-true", "f64 f64 f64", "Lightning"),
    ("32", "f32 f32 f32", "Lightning"),
    ("16", "f32 f16 f32", "Lightning"),
    ("64", "f64 f64 f64", "Lightning"),
    ("mixed_float16", "f32 f16 f32", "Keras"),
    ("mixed_bfloat16", "f32 bf16 f32", "Keras"),
    ("float32", "f32 f32 f32", "Keras, jmp"),
    ("float16", "f16 f16 f16", "Keras, jmp"),
    ("bfloat16", "bf16 bf16 bf16", "Keras, jmp"),
    ("float64", "f64 f64 f64", "Keras, jmp"),
    ("O0", "f32 f32 f32", "Apex"),
    ("O1", "f32 f16 f32", "Apex"),
    ("O2", "f16 f16 f32", "Apex"),
    ("O3", "f16 f16 f16", "Apex"),
    ("f32", "f32 f32 f32", "jmp"),
    ("full", "f32 f32 f32", "jmp"),
    ("f16", "f16 f16 f16", "jmp"),
    ("half", "half half half", "jmp"),
    ("f64", "f64 f64 f64", "jmp"),
)
"""Names that `get_policy` takes: dtypes of parameters, computation, outputs; who has the name."""

POLICIES: dict[str, str] = {
    "amp": "16-mixed",
    "mixed": "bf16-mixed",
    "mixed-precision": "bf16-mixed",
    "auto": "bf16-mixed",
    "no": "32-true",
    "none": "32-true",
    "off": "32-true",
    "single": "32-true",
    "float": "float32",
    "double": "64-true",
    "o4": "bf16-mixed",  # Apex for ROCm: O1 and O2 in bfloat16
    "o5": "p=bf16,c=bf16,o=f32",
}
"""Folded name → the policy that was most probably meant."""

DTYPE_WORDS: dict[str, str] = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "f16", "float16", "half", "16"), "16"),
    **dict.fromkeys(("fp32", "f32", "float32", "single", "32"), "32"),
    **dict.fromkeys(("fp64", "f64", "float64", "double", "64"), "64"),
}
"""Word for a dtype → the first word of Lightning's policy of it."""
MODE_WORDS: dict[str, str] = {
    **dict.fromkeys(("mixed", "amp", "autocast"), "mixed"),
    **dict.fromkeys(("true", "full", "pure", "only"), "true"),
}
"""Word for how much of a program has a dtype → the second word of that policy."""

PRIMITIVES: dict[str, str] = {
    "softmax": "exp",
    "log_softmax": "log",
    "logsumexp": "exp",
    "layer_norm": "rsqrt",
    "layernorm": "rsqrt",
    "batch_norm": "rsqrt",
    "rms_norm": "rsqrt",
    "matmul": "dot_general",
    "dot": "dot_general",
    "einsum": "dot_general",
    "dense": "dot_general",
    "linear": "dot_general",
    "attention": "dot_general",
    "conv": "conv_general_dilated",
    "conv2d": "conv_general_dilated",
    "mean": "reduce_sum",
    "sum": "reduce_sum",
    "max": "reduce_max",
    "sigmoid": "logistic",
    "swish": "silu",
}
"""Function or layer → the primitive that is most of it."""

DEVICES = frozenset(
    {"cuda", "cpu", "gpu", "tpu", "xpu", "mps", "hpu", "npu", "xla", "rocm", "meta"}
)
"""Device types, the first argument of PyTorch's autocast."""
PRODUCTS = frozenset(
    (
        *("highest", "high", "medium", "default"),
        *("bfloat16-3x", "float32-3x", "bf16x3", "bf16x6", "bf16x9"),
    )
)
"""Words of PyTorch and JAX for how a product of float32 is computed."""
