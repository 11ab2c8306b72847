"""`python -m mpjax doctor`: compares policies on a user's function, as compiled."""

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mpjax._autocast import autocast, explain
from mpjax._autocast.why.explanation import Explanation
from mpjax._base.described import MODULES, described
from mpjax._base.dtypes import short_name
from mpjax._base.errors import message, nearest
from mpjax._base.tree import is_array, is_array_or_shape, leaf_paths
from mpjax._base.users_line import users_line
from mpjax._doctor.measure import POLICIES, of_numbers, split
from mpjax._doctor.user_file import WHERE, first_line, load
from mpjax._hardware import Accelerator, examine
from mpjax._policies.policy import get_policy
from mpjax.numerics import find_promotions

Compiler = Callable[[Callable[..., Any], Any], tuple[int | None, int, float]]

"""The policies to compare unless the user names others; the first is the reference."""

_SHAPE = re.compile(r"(\w+)\[([\d, ]*)\]")
_ALLOWED_ARGUMENT = (
    "Allowed: a name in the file (array, tree, model, or function that makes one), "
    "or a shape: 'f32[8,128]', 'i32[]'."
)
_DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "u32": "uint32",
    "u8": "uint8",
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One policy: the bytes that its program keeps for the backward pass, and XLA's own counts."""

    policy: str
    status: str  # of its dtypes on the accelerator: native, slow, unsupported or unknown
    kept: int  # bytes from the forward to the backward pass, arguments left out; on any device
    bytes_accessed: int | None  # None where the backend does not count
    temporaries: int  # bytes
    seconds: float  # to trace, lower and compile


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The doctor's result: a row a policy, an explanation of the policy to take, and advice."""

    function: str
    what: str  # 'value and gradient' or 'value'
    accelerator: Accelerator
    compiled_for: str  # the target whose compiler counted
    rows: tuple[Measured, ...]
    taken: str  # the policy that is explained
    explanation: Explanation
    advice: tuple[str, ...]
    fun: Callable[..., Any]
    args: list[Any]  # arrays, shapes, and other objects

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        return {
            "function": self.function,
            "what": self.what,
            "device": self.accelerator.key,
            "compiled_for": self.compiled_for,
            "taken": self.taken,
            "policies": [dataclasses.asdict(row) for row in self.rows],
            "explanation": self.explanation.to_dict(),
            "advice": list(self.advice),
        }


def diagnose(
    target: str,
    arguments: Sequence[str],
    *,
    policies: Sequence[str] = POLICIES,
    accelerator: Accelerator,
    compiler: tuple[str, Compiler] | None = None,
    track: Callable[[Sequence[str]], Iterator[str]] = iter,
) -> Diagnosis:
    """Returns the diagnosis of a function in a file.

    Args:
      target: 'FILE.py:FUNCTION' or 'package.module:FUNCTION'.
      arguments: one a parameter: a name in the file, or a shape such as 'f32[8,128]'. Without
        any, each parameter is what the file calls by its name.
      policies: the policies to compare.
      accelerator: for which the support is looked up.
      compiler: a compiler that counts, with the name of its target; None for this machine's.
      track: shows progress over the policies.

    Raises:
      ValueError: there is no such file or function, an argument has no value, or the function
        cannot be traced; the message has the line.
    """
    module, fun, name = load(target)
    args = _arguments(module, fun, name, arguments)
    by_name = {policy: get_policy(policy) for policy in policies}  # a wrong name, before any work
    is_loss, has_aux = _is_loss(fun, args, name, module)
    target_name, compiled = compiler or (jax.default_backend(), compiled_here)
    rows = []
    for policy in track(policies):
        fast = autocast(fun, policy)
        kept = _kept(fast, args, has_aux) if is_loss else 0
        whole = _differentiated(fast, has_aux) if is_loss else fast
        status = examine(by_name[policy], accelerator).status
        rows.append(Measured(policy, status, kept, *_on_arrays(whole, args, compiled)))
    where = "here" if compiler is None else f"for {target_name}"
    taken, advice = _advise(rows, accelerator, where)
    advice += find_promotions(fun)(*args).advice()
    explanation = explain(fun, taken)(*args)
    advice += explanation.warnings()
    what = "value and gradient" if is_loss else "value"
    told = (tuple(rows), taken, explanation, tuple(advice))
    return Diagnosis(name, what, accelerator, target_name, *told, fun, args)


# -- what to examine -----------------------------------------------------------------------------


def _arguments(
    module: ModuleType, fun: Callable[..., Any], name: str, given: Sequence[str]
) -> list[Any]:
    signature = inspect.signature(fun)
    parameters = signature.parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    names = list(given) or needed
    try:
        signature.bind(*names)
    except TypeError as error:  # too few, too many, or keyword-only ones
        count = f"{len(names)} argument{'s' * (len(names) != 1)}"
        got = f"{name}{signature} does not take {count}: {error}."
        fix = "Give one a parameter, in order; for keyword-only ones write a function around it."
        raise ValueError(message(WHERE, got, _ALLOWED_ARGUMENT, fix)) from None
    missing = [] if given else [p for p in needed if not hasattr(module, p)]
    if missing:
        got = f"{name} takes {', '.join(needed)}; the file has no {', '.join(missing)}."
        fix = "Type python -m mpjax doctor FILE:FUNCTION params 'f32[8,128]'."
        raise ValueError(message(WHERE, got, _ALLOWED_ARGUMENT, fix))
    return [_argument(module, text) for text in names]


