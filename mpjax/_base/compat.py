"""The seams between versions of JAX, and the detours that public JAX needs."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend import linear_util
from jax.interpreters import mlir

QUOTIENTS_ARE_FUSED = jax.__version_info__ >= (0, 10, 2)
"""Whether XLA:CPU repeats a quotient in each fusion that reads it, as it repeats a product."""


def axis_names(axis_name: Any) -> tuple[object, ...]:
    """Returns the axis names of a collective's `axis_name` argument, `()` for None."""
    if axis_name is None:
        return ()
    if isinstance(axis_name, (tuple, list)):
        return tuple(axis_name)
    return (axis_name,)


def varying_axes(x: jax.Array) -> frozenset[object]:
    """Returns the mesh axes over which `x` is typed as varying, inside `shard_map`."""
    return axes_of_type(jax.typeof(x))


def axes_of_type(aval: Any) -> frozenset[object]:
    """Returns the mesh axes over which values of a type vary; what is no array has none."""
    known = aval.manual_axis_type if hasattr(aval, "dtype") else None  # None: of a shape alone
    return frozenset() if known is None else frozenset(known.varying)


def tracks_varying(name: object) -> bool:
    """Whether `name` is an axis of a `shard_map` that types values as varying (`check_vma`).

    Only an axis index tells: under `check_vma=False`, `pmap` and `vmap` it varies in fact but
    not in its type, and casting a value to varying is an error under `vmap`.
    """
    return name in varying_axes(jax.lax.axis_index(name))


def to_varying(x: jax.Array, axis_name: Any) -> jax.Array:
    """Returns `x`, typed as varying over those of the axes for which types are tracked."""
    have = varying_axes(x)
    missing = tuple(n for n in axis_names(axis_name) if n not in have and tracks_varying(n))
    # `pcast` raises on an axis that varies already, so that only the missing ones are named.
    return jax.lax.pcast(x, missing, to="varying") if missing else x


# -- seams of `_autocast`: jaxprs, and types that carry shardings or varying axes --------------


_LITERAL = jax.extend.core.Literal


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a literal rather than a variable."""
    return type(atom) is _LITERAL  # it has no subclasses; `isinstance` takes twice as long


def closed(jaxpr: Any) -> Any:
    """Returns a closed jaxpr: JAX 0.12 has one class for both, and `remat2` holds an open one."""
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return jax.extend.core.ClosedJaxpr(jaxpr, ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and carries of a `scan` equation (JAX 0.12 holds trees)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def manual_axes(params: dict[str, Any]) -> set[Any]:
    """Returns the mesh axes that a `shard_map` equation makes manual."""
    return set(params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"])


def is_batched(dim: Any) -> bool:
    """Whether a batching rule's dimension is that of a batched operand."""
    return isinstance(dim, int)


def batch_size(args: Sequence[Any], dims: Sequence[Any]) -> int:
    """Returns the number of examples that a batching rule maps over."""
    return next(x.shape[d] for x, d in zip(args, dims, strict=True) if is_batched(d))


