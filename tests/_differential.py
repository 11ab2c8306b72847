"""Compares a transformed program with the program itself: types, exact parts, rounding.

`compare` raises `Mismatch` with the program's source. It takes the transformation as an argument,
so that tests can hand it broken ones and see them caught.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import _evaluate
import _rounding
import jax
import jax.numpy as jnp
import numpy as np
from _program_text import Program
from jax.extend.core import jaxpr_as_fun

from benchmarks.measure.elsewhere import lowered_for

Fun = Callable[..., Any]
Cast = Callable[[Fun], Fun]
# Operations that a rounded operand hurts: in float32 whatever the policy.
_WIDE_NAMES = """
exp exp2 expm1 log log1p pow rsqrt cbrt tan asin acos sinh cosh atanh acosh erf_inv lgamma digamma
reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum cholesky lu triangular_solve
scatter-add scatter-sub scatter-mul
"""
WIDE = frozenset(_WIDE_NAMES.split())

_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


class Mismatch(Exception):
    """What differs, and the program that shows it."""


class JaxRefusesError(Exception):
    """JAX itself cannot do this to the program: there is nothing to compare with."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to combine autocast with a transformation: `build(fun, cast)` of the same arguments."""

    name: str
    build: Callable[[Fun, Cast], Fun]
    backward: bool = False
    forward: bool = False

    @property
    def outermost(self) -> bool:
        """Whether autocast is what is called: it sees every operation of what runs."""
        return self.name.startswith(("autocast", "jit(autocast"))

    @property
    def exact(self) -> bool:
        """Whether no derivative is taken of what autocast rebuilt."""
        return self.outermost and "inner" not in self.name

    def fits(self, program: "Program | Named") -> bool:
        """Whether JAX can do this to the program at all."""
        while_loop_backward = self.backward and program.loops
        rule_forward = self.forward and program.backward_rule
        return not (while_loop_backward or rule_forward)


# -- what is done to a program -----------------------------------------------------------------


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _weighted(x: jax.Array) -> jax.Array:
    """A sum that no two elements enter alike, so that no mistake cancels."""
    weights = np.cos(1.0 + np.arange(x.size, dtype=np.float32)).reshape(x.shape)
    return jnp.sum(x * weights)


def _loss(fun: Fun) -> Fun:
    def loss(*args: Any) -> jax.Array:
        outs = [x for x in fun(*args) if _is_float(x)]
        return sum((_weighted(x) for x in outs), start=jnp.float32(0))

    return loss


def _over_floats(transform: Callable[[Fun, Sequence[Any]], Any]) -> Callable[[Fun], Fun]:
    """Applies a transformation to a function of the floating arguments alone."""

    def transformed(fun: Fun) -> Fun:
        def run(*args: Any) -> Any:
            floats = [x for x in args if _is_float(x)]

            def of_floats(*xs: Any) -> Any:
                given = iter(xs)
                return fun(*(next(given) if _is_float(x) else x for x in args))

            return transform(of_floats, floats)

        return run

    return transformed


def _tangents(xs: Sequence[Any]) -> list[Any]:
    return [jnp.sin(2.0 + jnp.asarray(x)).astype(jnp.result_type(x)) for x in xs]


def _gradient(fun: Fun, xs: Sequence[Any]) -> Any:
    return jax.grad(fun, argnums=tuple(range(len(xs))))(*xs)


def _only_floats(fun: Fun) -> Fun:
    return lambda *xs: [y for y in fun(*xs) if _is_float(y)]


def _product_with_second(fun: Fun, xs: Sequence[Any]) -> Any:
    def slope(*ys: Any) -> jax.Array:
        return sum((_weighted(g) for g in _gradient(fun, ys) if _wide(g)), start=jnp.float32(0))

    return _gradient(slope, xs)


def _wide(x: Any) -> bool:
    return x.dtype == jnp.float32


_GRAD = _over_floats(_gradient)
_JVP = _over_floats(lambda fun, xs: jax.jvp(_only_floats(fun), list(xs), _tangents(xs)))
_LINEAR = _over_floats(lambda fun, xs: jax.linearize(_only_floats(fun), *xs)[1](*_tangents(xs)))
_VMAP = _over_floats(
    lambda fun, xs: jax.vmap(fun)(*(jnp.stack([jnp.asarray(x), 0.5 * jnp.asarray(x)]) for x in xs))
)
_SECOND = _over_floats(_product_with_second)
_FORWARD_OVER_REVERSE = _over_floats(
    lambda fun, xs: jax.jvp(lambda *ys: _gradient(fun, ys), list(xs), _tangents(xs))
)