def _argument(module: ModuleType, text: str) -> Any:
    shape = _SHAPE.fullmatch(text)
    if shape:
        dtype = _DTYPES.get(shape[1], shape[1])
        try:
            sizes = tuple(int(n) for n in shape[2].split(",") if n.strip())
            return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))
        except TypeError:
            known = f"Allowed: {', '.join(_DTYPES)}, and NumPy's names."
            raise ValueError(message(WHERE, f"{text!r} has no known dtype.", known)) from None
    if not hasattr(module, text):
        close = nearest(text, [n for n in vars(module) if not n.startswith("__")])
        fix = [f"Did you mean {' or '.join(close)}?"] if close else []
        raise ValueError(message(WHERE, f"the file has no {text!r}.", _ALLOWED_ARGUMENT, *fix))
    value = getattr(module, text)
    return value() if _makes_value(value) else value


def _makes_value(x: Any) -> bool:
    """Whether it is a function or class to call for the value, and no model, which is called too.

    A function that needs arguments, such as an activation, is a value itself.
    """
    if not callable(x) or described(x) in MODULES or any(map(is_array, jax.tree.leaves(x))):
        return False
    try:
        inspect.signature(x).bind()
    except TypeError:
        return False
    except ValueError:  # some callables have no signature
        return True
    return True


def values_of(diagnosis: Diagnosis) -> list[Any]:
    """Returns arguments that a diagnosed function can run on.

    A shape of floating numbers is filled with normal ones; integers may be indices of any range.

    Raises:
      ValueError: an integer argument was given as a shape.
    """
    return jax.tree.map(lambda x: _filled(x, diagnosis.function), diagnosis.args, is_leaf=_is_shape)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _filled(x: Any, name: str) -> Any:
    if not _is_shape(x):
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        got = f"{name} cannot be run on {short_name(x.dtype)}{list(x.shape)}: its numbers matter."
        fix = "Name a value in the file, or a function that makes one, in its place."
        raise ValueError(message(WHERE, got, fix))
    return jax.random.normal(jax.random.key(0), x.shape, x.dtype)


# -- what to compile -----------------------------------------------------------------------------


def _is_loss(
    fun: Callable[..., Any], args: list[Any], name: str, module: ModuleType
) -> tuple[bool, bool]:
    """Returns whether `fun` is a loss, to be differentiated by its first argument, and has aux.

    A floating scalar is a loss, alone or as the first of a pair.
    """

    def checked(*args: Any) -> Any:
        out = fun(*args)
        for path, leaf in zip(leaf_paths(out), jax.tree.leaves(out), strict=True):
            if not (is_array(leaf) or isinstance(leaf, int | float | complex)):
                place = f" at {path!r}" if path else ""
                raise _NoArrayError(f"it returns a {type(leaf).__name__}{place}.")
        return out

    try:
        out: Any = _on_arrays(checked, args, jax.eval_shape)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(_untraceable(error, name, module)) from error
    has_aux = isinstance(out, tuple) and len(out) == 2
    loss: Any = out[0] if has_aux else out
    is_scalar = getattr(loss, "shape", None) == () and jnp.issubdtype(loss.dtype, jnp.floating)
    return bool(is_scalar and args and any(map(_is_floating, jax.tree.leaves(args[0])))), has_aux


class _NoArrayError(TypeError):
    """A function returned an object that no transformation of JAX takes."""