def all_batched(args: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Returns the operands of a batching rule, examples first; unbatched ones are repeated."""
    size = batch_size(args, dims)
    return [
        jnp.moveaxis(x, d, 0) if is_batched(d) else jnp.broadcast_to(x, (size, *x.shape))
        for x, d in zip(args, dims, strict=True)
    ]


def explicit_sharding(aval: Any) -> Any:
    """Returns the sharding in a type where the user's mesh is explicit, else None."""
    sharding = getattr(aval, "sharding", None)
    spec = getattr(sharding, "spec", None) or ()
    placed = any(axes is not None for axes in partitions(aval))
    return sharding if placed or _sums_later(spec) else None


def sharding_on_a_mesh(aval: Any) -> Any:
    """Returns the sharding in a type where the user's mesh is explicit, split or not, else None.

    Without `jax.set_mesh` a type's own mesh is the only one that JAX knows.
    """
    sharding = getattr(aval, "sharding", None)
    axes = getattr(getattr(sharding, "mesh", None), "axis_types", None) or ()
    return sharding if jax.sharding.AxisType.Explicit in axes else explicit_sharding(aval)


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns zeros of a shape, dtype and sharding.

    JAX's own leave a sharding that splits no axis out of the type, and with it the mesh.
    """
    made = jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding)
    known = like.sharding is None or jax.typeof(made).sharding == like.sharding
    return made if known else jax.sharding.reshard(made, like.sharding)


def partitions(aval: Any) -> tuple[Any, ...]:
    """Returns the mesh axes of each dimension in a type, None where it is not split over any."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None) or ()
    return tuple(getattr(spec, "partitions", spec))  # JAX 0.12 iterates over no spec with sums


_WHOLE = jax.sharding.PartitionSpec()


def unplaced(fun: Callable[..., Any], *arrays: Any, out: Any = _WHOLE) -> Any:
    """Returns `fun(*arrays)`, with shardings inside chosen by XLA and not by types.

    Args:
      fun: a function of arrays.
      arrays: its arguments.
      out: the `PartitionSpec` of each result; without it a few numbers, on every device.
    """
    types = [jax.typeof(x) for x in arrays]
    placed = [aval.sharding.mesh for aval in types if explicit_sharding(aval) is not None]
    if not placed:
        return fun(*arrays)
    if jax.sharding.get_abstract_mesh().empty:  # nobody set one: the types tell it
        with jax.sharding.use_abstract_mesh(placed[0]):
            return unplaced(fun, *arrays, out=out)
    whole = [
        jax.sharding.reshard(x, jax.sharding.PartitionSpec(*partitions(aval)))
        if _sums_later(aval.sharding.spec)
        else x
        for x, aval in zip(arrays, types, strict=True)
    ]
    measured: Any = jax.sharding.auto_axes(fun, out_sharding=out)
    return measured(*whole)


def _sums_later(spec: Any) -> frozenset[Any]:
    """Returns the mesh axes over which a value, or its cotangent, is a sum yet to be taken."""
    return getattr(spec, "unreduced", frozenset()) | getattr(spec, "reduced", frozenset())


def like_varying(aval: Any, other: Any) -> Any:
    """Returns `aval` on the mesh of `other`, varying over the axes over which `other` does."""
    mesh = other.sharding.mesh
    if aval.sharding.mesh != mesh and explicit_sharding(aval) is None:
        spec = jax.sharding.PartitionSpec(*[None] * len(aval.shape))
        aval = aval.update(sharding=jax.sharding.NamedSharding(mesh, spec))
    return aval.update_manual_axis_type(other.manual_axis_type)


def equally_varying(*xs: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays, each typed as varying over every axis over which one of them does."""
    have = [varying_axes(x) for x in xs]
    union = frozenset[object]().union(*have)
    return tuple(
        jax.lax.pcast(x, tuple(union - mine), to="varying") if union - mine else x
        for x, mine in zip(xs, have, strict=True)
    )


_SCATTERS = {
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}


def bind(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the results of an equation's primitive for other operands."""
    scatter = _SCATTERS.get(primitive.name)
    if scatter and params["update_jaxpr"].invars[0].aval.dtype != values[0].dtype:
        # Its parameters hold the update (as add) as a jaxpr of scalars, in the dtype of the trace.
        names = "dimension_numbers", "indices_are_sorted", "unique_indices", "mode"
        return scatter(*values, **{name: params[name] for name in names})
    return primitive.bind(*values, **primitive.get_bind_params(params))


def bind_custom(
    eqn: Any,
    values: Sequence[Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    function: Callable[..., Any] | None = None,
) -> Any:
    """Binds a function with custom rules, the function and each of its rules passed to `wrap`.

    `function` takes the place of the function itself, if it is given.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    made = [wrap(fun.call_wrapped) for fun in params["subfuns"]]
    if function is not None:
        made[0] = function
    params["subfuns"] = tuple(
        linear_util.wrap_init(new, debug_info=old.debug_info)
        for new, old in zip(made, params["subfuns"], strict=True)
    )
    return eqn.primitive.bind(*values, **params)


def jit_options(params: dict[str, Any], extra: Sequence[int]) -> dict[str, Any]:
    """Returns the options that make `jax.jit` give an equation's parameters again.

    Args:
      params: of the equation.
      extra: the inputs of which a second copy follows the inputs; it is placed as they are.
    """
    options: dict[str, Any] = {"keep_unused": params["keep_unused"]}
    # The default, False or in JAX 0.12 AUTO, is left out.
    if getattr(params["inline"], "name", params["inline"]) not in (False, "AUTO"):
        options["inline"] = params["inline"]
    donated = tuple(i for i, is_donated in enumerate(params["donated_invars"]) if is_donated)
    if donated:
        options["donate_argnums"] = donated
    ins, outs = params["in_shardings"], params["out_shardings"]
    if any(map(_specified, ins)):
        options["in_shardings"] = tuple(map(_sharding, (*ins, *(ins[i] for i in extra))))
    if any(map(_specified, outs)):
        options["out_shardings"] = list(map(_sharding, outs))
    if params["compiler_options_kvs"]:
        options["compiler_options"] = dict(params["compiler_options_kvs"])
    return options


def inlined(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun` as a function that JAX traces and differentiates once, and inlines into traces.

    JAX 0.12 has a word for the time of inlining; True means a later one there, at lowering.
    """
    early = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
    return jax.jit(fun, inline=early)


def variables(eqn: Any) -> list[Any]:
    """Returns the operands of an equation that are no literals."""
    return [v for v in eqn.invars if type(v) is not _LITERAL]


def hashable_jit_params(params: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the parameters in which two `jit` equations of one jaxpr can differ, as a key."""
    names = ("name", "donated_invars", "in_shardings", "out_shardings", "inline", "keep_unused")
    return tuple(params[name] for name in names)


def _specified(sharding: Any) -> bool:
    return type(sharding).__name__ != "UnspecifiedValue"


def _sharding(sharding: Any) -> Any:
    return sharding if _specified(sharding) else None


def programs(eqn: Any) -> list[Any]:
    """Returns the open jaxprs among an equation's parameters."""
    jaxprs: list[Any] = []
    for param in eqn.params.values():
        inside = param if isinstance(param, (tuple, list)) else (param,)
        jaxprs += [closed(inner).jaxpr for inner in inside if _is_program(inner)]
    return jaxprs


def map_programs(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns parameters with each of the open jaxprs in them changed."""

    def changed(param: Any) -> Any:
        if isinstance(param, (tuple, list)):
            if not any(map(_is_program, param)):
                return param
            return _like(param, list(map(changed, param)))
        if not _is_program(param):
            return param
        inner = closed(param).jaxpr
        new = change(inner)
        return new if inner is param else param.replace(jaxpr=new)

    return {name: changed(param) for name, param in params.items()}


def _like(old: Any, new: list[Any]) -> Any:
    is_named = hasattr(old, "_fields")
    return type(old)(*new) if is_named else type(old)(new)


def _is_program(param: Any) -> bool:
    return isinstance(param, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and of those inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in programs(eqn):
            yield from equations(inner)


def cpu_as_accelerator() -> dict[str, Any]:
    """Returns compiler options with which XLA:CPU sends 16-bit values as accelerators do.

    Without them XLA:CPU widens such values. They are for programs that are read and not run. Before
    JAX 0.12 its code generator needs the widening, and `mpjax.pods` recognises it instead.
    """
    if jax.__version_info__ < (0, 12):
        return {}
    return {"xla_disable_hlo_passes": "float-normalization-bf16"}


def layouts_can_be_asked_for(ctx: Any) -> bool:
    """Whether a lowering rule may constrain a layout.

    An exported program may not hold such a constraint, and before JAX 0.12 XLA gathers all of a
    sharded array that has one.
    """
    if ctx.module_context.lowering_parameters.for_export:
        return False
    return _runs_on_one_device(ctx) or jax.__version_info__ >= (0, 12)


def lower_program(ctx: Any, program: Any, *args: Any) -> Any:
    """Lowers a program in place, as `mlir.lower_fun` would the function that it was traced from."""
    module = ctx.module_context
    if ctx.platforms is not None:
        module = module.replace(platforms=ctx.platforms)
    outs, _ = mlir.jaxpr_subcomp(
        module,
        program.jaxpr,
        ctx.name_stack,
        ctx.tokens_in,
        (),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=None,
    )
    return outs


def cpu_may_multiply_low(ctx: Any) -> bool:
    """Whether XLA:CPU compiles products of bfloat16 operands, in loops over several devices too."""
    module = ctx.module_context
    known = jax.__version_info__ >= (0, 12) or module.lowering_parameters.for_export
    return known or _runs_on_one_device(ctx)


def _runs_on_one_device(ctx: Any) -> bool:
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


CHECKPOINTS_REFUSE_SUMS = jax.__version_info__ < (0, 12)
"""Whether JAX cannot transpose a checkpointed function that returns unreduced sums."""


def is_sum_yet_to_be_taken(aval: Any) -> bool:
    """Whether a type is unreduced: the value is the sum of the devices' arrays."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None)
    return bool(getattr(spec, "unreduced", None))


def is_for_one_device(ctx: Any) -> bool:
    """Whether a lowering rule's code runs on one device, and is not split over several by XLA.

    True in a program for one device, and inside a `shard_map` over all axes of its mesh.
    """
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):
        return context.num_devices == 1
    mesh = getattr(context, "mesh", None)
    manual = getattr(context, "manual_axes", ())
    return mesh is None or all(n == 1 for axis, n in mesh.shape.items() if axis not in manual)


def devices_shared_by(aval: Any) -> int:
    """Returns the number of devices over which XLA splits a value, as far as its type tells.

    Inside a `shard_map` the axes that are not mapped count. The type tells for an array that was
    placed, or traced inside `jax.set_mesh`, and not for one that `jit` places later.
    """
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return 1
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(n for n, kind in axes if kind != jax.sharding.AxisType.Manual)


def has_values(x: Any) -> bool:
    """Whether an array holds numbers, and is no tracer, which stands for those of a later run."""
    return not isinstance(x, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]