MODES: tuple[Mode, ...] = (
    Mode("autocast(f)", lambda f, cast: cast(f)),
    Mode("grad(autocast(f))", lambda f, cast: _GRAD(cast(_loss(f))), backward=True),
    Mode("autocast(grad(f))", lambda f, cast: cast(_GRAD(_loss(f))), backward=True),
    Mode("jit(autocast(f))", lambda f, cast: jax.jit(cast(f))),
    Mode("autocast(jit(f))", lambda f, cast: cast(jax.jit(f))),
    Mode("jvp(autocast(f))", lambda f, cast: _JVP(cast(f)), forward=True),
    Mode("autocast(jvp(f))", lambda f, cast: cast(_JVP(f)), forward=True),
    Mode("linearize(autocast(f))", lambda f, cast: _LINEAR(cast(f)), forward=True),
    Mode("vmap(autocast(f))", lambda f, cast: _VMAP(cast(f))),
    Mode("autocast(vmap(f))", lambda f, cast: cast(_VMAP(f))),
    Mode("vmap(grad(autocast(f)))", lambda f, cast: _VMAP(_GRAD(cast(_loss(f)))), backward=True),
    Mode(
        "grad(checkpoint(autocast(f)))",
        lambda f, cast: _GRAD(jax.checkpoint(cast(_loss(f)))),
        backward=True,
    ),
    Mode("grad(grad(autocast(f)))", lambda f, cast: _SECOND(cast(_loss(f))), backward=True),
    Mode("autocast(grad(grad(f)))", lambda f, cast: cast(_SECOND(_loss(f))), backward=True),
    Mode(
        "jvp(grad(autocast(f)))",
        lambda f, cast: _FORWARD_OVER_REVERSE(cast(_loss(f))),
        backward=True,
        forward=True,
    ),
    Mode("autocast(autocast(f))", lambda f, cast: cast(cast(f))),
    Mode(
        "autocast(inner value and grad)", lambda f, cast: cast(_both(cast(_loss(f)))), backward=True
    ),
)


def _both(loss: Fun) -> Fun:
    gradient = _GRAD(loss)
    return lambda *args: (loss(*args), gradient(*args))


@dataclasses.dataclass(frozen=True)
class Named:
    """A function of flat arrays in the place of a random program: a layer, a model."""

    source: str
    fun: Fun
    args: tuple[Any, ...]
    loops: bool = False
    backward_rule: bool = False

    def load(self) -> tuple[Fun, tuple[Any, ...]]:
        return self.fun, self.args


def named(source: str, fun: Fun, *trees: Any) -> Named:
    """Returns `fun(*trees)` as a function of the arrays in `trees`, giving a flat tuple."""
    leaves, treedef = jax.tree.flatten(trees)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def flat(*arrays: Any) -> tuple[Any, ...]:
        full = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            full[i] = array
        return tuple(jax.tree.leaves(fun(*jax.tree.unflatten(treedef, full))))

    return Named(source, flat, tuple(leaves[i] for i in places))


# -- what must hold ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A program traced twice: as it is, and transformed."""

    program: Program | Named
    mode: Mode
    args: tuple[Any, ...]
    reference: Any
    transformed: Any
    types: tuple[Any, Any]

    def fail(self, what: str) -> Mismatch:
        return Mismatch(f"{self.mode.name}: {what}\n\n{self.program.source}")


def trace(program: Program | Named, mode: Mode, cast: Cast) -> Case:
    """Returns the jaxprs of a program and of its transformed self."""
    fun, args = program.load()
    try:
        plain, plain_types = jax.make_jaxpr(mode.build(fun, lambda g: g), return_shape=True)(*args)
    except Exception as error:
        raise JaxRefusesError(f"{mode.name}\n\n{program.source}") from error
    try:
        low, low_types = jax.make_jaxpr(mode.build(fun, cast), return_shape=True)(*args)
    except Exception as error:
        note = f"{mode.name}: {type(error).__name__}\n\n{program.source}"
        raise Mismatch(note) from error
    types = (plain_types, low_types)
    return Case(
        program=program, mode=mode, args=args, reference=plain, transformed=low, types=types
    )


def check_types(case: Case) -> None:
    """Raises where the transformed program gives other shapes, dtypes or weak types."""
    plain, low = case.types
    if case.mode.outermost:  # floating results in the policy's output_dtype
        plain = jax.tree.map(_widened, plain)
    if plain != low:
        raise case.fail(f"types {low}, expected {plain}")


def _widened(struct: Any) -> Any:
    if struct.dtype in _HALF:
        return jax.ShapeDtypeStruct(struct.shape, jnp.float32, weak_type=struct.weak_type)
    return struct


def check_wide(case: Case) -> None:
    """Raises where an operation that rounding hurts reads or gives a 16-bit value."""
    if "float16" in case.program.source:  # the program itself works in 16 bits somewhere
        return
    for eqn in equations(case.transformed.jaxpr):
        if eqn.primitive.name not in WIDE:
            continue
        atoms = (*eqn.invars, *eqn.outvars)
        if eqn.invars[0].aval.size == eqn.outvars[0].aval.size and "reduce" in eqn.primitive.name:
            continue  # over axes of size one: a reshape
        if any(getattr(v.aval, "dtype", None) in _HALF for v in atoms):
            raise case.fail(f"{eqn.primitive.name} in low precision: {eqn}")


def equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether values could be compared, and by how much of the bound they differed."""

    compared: bool
    worst: float = 0.0
    reason: str = ""


def check_values(
    case: Case,
    low: Any,
    outputs: Sequence[Any] | None = None,
    *,
    evaluate: Callable[..., Any] = _evaluate.evaluate,
    spread_of: Callable[..., Any] = _rounding.float64_spread,
    quantile: float = _rounding.QUANTILE,
) -> Verdict:
    """Raises where a value differs by more than rounding to `low` explains.

    Args:
      case: the two programs.
      low: the compute dtype.
      outputs: what the transformed program gave; None to evaluate it in NumPy.
      evaluate: how it is evaluated.
      spread_of: what is expected of it, as `float64_spread`.
      quantile: how many deviations it may be off.
    """
    flat = jax.tree.leaves(case.args)
    reached = _rounding.reached(case.reference)
    # Differentiated from outside, the rebuilt program adds cotangents in an order of its own.
    exact = outputs is None and case.mode.exact
    if outputs is None:
        outputs = evaluate(case.transformed, flat)
    if exact and not all(reached):
        _check_bits(case, outputs, _evaluate.evaluate(case.reference, flat), reached)
    if exact and not any(reached):
        return Verdict(compared=True)
    backwards = any(reached) and not case.mode.exact
    spread = spread_of(case.reference, flat, low, all_low=backwards)
    if not spread.decided:
        return Verdict(compared=False, reason="a comparison depends on rounding")
    if spread.peak > 0.25 * float(jnp.finfo(low).max):
        return Verdict(compared=False, reason="out of range")
    if any(_lost(d, v) for d, v in zip(spread.deviations, spread.values, strict=True)):
        return Verdict(compared=False, reason="noise leaves an operation's domain")
    worst = 0.0
    rows = zip(outputs, spread.values, spread.deviations, reached, strict=True)
    for i, (got, want, deviation, depends) in enumerate(rows):
        if exact and not depends:
            continue  # compared bit by bit above
        ratio = _excess(got, want, deviation, quantile)
        if not ratio <= 1:
            bound = None if deviation is None else quantile * deviation
            raise case.fail(f"output {i}: got {got}\nfloat64 {want}\nbound {bound}")
        worst = max(worst, ratio) if depends else worst
    return Verdict(compared=True, worst=worst)


def _check_bits(case: Case, outputs: Any, plain: Any, reached: Any) -> None:
    for i, (got, want, depends) in enumerate(zip(outputs, plain, reached, strict=True)):
        asked = getattr(want, "dtype", None) in _HALF
        if not depends and not _same_bits(
            got.astype(np.float32) if asked else got, want.astype(np.float32) if asked else want
        ):
            raise case.fail(f"output {i} depends on no product and changed: {got}, was {want}")


def _lost(deviation: Any, value: Any) -> bool:
    return deviation is not None and bool((~np.isfinite(deviation) & np.isfinite(value)).any())


def _same_bits(a: Any, b: Any) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _excess(got: Any, want: Any, deviation: Any, quantile: float) -> float:
    """Returns the largest error in units of its bound."""
    if deviation is None:
        return 0.0 if _same_bits(got, want) else float("inf")
    got = np.asarray(got, np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    error = np.abs(got - want)[finite]
    bound = (quantile * deviation + 2.0**-149)[finite]
    return float(np.max(error / bound, initial=0.0))


def run_together(cases: Sequence[Case], platform: str = "cpu") -> list[Any]:
    """Returns the outputs of programs that are compiled as one, as a platform has them."""
    arguments = [jax.tree.leaves(case.args) for case in cases]

    def run(args: Any) -> Any:
        pairs = zip(cases, args, strict=True)
        return [jaxpr_as_fun(case.transformed)(*xs) for case, xs in pairs]

    if platform != "cpu":
        run = lowered_for(platform, run, arguments)
    return jax.block_until_ready(jax.jit(run)(arguments))


def check_traced(program: Program | Named, mode: Mode, cast: Cast, low: Any) -> Verdict:
    """Raises where types, exact parts or values differ; NumPy evaluates, nothing is compiled."""
    case = trace(program, mode, cast)
    check_types(case)
    check_wide(case)
    return check_values(case, low)


def check(program: Program | Named, mode: Mode, cast: Cast, low: Any) -> Verdict:
    """Raises where types, exact parts or values differ, in NumPy and as XLA compiles it."""
    case = trace(program, mode, cast)
    check_types(case)
    check_wide(case)
    flat = jax.tree.leaves(case.args)
    outputs = jax.block_until_ready(jax.jit(jaxpr_as_fun(case.transformed))(*flat))
    check_values(case, low)
    return check_values(case, low, outputs)
