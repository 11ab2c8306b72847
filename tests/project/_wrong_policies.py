"""Wrong uses of policies, of maps of them, of autocast, and names that are other libraries'."""

import functools
import operator
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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
    step,
    told,
)
from flax import nnx

import mpjax
import mpjax.linen
import mpjax.nnx

NEAR_MISSES = {
    "16mixed": "16-mixed')?",
    "bf17": "bf16-mixed')?",
    "fp17": "16-mixed')?",
    "fp16-mixed": "16-mixed')?",
    "no": "32-true')?",
    "O4": "bf16-mixed')?",
    "O6": "O",
    "fp16-full": "16-true')?",
    "float16-true": "16-true')?",
    "pure_bf16": "bf16-true')?",
    "bf16-full": "bf16-true')?",
    "mixed-float32": "32-true')?",
    "fp32-mixed": "32-true')?",
    "float64_mixed": "64-true')?",
    "half-mixed": "16-mixed')?",
    "amp_half": "16-mixed')?",
}
NO_DTYPES = ("int8", "uint8", "bool", "complex64", "float8_e4m3fn", jnp.int32)


def block(context):
    with context:
        pass


def branching(x):
    return x if jnp.sum(x) > 0 else -x  # the line of the user


def asks_for_cudnn():
    """JAX asks for a GPU first, and then for the dtype of the query."""
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    place = "jax._src.cudnn.fused_attention_stablehlo.check_"
    with (
        mock.patch(place + "cudnn_version", return_value=91400),
        mock.patch(place + "compute_capability", return_value=True),
    ):
        note_of(lambda: mpjax.autocast(attend, POLICY)(*[jnp.ones((1, 2, 1, 8))] * 3))


def traced_step(made):
    made.lower(made.init(jnp.ones(2)), X)


class TorchDType:
    """Looks like a dtype of PyTorch, which is not installed: its module and its text."""

    def __init__(self, name):
        self.text = f"torch.{name}"

    def __repr__(self):
        return self.text


TorchDType.__module__, TorchDType.__name__ = "torch", "dtype"
TORCH_BF16, TORCH_F16, TORCH_F32 = map(TorchDType, ("bfloat16", "float16", "float32"))
DLS = mpjax.DynamicLossScale


def shown_without(owner, name):
    """Raises what is said of a missing attribute, if it names none that is like it."""
    try:
        getattr(owner, name)
    except AttributeError as error:
        if "Did you mean" not in (text := str(error)):
            raise ValueError(text) from None


STATEFUL = nnx.BatchNorm(2, rngs=nnx.Rngs(0))


def entered(policy):
    with mpjax.default_policy(policy):
        pass


def unmatched(pattern):
    mpjax.PolicyMap(POLICY, {pattern: "float32"}).cast_to_param({"layer": PARAMS})


TORCH = "torch.autocast | Allowed | no context manager"
MAP = mpjax.PolicyMap("16-mixed", {"norm": "float32"})
INT8 = "int8_from_mixed_float16"
SWAPPED = (
    ("explain", "fun", lambda: mpjax.explain(POLICY, loss_fn)),
    ("quantize", "params", lambda: mpjax.quantize(POLICY, PARAMS)),
    ("set_policy", "model", lambda: mpjax.nnx.set_policy(POLICY, model())),
    ("with_policy", "model", lambda: mpjax.linen.with_policy(POLICY, nn.Dense(2))),
)
CONTEXT = "no context manager | jit has traced already | Type @mpjax.autocast( | full_precision"


