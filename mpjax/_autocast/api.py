"""`autocast` and `full_precision`: from a Python function to a plan, and back to its results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._autocast.arguments import parameters, stateful
from mpjax._autocast.arrange.plan import Plan
from mpjax._autocast.decide import read_flags
from mpjax._autocast.decide.decided import Settings, initial_state
from mpjax._autocast.decorator import Decorator, refuses_torch
from mpjax._autocast.eight_bits import delayed, quantized
from mpjax._autocast.known import scopes, updated
from mpjax._autocast.planning import plan_alike
from mpjax._autocast.product import precision
from mpjax._autocast.run.interpreter import Interpreter
from mpjax._autocast.tracing import Traced, name_of, trace
from mpjax._autocast.unused import stored_paths, warn_of_rules
from mpjax._base.dtypes import describe
from mpjax._base.errors import message, warn
from mpjax._base.foreign_keywords import AUTOCAST
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import KnownPolicy
from mpjax._base.typing import PolicySpec as Spec
from mpjax._base.uncalled import SaysToCall
from mpjax._jaxpr.op_rules import parse_rules
from mpjax._policies.of_step import warn_of_other_step
from mpjax._policies.parts import policies_in
from mpjax._policies.policy import chosen_policy, default, get_policy

F = TypeVar("F", bound=Callable[..., Any])
Rules = str | Mapping[str, str] | None


@overload
def autocast(
    fun: F, policy: Spec = ..., *, rules: Rules = ..., dot_precision: Any = ..., params: Any = ...
) -> F: ...
@overload
def autocast(
    fun: KnownPolicy | str | scopes.Policies | None = ...,
    *,
    rules: Rules = ...,
    dot_precision: Any = ...,
    params: Any = ...,
) -> Callable[[F], F]: ...
@refuses_torch
@names_keywords(AUTOCAST, behind="(params, batch)")
def autocast(
    fun: Any = None,
    policy: Any = None,
    *,
    rules: Rules = None,
    dot_precision: Any = None,
    params: Any = None,
) -> Any:
    """Returns a function that computes the same as `fun`, with its products in low precision.

    Products read operands in `policy.compute_dtype` and accumulate in float32. Operations that
    rounding or range would hurt stay in float32. Parameters and gradients are float32.

    Args:
      fun: any function of arrays; also a decorator, `@autocast("bf16-mixed")`.
      policy: a policy, its name, or a `PolicyMap` over module paths. None for that of
        `default_policy`; where none is set, autocast changes nothing, and warns.
      rules: another class for some operations or activations, `{"tanh": "full", "silu": "full"}`,
        or "widest": a float32 operand wins over a low one, as in PyTorch.
      dot_precision: the algorithm of every product that leaves it at the default: "tf32",
        "bf16x3", a `jax.lax.Precision` or a `jax.lax.DotAlgorithmPreset`.
      params: for a `QuantizedPolicy`, the arguments that hold parameters, by position or name; by
        default the Flax NNX and Equinox modules among them, or else the first.

    Returns:
      A function with the signature of `fun`.

    Raises:
      ValueError: unknown policy, rule or algorithm.
      TypeError: a result of `fun` is not an array.

    Warns:
      PolicyWarning: neither a policy nor a default is set; a rule of a `PolicyMap` matches nothing
        in `fun`, or comes too late; `rules=` names an activation that `fun` does not call; or a
        `QuantizedPolicy` finds no product.
      SupportWarning: float16 products are compiled for a TPU.

    Dtypes:
      As `fun`, floating results in `policy.output_dtype`, but for an argument that `fun` hands
      back, updated or not: a decoder's cache keeps its dtype. Integers, float64, complex, 8-bit
      and explicitly cast values are computed as they are written.

    Transforms:
      All of JAX's, of it and inside it. Functions with custom derivatives keep their rules.

    Example:
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
      >>> fast = mpjax.autocast(loss, "bf16-mixed")
      >>> jax.grad(fast)(jnp.ones((4, 2)), jnp.ones((8, 4))).dtype
      dtype('float32')

    References:
      Micikevicius et al., Mixed Precision Training, 2018, https://arxiv.org/abs/1710.03740
    """
    overrides, widest = parse_rules(rules)
    algorithm = precision.named(dot_precision)
    ordered = tuple(sorted(overrides.items()))
    named = parameters.checked(params, "autocast")
    if not callable(fun) or (isinstance(fun, type) and hasattr(fun, "dtype")):  # jnp.bfloat16
        given = _given(fun, policy)
        return Decorator(
            lambda f: autocast(
                _function(f), given, rules=rules, dot_precision=dot_precision, params=params
            ),
            given,
        )
    if policy is not None:  # a wrong policy is refused here; the default is read at each call
        policy = chosen_policy(policy, "autocast")

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        chosen = get_policy(policy)
        _check_place(chosen, fun)
        warn_of_other_step(chosen, f"autocast({name_of(fun)})")
        settings = Settings(
            chosen, overrides=ordered, widest=widest, dot_precision=algorithm, params=named
        )
        _check_algorithm(chosen, algorithm)
        if not _lowers(chosen) and algorithm is None:
            if policy is None and default.value is None:
                _warn_of_no_policy(name_of(fun))
            with jax.named_scope(scopes.AS_WRITTEN):  # an outer autocast leaves this scope alone
                full = stateful.call_in_full(fun, args, kwargs, f"autocast({name_of(fun)})")
                return chosen.cast_to_output(full)
        return call(fun, args, kwargs, settings, casts=True)

    return wrapped


def _check_place(policy: scopes.Policies, fun: Any) -> None:
    """Refuses a recipe with amax histories, which a plain function has no place for."""
    if delayed.has_history(policy):
        got = f"{policy} scales by amax histories, which have no place in a function of its own."
        allowed = "Allowed: make_train_step(loss_fn, tx, policy), whose state keeps them."
        fix = f"In a step of your own: fast = mpjax.with_amax_history({name_of(fun)}, policy)."
        raise ValueError(message(f"autocast({name_of(fun)})", got, allowed, fix))


def _warn_of_no_policy(name: str) -> None:
    got = "no policy was given, and no default is set: the function is computed as it is written."
    where = 'or `with mpjax.default_policy("bf16-mixed"):` above its call.'
    fix = f'Type autocast(fun, "bf16-mixed"), {where} If float32 is meant, type "float32".'
    warn(message(f"autocast({name})", got, fix))


def _given(first: Any, policy: Any) -> Any:
    """Returns the policy of `autocast(policy)`, which makes a decorator."""
    if callable(policy):
        raise TypeError(
            message(
                "autocast",
                f"got {first!r} as the function and a function as the policy.",
                "Allowed: autocast(fun, policy), or @autocast(policy).",
                f"Type autocast(fun, {first!r}).",
            )
        )
    if policy is not None and first is not None:
        raise TypeError(
            message(
                "autocast",
                f"got {_shown(first)} where a function is decorated.",
                "Allowed: a function, or an object that can be called, such as a module.",
                f"Type autocast(fun, {policy!r})(*args): the function, and not what it returned.",
            )
        )
    chosen = first if policy is None else policy
    return None if chosen is None else chosen_policy(chosen, "autocast")


def _shown(x: Any) -> str:
    return describe(x) if hasattr(x, "dtype") else repr(x)


def _function(fun: Any) -> Any:
    if callable(fun):
        return fun
    raise TypeError(
        message(
            "autocast",
            f"got {fun!r} where a function is decorated.",
            "Allowed: a function, or an object that can be called, such as a module.",
            'Type autocast(fun, "bf16-mixed").',
        )
    )


def as_settings(policy: scopes.Policies) -> Settings:
    """Returns the settings of `as_typed`."""
    return Settings(policy)


def as_typed(fun: Callable[..., Any], policy: scopes.Policies) -> Callable[..., Any]:
    """Returns `fun` under autocast, its results in the dtypes that `fun` itself gives them."""
    settings = as_settings(policy)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        tracked = args[0] if args and isinstance(args[0], delayed.Tracked) else None
        if tracked is not None:
            args = (tracked.params, *args[1:])
        return call(fun, args, kwargs, settings, tracked, stored_paths(policy, args))

    return wrapped


def call(
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    settings: Settings,
    tracked: delayed.Tracked | None = None,
    stored: list[str] | None = None,
    *,
    casts: bool = False,
) -> Any:
    """Returns `fun(*args, **kwargs)` under `settings`.

    Args:
      fun, args, kwargs: the function and its arguments.
      settings: the user's options.
      tracked: amaxes of earlier steps, for a recipe with a history.
      stored: paths of parameters; a rule that matches one of them is not reported as unused.
      casts: whether to return the policy's `output_dtype`, where `fun` does not hand an argument
        back, as a decoder's cache.
    """
    if stateful.is_initializing(stateful.linen_modules(fun, (args, kwargs))):
        result = fun(*args, **kwargs)
        return settings.policy.cast_to_output(result) if casts else result
    traced, plan = planned(fun, args, kwargs, settings, widens=casts)
    quantized.warn_if_nothing(plan)
    warn_of_rules(plan.settings, traced.jaxpr, stored or [])
    runner = Interpreter()
    if tracked is not None:
        runner = runner.recording(tracked.for_plan(plan))
    with jax.named_scope(scopes.AS_WRITTEN):
        outs = runner.run(plan, traced.arrays)
    typed = [_typed_like(v.aval, x) for v, x in zip(traced.jaxpr.jaxpr.outvars, outs, strict=True)]
    result, changed = jax.tree.unflatten(traced.out_tree, typed)
    for place, leaves in zip(traced.changed, changed, strict=True):
        stateful.write_back(stateful.modules(traced.given)[place], leaves)
    return _cast_to_output(result, traced, settings.policy) if casts else result


def _cast_to_output(result: Any, traced: Traced, policy: scopes.Policies) -> Any:
    """Returns results in the output dtype, but for arguments that the function hands back."""
    keeps = updated.keeps_dtype(traced.jaxpr)
    made = policy.cast_to_output(result)
    if not any(keeps):
        return made
    of_results, _ = jax.tree.unflatten(traced.out_tree, keeps)
    return jax.tree.map(lambda keep, own, cast: own if keep else cast, of_results, result, made)


def planned(
    fun: Callable[..., Any], args: Any, kwargs: Any, settings: Settings, *, widens: bool = True
) -> tuple[Traced, Plan]:
    """Returns a function's jaxpr and its plan.

    Args:
      fun, args, kwargs: the function and its arguments.
      settings: the user's options.
      widens: whether to widen parameters in 16 bits, where `fun` does not do so itself.
    """
    fun, owner = stateful.with_owner(fun)
    if quantized.quantizes(settings.policy) and not owner:
        fun, owner = parameters.with_owner(fun)
    args, kwargs = quantized.widened(((*owner, *args), kwargs), settings.policy)
    settings = replace(settings, float32_precision=precision.default())
    with precision.left_open(settings.float32_precision):
        widened = _widened(fun, args, kwargs, settings) if widens else frozenset[int]()
        traced = trace(fun, args, kwargs, widened)

    def paths() -> list[str | None]:
        all_paths = parameters.paths(fun, args, kwargs, settings.params)
        return [all_paths[i] for i in traced.places]

    jaxpr = traced.jaxpr
    settings = quantized.prepared(jaxpr.jaxpr, settings, paths)
    in_states = tuple(initial_state(v.aval) for v in jaxpr.jaxpr.invars)
    out_reads = (read_flags.OUTPUT,) * len(jaxpr.jaxpr.outvars)
    return traced, plan_alike(jaxpr, in_states, out_reads, settings)


def _widened(fun: Callable[..., Any], args: Any, kwargs: Any, settings: Settings) -> frozenset[int]:
    """Returns the places of parameters that are read in float32: of those in 16 bits no cache."""
    narrow = parameters.held_in_16_bits(fun, args, kwargs, settings)
    if not narrow:
        return narrow
    with jax.numpy_dtype_promotion("standard"):  # they may meet a float32 input
        traced = trace(fun, args, kwargs)
    return narrow - {traced.places[i] for i in updated.updates(traced.jaxpr)}


def _typed_like(aval: Any, array: Any) -> Any:
    """Returns a result with the weak type that it has in `fun` itself."""
    if not isinstance(array, jax.Array):  # a literal
        array = jnp.asarray(array, aval.dtype)
    if not getattr(aval, "weak_type", False) or jax.typeof(array).weak_type:
        return array
    return lax.convert_element_type_p.bind(
        array, new_dtype=aval.dtype, weak_type=True, sharding=None
    )


def _lowers(policy: scopes.Policies) -> bool:
    least = jnp.dtype(jnp.float32).itemsize
    low = any(p.compute_dtype.itemsize < least for p in policies_in(policy))
    return low or quantized.quantizes(policy)


_LOW_ALGORITHMS = frozenset({"DEFAULT", "BF16_BF16_F32", "F16_F16_F32"})


def _check_algorithm(policy: scopes.Policies, algorithm: Any) -> None:
    """Refuses an algorithm that splits float32 operands where a policy makes them low."""
    if not isinstance(algorithm, lax.DotAlgorithmPreset) or algorithm.name in _LOW_ALGORITHMS:
        return
    if _lowers(policy):
        raise ValueError(
            message(
                "autocast(dot_precision=)",
                f"{algorithm.name} reads float32 operands, and the policy {policy} has low ones.",
                "Allowed with a low compute dtype: a jax.lax.Precision, or the dtype's own preset.",
                'Type autocast(fun, "float32", dot_precision=...) to keep arrays in float32.',
            )
        )


class full_precision(contextlib.ContextDecorator, metaclass=SaysToCall):
    """A region in which autocast changes nothing: everything inside runs in float32.

    It is a context manager and a decorator. Outside autocast it does nothing. An autocast function
    that is called inside keeps its own policy: call the function that it was made of.

    Dtypes:
      Low values that enter the region are widened, exactly.

    Transforms:
      All: the region marks its operations, so it survives `jit`'s caches and differentiation.

    Example:
      >>> @mpjax.autocast("bf16-mixed")
      ... def fun(w, x):
      ...     with mpjax.full_precision():
      ...         return x @ w
      >>> float(fun(jnp.ones((1, 1)), jnp.full((1, 1), 1.001)).item()) > 1.0
      True
    """

    _call = "full_precision()"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            got = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
            fix = "Type @full_precision() with parentheses, or full_precision()(fun)."
            raise TypeError(
                message(
                    "full_precision",
                    f"takes no arguments; got {', '.join(got)}.",
                    "Allowed: `with full_precision():`, or as a decorator.",
                    *([] if kwargs else [fix]),
                    *(["Leave the block out where it is to be off."] if kwargs else []),
                )
            )

    def __enter__(self) -> None:
        self._scopes = getattr(self, "_scopes", [])
        scope = jax.named_scope(scopes.AS_WRITTEN)
        scope.__enter__()
        self._scopes.append(scope)

    def __exit__(self, *exc: Any) -> None:
        self._scopes.pop().__exit__(*exc)