def _is_floating(x: Any) -> bool:
    return is_array_or_shape(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _on_arrays(fun: Callable[..., Any], args: list[Any], transform: Callable[..., Any]) -> Any:
    """Returns `transform(fun, *args)`; of the leaves of `args` only arrays are traced."""
    arrays, joined = split(args)
    return transform(lambda arrays: fun(*joined(arrays)), arrays)


def _differentiated(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns a function that gives the value of `fun` and its gradients."""

    def run(*args: Any) -> Any:
        of_these, numbers = of_numbers(fun, args)
        return jax.value_and_grad(of_these, has_aux=has_aux)(numbers)

    return run


def compiled_here(fun: Callable[..., Any], args: Any) -> tuple[int | None, int, float]:
    """Returns bytes accessed, bytes of temporaries and seconds of `fun(args)`, compiled here."""
    start = time.perf_counter()
    compiled = jax.jit(fun).lower(args).compile()
    seconds = time.perf_counter() - start
    accessed = (compiled.cost_analysis() or {}).get("bytes accessed")
    memory: Any = compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes
    return None if accessed is None else int(accessed), temporaries, seconds


def _kept(fun: Callable[..., Any], args: list[Any], has_aux: bool) -> int:
    """Returns the bytes that reverse-mode differentiation keeps, arguments left out."""

    def residuals(*args: Any) -> list[Any]:
        of_these, numbers = of_numbers(fun, args)
        return jax.tree.leaves(jax.vjp(of_these, numbers, has_aux=has_aux)[1])

    jaxpr = _on_arrays(residuals, args, lambda f, arrays: jax.make_jaxpr(f)(arrays)).jaxpr
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    kept = {var for var in jaxpr.outvars if not isinstance(var, jex.Literal) and var in made}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)


def _untraceable(error: Exception, name: str, module: ModuleType) -> str:
    needs_values = (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError)
    needs_values += (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)
    place = users_line(error, module.__file__ or "")
    if isinstance(error, needs_values):
        got = f"{name} cannot be jitted: it needs the value of an array while it is traced."
        fix = "Use jnp.where or jax.lax.cond there, or make the argument a Python value."
    elif isinstance(error, _NoArrayError):
        got = f"{name} cannot be jitted: {error}"
        place, fix = [], "Return arrays, numbers, or trees of them; a loss is a floating scalar."
    else:
        got = f"{name} fails on these arguments: {first_line(error)}"
        fix = "Check their shapes and dtypes; others can be given after FILE:FUNCTION."
    return message(WHERE, got, *place, fix)


# -- advice --------------------------------------------------------------------------------------


def _advise(
    rows: Sequence[Measured], accelerator: Accelerator, where: str = "here"
) -> tuple[str, list[str]]:
    """Returns the policy to explain, and the advice: to take it, or why to take none."""
    base, others = rows[0], [row for row in rows[1:] if row.status != "unsupported"]
    fast = [row for row in others if row.status == "native"]
    best = _best(fast or others or [base], base, accelerator)
    change = _change(best, base, where)
    if len(rows) == 1:
        return base.policy, ["Nothing to compare with: give two policies or more."]
    if best is base:
        got = f"{accelerator.name} runs none of them but {base.policy!r}."
        return base.policy, [got, *_instead(accelerator, rows)]
    if fast and _saves(best, base):
        return best.policy, [f"Take {best.policy!r}: {change}.", *_needs(best)]
    if fast:
        return best.policy, [
            f"{best.policy!r} is fast on {accelerator.name}, but saves no memory here: most of "
            "this function stays in float32, or its arrays are small. Time it before you take it.",
            *_needs(best),
        ]
    advice = _why_none(others, accelerator)
    instead = _instead(accelerator, rows)
    if not _saves(best, base):
        return best.policy, [advice, *instead, "None of them would save memory either."]
    return best.policy, [advice, *instead, f"For memory {best.policy!r}: {change}.", *_needs(best)]


def _best(rows: Sequence[Measured], base: Measured, accelerator: Accelerator) -> Measured:
    """Returns the row of least memory; among those within 5 % the accelerator's own choice."""
    least = min(_memory(row, base) for row in rows)
    close = [row for row in rows if _memory(row, base) <= 1.05 * least]
    return next((row for row in close if row.policy == accelerator.policy), close[0])


def _memory(row: Measured, base: Measured) -> int:
    """Returns the bytes kept, equal on all backends; if float32 keeps none, the temporaries."""
    return row.kept if base.kept else row.temporaries


def _saves(row: Measured, base: Measured) -> bool:
    return _memory(row, base) < 0.995 * _memory(base, base)


def _why_none(others: Sequence[Measured], accelerator: Accelerator) -> str:
    tried = " and ".join(repr(row.policy) for row in others)
    if all(row.status == "unknown" for row in others):
        return f"Whether {tried} is fast on {accelerator.name} is not known: time it."
    return f"Not fast on {accelerator.name}: {tried}."


def _instead(accelerator: Accelerator, rows: Sequence[Measured]) -> list[str]:
    """Returns the advice on the accelerator's own policy, if that of least memory is not fast."""
    policy = accelerator.policy
    if policy in [row.policy for row in rows]:
        return [f"For speed take {policy!r}."]
    return [f"There {policy!r} is: look at it with --policy {policy}."]


def _change(row: Measured, base: Measured, where: str) -> str:
    """Returns in words what decreases and what increases."""
    pairs = [
        ("kept for the backward pass", row.kept, base.kept),
        (f"temporary memory as compiled {where}", row.temporaries, base.temporaries),
    ]
    shares = [(name, a / b - 1) for name, a, b in pairs if b]
    less = [f"{-share:.0%} less {name}" for name, share in shares if share < -0.005]
    more = [f"{share:.0%} more {name}" for name, share in shares if share > 0.005]
    return ", but ".join(" and ".join(words) for words in (less, more) if words)


def _needs(row: Measured) -> list[str]:
    if get_policy(row.policy).compute_dtype != jnp.float16:
        return []
    return ["It needs a loss scale: mpjax.make_train_step, or mpjax.with_loss_scale around optax."]