# fmt: off
ROWS = {
    "autocast as other libraries have it": [
        (lambda: block(mpjax.autocast(MAP)), T,
            CONTEXT.replace("cast(", "cast(PolicyMap('16-mixed'")),
        (lambda: mpjax.autocast("cuda", dtype=jnp.float16, enabled=True), T,
            f"a device, dtype=, enabled= | {TORCH} | @mpjax.autocast('16-mixed')"),
        (lambda: mpjax.autocast("cuda", enabled=False), T,
            CONTEXT.replace(" | full", " | '32-true' | full")),
        (lambda: mpjax.autocast(device_type="cuda", dtype=jnp.float16), T, TORCH + " | '16-mixed'"),
        (lambda: mpjax.autocast(cache_enabled=False), T, 'got cache_enabled= | ' + TORCH),
        (lambda: mpjax.autocast(False), T,
            "got False | " + CONTEXT.replace(" | full", " | '32-true' | full")),
        (lambda: mpjax.autocast(True), T, 'got True | ' + TORCH),
        (lambda: mpjax.autocast(loss_fn, "cuda"), V, "'cuda' is a device | '16-mixed'"),
        (lambda: mpjax.autocast(loss_fn, True), V, "got True | Accepted | '32-true'"),
        (lambda: mpjax.autocast(jnp.ones(2)), V, 'an array, f32[2] | autocast(fun,'),
        (lambda: mpjax.autocast(loss_fn, amp_dtype=jnp.float16), T, "Type policy='16-mixed'"),
        (lambda: mpjax.full_precision(enabled=False), T, 'got enabled=False | Leave the block'),
        (lambda: mpjax.autocast(device_type="cuda"), T,
            "device_type= | torch.autocast | "
            + CONTEXT.replace(" | full", " | autocast(fun, 'bf16-mixed') | full")),
        (lambda: note_of(lambda: mpjax.autocast(branching, POLICY)(X)), V,
            "autocast(branching): | traces it | At _wrong_policies.py: | # the line of the user | "
            "jax.lax.cond"),
        *told(lambda fun: note_of(lambda: fun(lambda w, x: jnp.sum(STATEFUL(x * w)))), V, "{}",
            (lambda fun: mpjax.autocast(fun, POLICY)(1.0, X),
                "autocast(<lambda>): the function changes an NNX module | def fun(model, x)"),
            (lambda fun: traced_step(step(fun, policy=POLICY)),
                "autocast(<lambda>): | mpjax.nnx.make_train_step(model, tx, policy, loss_fn)")),
        (asks_for_cudnn, V, "implementation=\"cudnn\") got float32 | Allowed | "
            "Type mpjax.dot_product_attention("),
        (lambda: block(mpjax.autocast(POLICY)), T, "with autocast('bf16-mixed') | " + CONTEXT),
        (lambda: block(mpjax.autocast()), T, CONTEXT),
        (lambda: block(mpjax.autocast("16-mixed")), T,
            CONTEXT.replace("cast(", "cast('16-mixed')")),
        (lambda: block(mpjax.autocast(rules={"exp": "full"})), T, CONTEXT),
        (lambda: mpjax.autocast("cuda"), T, "'cuda', a device | Allowed | @mpjax.autocast"),
    ],
    "autocast": [
        (lambda: mpjax.autocast(loss_fn, POLICY, PARAMS, X), T,
            "takes fun, policy | got 4 | rules= | Type autocast(fun, policy)(params, batch)"),
        (lambda: mpjax.autocast(loss_fn, dtype="bf16"), T, "dtype= | Allowed | 'bf16-mixed'"),
        (lambda: mpjax.autocast(X, POLICY), T, "f32[4,2] | Allowed | autocast(fun, 'bf16-mixed'"),
        (lambda: mpjax.autocast(PARAMS, POLICY), T, "Allowed | autocast(fun, 'bf16-mixed')"),
        (lambda: mpjax.autocast(POLICY, loss_fn), T,
            "function as the policy | autocast(fun | Type autocast(fun, 'bf16-mixed')"),
        (lambda: mpjax.autocast(loss_fn, jnp.bfloat16), V, "alone | 'bf16-mixed' | 'bfloat16'"),
        (lambda: mpjax.autocast(jnp.float16), V, "alone | '16-mixed' | 'float16'"),
        (lambda: mpjax.autocast(loss_fn, "float8"), V, "'float8' | 8 bits | Accepted"),
        (lambda: mpjax.autocast(loss_fn, "no"), V, "'no' | Accepted | '32-true'"),
        (lambda: mpjax.autocast(loss_fn, POLICY, rules={"softmax": "full"}), V,
            "'softmax' | 'exp' | make_jaxpr"),
        (lambda: mpjax.autocast(loss_fn, POLICY, rules={"matmul": "low"}), V,
            "'matmul' | 'dot_general' | make_jaxpr"),
        *each(lambda v: mpjax.autocast(loss_fn, v), T,
            "no dtype to compute in | type 'int8_from_mixed_bfloat16'",
            *("int8", "p=f32,c=int8,o=f32")),
        *each(mpjax.autocast, T, "no dtype to compute in | type 'float8_from_mixed_bfloat16'",
            *("float8_e4m3fn", "p=f32,c=float8_e5m2,o=f32")),
        (lambda: mpjax.autocast(loss_fn, "bf16_mxied"), V, "unknown policy 'bf16_mxied' | 'bf16-"),
        (lambda: mpjax.autocast(loss_fn, "bf16"), V, "two things | 'bf16-mixed'"),
        (lambda: mpjax.autocast("bf16"), V, "two things"),
        (lambda: mpjax.autocast(3), V, "unknown policy '3'"),
        (lambda: mpjax.autocast(POLICY)(3), T,
            "got 3 where a function is decorated | Allowed | autocast(fun"),
        *each(lambda v: mpjax.autocast(loss_fn, "float32", dot_precision=v), V,
            "unknown algorithm | {} | Accepted | 'tf32'", *("tf31", 3, ["tf32"])),
        (lambda: mpjax.autocast(loss_fn, POLICY, dot_precision="tf32")(PARAMS, X), V,
            'TF32_TF32_F32 reads float32 | "float32"'),
        *told(block, T, "{}",
            (mpjax.full_precision, "`with full_precision:` has no | with mpjax.full_precision():"),
            (mpjax.default_policy, "`with default_policy:` | `with mpjax.default_policy('bf16-mi")),
        (lambda: mpjax.full_precision(loss_fn), T,
            "no arguments | Allowed | Type @full_precision() with parentheses"),
        *told(lambda v: mpjax.autocast(lambda x: {"a": [v], "b": x @ x}, POLICY)(X @ X.T), T,
            "autocast(<lambda>): result['a'][0] is not an array; got {}", ("text", "str"),
            (jnp.tanh, ""), (object(), "object")),
    ],
    "rules of autocast and explain": [
        row
        for call in (
            lambda rules: mpjax.autocast(loss_fn, POLICY, rules=rules),
            lambda rules: mpjax.autocast(rules=rules),
            lambda rules: mpjax.explain(loss_fn, POLICY, rules=rules),
        )
        for row in (
            *told(
                call,
                V,
                "{}",
                (
                    {"tahn": "full"},
                    "unknown primitive 'tahn' | Nearest: | 'tanh' | make_jaxpr",
                ),
                ({"gellu": "full"}, "unknown primitive 'gellu' | Nearest: | 'gelu'"),
                ({"tanh": "ful"}, "unknown class 'ful' for 'tanh'"),
                ({"tanh": ["full"]}, "unknown class ['full'] for 'tanh'"),
                ({"tanh": "lower"}, "cannot be 'lower' | 'dot_general'"),
                ({"tanh": "keep"}, "'tanh' cannot be 'keep' | \"follow\""),
                ({"gelu": "lower"}, "'gelu' cannot be 'lower' | \"follow\""),
                (
                    {"my_layer": "full"},
                    "unknown | 'my_layer' | full_precision():` in it",
                ),
                ({"scan": "full"}, "'scan' holds a program | inside it"),
                ({"random_bits": "full"}, "'random_bits' has no class | traced with"),
                ({jnp.tanh: "full"}, 'got | tanh | as a name | rules={"tanh": "full"}'),
                ("wide", "unknown set of rules 'wide' | Accepted | 'widest'"),
            ),
            (lambda call=call: call(["tanh"]), T, "got ['tanh'] | Accepted | a dict"),
        )
    ],
    "attention as PyTorch has it": [
        *told(lambda given: mpjax.dot_product_attention(X, X, X, **given), T,
            "dot_product_attention: unknown keyword {}",
            ({"attn_mask": X}, "attn_mask=. | Allowed: query, | Type mask= (booleans) or bias="),
            ({"dropout_p": 0.0}, "dropout_p=. | Drop dropout_p=: there is no dropout"),
            ({"dropout_p": 0.1}, "dropout_p=. | jax.nn.softmax and a dropout of its result"),
            ({"enable_gqa": True}, "enable_gqa=. | Drop enable_gqa=: there may be fewer heads"),
            ({"causal": True}, "causal=. | Type is_causal= instead of causal=.")),
        (lambda: mpjax.dot_product_attention(X, X, X, None, None, 0.0), T,
            "takes query, key, value, bias, mask without a name; got 6 | by name: scale=, is_ca"),
    ],
    "policies as other libraries have them": [
        *told(lambda spec: mpjax.get_policy(spec), V, "get_policy: {}",
            (TORCH_BF16, "got torch.bfloat16, a dtype of PyTorch. | Accepted | Type 'bf16-mixed'"),
            (TORCH_F16, "got torch.float16, a dtype | Accepted | Type '16-mixed'"),
            (TORCH_F32, "got torch.float32, a dtype | Type '32-true'")),
        (lambda: mpjax.autocast(loss_fn, TORCH_F16), V, "torch.float16, a | '16-mixed'"),
        (lambda: mpjax.Policy("f32", TORCH_F16), V,
            "Policy(compute_dtype): got torch.float16, a dtype of PyTorch. | Type jnp.float16"),
        (lambda: mpjax.get_policy(INT8).source_name, A, 'Here it is .base'),
        (lambda: operator.setitem(MAP, "a", "f32"), T, "is immutable | {'a': policy, **"),
        (lambda: operator.delitem(MAP, "norm"), T, 'is immutable | Make another'),
        (lambda: mpjax.Policy("mixed_float16"), V, "one dtype of three | get_policy('mixed_f"),
        (lambda: mpjax.get_policy(["f32", "f16", "f32"]), V, "a list | Policy('f32', 'f16',"),
        (lambda: mpjax.get_policy("f32,f16,f32"), V, "Type 'p=f32,c=f16,o=f32'"),
        (lambda: mpjax.get_policy({"compute": "f16"}), V, "Allowed | 'bf16-mixed'"),
        *(
            (lambda recipe=recipe: step(policy=recipe), V,
                f"get_policy: got {name}(), a recipe | Policy('bf16-mixed', mpjax.{name}()")
            for name in ("Float8CurrentScaling", "DelayedScaling")
            for recipe in (getattr(mpjax, name), getattr(mpjax, name)())
        ),
        *told(lambda kind: step(policy=kind), V, "got the class {}", *(
            (getattr(mpjax, name), f"{name}, | Accepted | Call it: mpjax.{name}('")
            for name in ("Policy", "PolicyMap", "QuantizedPolicy"))),
        (lambda: step(policy={"head": "float32", "norm*": "f32"}), V,
            "got a mapping with the keys 'head', 'norm*', | Accepted | by path | "
            "PolicyMap('bf16-mixed', {'head': 'float32', 'norm*': 'f32'})"),
        (lambda: step(policy=PARAMS), V, "keys 'w', where | Accepted | behind what it is for"),
        (lambda: step(policy=loss_fn), V, "got the function loss_fn, where | Accepted | behind"),
        (lambda: step(policy=model()), V, "got an nnx.Module, where | Accepted | behind"),
        (lambda: mpjax.get_policy(SGD), V, "got a GradientTransformation | Type its name"),
        (lambda: mpjax.Policy("f32", model()), V, "unknown dtype Linear. | Accepted"),
        *told(lambda call: call(), T, "got the policy 'bf16-mixed' where {}",
            *((call, f"{name} stands | order | Swap them: {where}({name}, 'bf16-mixed')")
                for where, name, call in SWAPPED)),
        (lambda: mpjax.linen.with_policy(MAP, model()), T,
            "got the policy | where model stands | Swap them: with_policy(model,"),
        *told(mpjax.get_policy, V, "unknown policy {}",
            *((name, f"'{name}': | Type 'float8_from_{low}', or 'float8_from_mixed_{low}' for floa")
                for name, low in (("transformer-engine", "bfloat16"),
                    ("transformer-engine-float16", "float16")))),
        (lambda: mpjax.get_policy("c=F16"), V, "unknown dtype 'F16'. | Did you mean 'f16'?"),
        (lambda: mpjax.Policy("Half"), V, "unknown dtype 'Half'. | Did you mean 'half'?"),
        (lambda: mpjax.get_policy("float"), V, "'float' | Did you mean get_policy('float32')"),
        *told(mpjax.PolicyMap(POLICY, {}).policy_for, T,
            "PolicyMap.policy_for(path): must be a text; got {}", (3, "int. | Type"),
            (None, "NoneType. | Type"), (b"w", "bytes. | Type"),
            ((jax.tree_util.DictKey("w"),), "tuple. | keystr(path, simple=True, separator='/')")),
        (lambda: mpjax.nnx.set_policy(model(), mpjax.PolicyMap(POLICY, {"hed": "float32"})), W,
            "matches none | Nearest: 'bias', 'kernel' (case"),
        (lambda: mpjax.get_policy("8bit"), V, "8 bits | Type 'int8_from_mixed_bfloat16'"),
        (lambda: mpjax.get_policy("highest"), V, "float32 products | dot_precision='tf32'"),
        (lambda: mpjax.QuantizedPolicy("int8", POLICY), T,
            "a recipe | Allowed | Type QuantizedPolicy('bf16-mixed', 'int8')"),
        (lambda: mpjax.Float8BlockScaling(margn=1), T, 'Float8BlockScaling: | Type margin='),
        (lambda: mpjax.Float8CurrentScaling(fprop="hybrid"), V, 'Allowed | Float8CurrentSc'),
        (lambda: mpjax.get_policy(POLICY).compute_dtyp, A, "Did you mean .compute_dtype?"),
        (lambda: mpjax.get_policy("int8_from_float32").get_config, A, "Here it is .to_dict()"),
        (lambda: mpjax.get_policy("nf4"), V, "no products of 4 bits | int8_from_mixed_bfloat16"),
        (lambda: mpjax.get_policy("int4"), (T, V), "4"),
        (lambda: mpjax.PolicyMap({"norm*": "float32"}), T,
            "no default policy | Type PolicyMap('bf16-mixed', {'norm*': 'float32'})"),
        (lambda: mpjax.PolicyMap(POLICY, {"a*": "float32"})["a/b"], KeyError,
            "no rule has the pattern 'a/b' | Patterns: 'a*' | policies.policy_for('a/b')"),
        (lambda: unmatched(".*/w"), UserWarning, "signs of a regular | Type 're:.*/w'"),
        (lambda: unmatched("(layer|block)/w"), UserWarning, "Type 're:(layer|block)/w'"),
        (lambda: unmatched("lay/w"), UserWarning, "Nearest: 'layer/w'"),
    ],
    "policies": [
        (lambda: mpjax.get_policy("fp16"), V, "two things | '16-mixed' | 'float16'"),
        (lambda: step(policy="fp16"), V, "two things | '16-mixed' | 'float16'"),
        (lambda: mpjax.get_policy("O5"), V, "'O5' | Accepted | get_policy('p=bf16,c=bf16"),
        (lambda: mpjax.default_policy(), T, 'policy'),
        (lambda: mpjax.get_policy("amp"), V, "'amp' | Accepted | '16-mixed'"),
        (lambda: mpjax.Policy(*["f32"] * 4), T, "param_dtype, | got 4 arguments | Drop the"),
        (lambda: mpjax.Policy("f32", "f17"), V, "'f17' | Accepted | Did you mean"),
        *told(mpjax.Policy, V, "Policy(param_dtype): unknown dtype {}",
            ("bfloat_16", "'bfloat_16'. | Did you mean 'bfloat16'?"),
            ("float", "'float'. | Accepted | Did you mean 'float32'?"),
            ("f128", "'f128'. | Accepted | Type, for example, 'bfloat16'."),
            ("float8", "'float8'. | Accepted | policy 'float8_from_mixed_bfloat16'."),
            ("bf8", "'bf8'. | Accepted | policy 'float8_from_mixed_bfloat16'.")),
        *told(mpjax.get_policy, V, "get_policy: unknown policy {}",
            ("bf16x3-fast", "'bf16x3-fast'. | Accepted | mean get_policy('b"),
            ("32-fast-mixed", "'32-fast-mixed'. | Accepted | mean get_policy('32")),
        *each(mpjax.Policy, V, "Policy(param_dtype): unknown dtype | Accepted: float16, bfloat16",
            "float31", "f4", "e", "O4", "float", "f4,f4", "", None, 3, b"f32", object(), True, X),
        *told(mpjax.Policy, T, "Policy(param_dtype): | is no dtype to compute in. | {}",
            *((v, "integers and booleans keep their dtype") for v in ("int8", jnp.int32, bool)),
            *((v, "complex values keep their dtype") for v in ("complex64", jnp.complex128)),
            ("float8_e4m3fn", "need a scale per tensor"),
            (jnp.float8_e5m2, "need a scale per tensor"),
            (jnp.float4_e2m1fn, "need a scale per tensor")),
        (lambda: setattr(mpjax.Policy(), "param_dtype", "f16"), A,
            "Policy: is immutable; got param_dtype = 'f16'. | Make another"),
        (lambda: delattr(mpjax.Policy(), "param_dtype"), A,
            "Policy: is immutable; cannot delete param_dtype"),
        (lambda: mpjax.PolicyMap(POLICY, {"a": None}), V, "'a' | None | Allowed | '32-true'"),
        (lambda: entered(jnp.bfloat16), V, "bfloat16 alone | 'bf16-mixed'"),
        (lambda: mpjax.check_support(POLICY, "h1000"), V, "'h1000'"),
        *told(mpjax.get_policy, V, "get_policy: unknown policy {}",
            *(
                (name, f"'{name}'. | Accepted: 'bf16-mixed', | Did you mean get_policy('{nearest}")
                for name, nearest in NEAR_MISSES.items()
            )),
        *each(lambda v: mpjax.get_policy(v), V, "unknown policy | Accepted: | E.g. get_policy",
            *("", "zzzzzz", 7, "?", "e")),
        *each(mpjax.get_policy, V, "{}: 8 bits is a recipe | Accepted",
            *("float8", "fp8", "f8", "8bit", "int8-mixed")),
        (lambda: mpjax.get_policy("bf16x3"), V, "'bf16x3' is how | precision='tf32'), or 'bf16"),
        *each(mpjax.get_policy, V, "{} is how | dot_precision='tf32'",
            *("tf32", "TF32", "TensorFloat32")),
        (lambda: mpjax.get_policy("bf16"), V, "two things | 'bf16-mixed' | or 'bfloat16'"),
        *told(mpjax.get_policy, V, "{}",
            ("p=f32,x=f16", "unknown key 'x' | Allowed | p=f32,c=bf16,o=f32"),
            ("x=f32", "unknown key 'x'"), ("p=f32,", "unknown key ''"),
            ("p=f32,p=f16", "'p' is given twice | once"),
            ("p=f32,params=f16", "'params' is given twice"), ("c=bf17", "unknown dtype 'bf17'"),
            ("c=", "unknown dtype ''"), ("c==f32", "unknown dtype '=f32'")),
        *each(mpjax.get_policy, T, "get_policy: | is no dtype to compute in | Accepted",
            *NO_DTYPES),
        *each(lambda v: mpjax.Policy(compute_dtype=v), T,
            "Policy(compute_dtype): | is no dtype to compute in | Accepted", *NO_DTYPES),
        (lambda: mpjax.get_policy("int8"), T, "int8 is no dtype | Accepted | Use 'bfloat16'"),
        *each(mpjax.get_policy, V, "get_policy: unknown dtype | Accepted", 1.5, object(), b"f32"),
        *told(mpjax.get_policy, V, "get_policy: got {} | Accepted | Type", (True, "True"),
            (["f32"], "a list"), (X, "an array, f32[4,2]")),
        *told(mpjax.get_policy, V, "Policy.from_dict: got the keys {} | Allowed, all of",
            ({}, "[]"), ({"param_dtype": "f32"}, ""), ({"default": "f32"}, "")),
        (lambda: entered("bf15"), V, "unknown policy 'bf15' | Accepted"),
        *each(lambda v: mpjax.PolicyMap(POLICY, {v: "f16"}), V,
            "PolicyMap: {} is no regular expression: | Escape it with re.escape, or write",
            *("re:(", "re:*", "re:[a")),
        *each(lambda v: mpjax.PolicyMap(POLICY, {v: "f16"}), V,
            "PolicyMap: got {} as a path pattern. | E.g. | encoder/norm*",
            *("", "re:", None, 3, ("a", "b"))),
        *each(lambda v: mpjax.PolicyMap(POLICY, v), T,
            "PolicyMap(rules): got | Allowed: a mapping from pattern to policy | PolicyMap(",
            *(None, "encoder", 3, ["encoder"], [("a", "b", "c")], [("a",)], [1])),
        (lambda: mpjax.PolicyMap(POLICY, {"a": "bf17_mixed"}), V,
            "unknown policy 'bf17_mixed' | Accepted"),
        (lambda: mpjax.PolicyMap(POLICY, {"a": mpjax.PolicyMap("f16")}), T,
            "got a PolicyMap as a policy. | Put its rules into"),
        (lambda: mpjax.PolicyMap(mpjax.PolicyMap(POLICY)), T, "PolicyMap | Allowed | rules"),
        *told(lambda change: change(mpjax.PolicyMap("f32")), A, "PolicyMap: is immutable; {}",
            (lambda policies: setattr(policies, "default", 1), "got default = 1"),
            (lambda policies: delattr(policies, "_rules"), "cannot delete _rules")),
        (lambda: mpjax.PolicyMap.from_dict({"default": "f32"}), V,
            "PolicyMap.from_dict: got the keys ['default']"),
        *told(lambda cast: cast(PARAMS), V, "{}: float64 was asked for, and 64-bit types",
            (mpjax.PolicyMap("f32", {"w": "f64"}).cast_to_compute, "cast_to_compute"),
            (mpjax.get_policy("64-true").cast_to_compute, "cast_to_compute"),
            (mpjax.get_policy("p=f64,c=f32,o=f32").cast_to_param, "cast_to_param")),
        *each(mpjax.get_policy("float64").cast_to_compute, V,
            "cast_to_compute: float64 was asked for", {}, {"n": 3}, {"w": np.ones(2)}),
    ],
    "names of other libraries": [
        (lambda: mpjax.autocats, A, 'Did you mean mpjax.autocast?'),
        (lambda: mpjax.cast_to_half, A, "Here it is mpjax.get_policy('half').cast_to_compute"),
        (lambda: mpjax.no_such_name, A, 'no_such_name'),
        (lambda: mpjax.optim.MultiSteps, A, "'mpjax.optim' | accumulate=4"),
        (lambda: mpjax.nnx.GradScaler, A, "'mpjax.nnx' | mpjax.DynamicLossScale"),
        (lambda: mpjax.linen.Dense, A, "'mpjax.linen' | flax.linen.Dense"),
        (lambda: mpjax.train.make_trainstep, A, 'Did you mean mpjax.train.make_train_step?'),
        (lambda: mpjax.numerics.diagnos, A, 'Did you mean mpjax.numerics.diagnose?'),
        *told(lambda name: getattr(mpjax, name), A, "module 'mpjax': has no attribute {}",
            *((name, f"'{name}'. | Here it is {here}") for name, here in (
                ("disable_casts", "mpjax.full_precision(), in a with block"),
                ("register_float_function", "mpjax.full_precision()(fun)"),
                ("register_half_function", "mpjax.get_policy(policy).cast_to_compute"),
                ("promote_function", "nothing"), ("optim_bits", "mpjax.optim.with_quantized_state"),
                ("Linear8bitLt", "mpjax.quantize(params, "),
                ("PagedAdamW8bit", "mpjax.optim.with_quantized_state(optax.adamw(1e-3))"),
                ("QtProvider", "mpjax.autocast(fun, "), ("PtqProvider", "mpjax.quantize(params, "),
                ("current_policy", "mpjax.get_policy()"), ("GradScalerKwargs", "mpjax.DynamicLos"),
            ))),
        (lambda: shown_without(mpjax, "scale_of_loss"), V, "'mpjax': has no attribute | Type dir("),
        (lambda: shown_without(DLS(), "rescale"), V, "no attribute 'rescale'. | It has .adjust, ."),
        (lambda: shown_without(mpjax, "requantize"), V, "'mpjax': has no attribute 'requantize'"),
        (lambda: mpjax.maketrainstep, A, "Did you mean mpjax.make_train_step?"),
        (lambda: DLS().growht_interval, A, "Did you mean .growth_interval?"),
        (lambda: DLS().lost_scale, A, "Did you mean .loss_scale?"),
        (lambda: mpjax.pods.chek, A, 'Did you mean mpjax.pods.check?'),
    ],
}
# fmt: on
