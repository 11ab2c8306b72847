"""Sharded weights to compute with: gathered in the compute dtype, gradients reduced in float32."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._base import compat
from mpjax._base.averaged import averaging, step_without
from mpjax._base.dtypes import FLOAT32, DType
from mpjax._base.errors import message
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import check_axes, is_array, is_castable, map_with_path
from mpjax._base.typing import Array, AxisName, PolicySpec
from mpjax._policies.policy import get_policy

T = TypeVar("T")
Reduction: TypeAlias = Literal["sum", "mean"]
Split: TypeAlias = tuple[tuple[int, tuple[str, ...]], ...]  # array axis, and the mesh axes there


@names_keywords()
def gather(
    tree: T,
    specs: Any,
    policy: PolicySpec = None,
    *,
    axis_name: AxisName,
    reduce: Reduction = "sum",
) -> T:
    """Returns sharded parameters whole, in the compute dtype; inside `shard_map`.

    Each leaf is cast while it is a shard and then gathered, so that the network carries 16 bits. In
    the backward pass its gradient is cast to float32 before it is summed over the devices and
    scattered: a sum of n 16-bit numbers would round n - 1 times. Under `jax.checkpoint` the
    backward pass gathers again, and only the shard is stored.

    Args:
      tree: the shards that this device holds.
      specs: a `PartitionSpec` for each leaf, or for each subtree, as in `shard_map`'s `in_specs`.
        Inside `scan` over stacked layers, without the entry of the stacked axis.
      policy: what `get_policy` takes, a `PolicyMap` included; None for the scoped default.
      axis_name: the mesh axis, or axes, over which the batch is split. Leaves are gathered along
        these; their gradients are reduced over all of them, which sums those of a replicated leaf.
        Other axes of a spec (tensor parallelism) stay split.
      reduce: 'sum' for the derivative of the sum of all devices' losses, JAX's own convention;
        'mean' for that of their mean. With `check_vma`, JAX's default, 'sum' is also for a loss
        that `jax.lax.pmean` has averaged already.

    Returns:
      A tree like `tree`. Integers and PRNG keys are gathered as they are.

    Raises:
      ValueError: a spec has more entries than its leaf has axes, or `reduce` is neither word; or a
        step, or `value_and_grad`, will average gradients over one of the axes.
      NameError: `axis_name` is no axis of the surrounding `shard_map`.

    Dtypes:
      Leaves in `compute_dtype`; their gradients in the leaves' own dtype, summed in float32 at
      least.

    Transforms:
      shard_map (`check_vma` on and off), jit, grad, scan, remat, autocast.

    Example:
      >>> mesh = mpjax.pods.get_topology("cpu:1").make_mesh({"fsdp": 1})
      >>> spec = jax.sharding.PartitionSpec("fsdp")
      >>> def loss(w, x):
      ...     return jnp.mean(x @ mpjax.pods.gather(w, spec, "bf16-mixed", axis_name="fsdp"))
      >>> def local_grad(w, x):
      ...     return jax.grad(loss)(w, x)
      >>> mapped = jax.shard_map(local_grad, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
      >>> mapped(jnp.ones((4, 2)), jnp.ones((8, 4), jnp.bfloat16)).dtype
      dtype('float32')

    References:
      Zhao et al., PyTorch FSDP, 2023, https://arxiv.org/abs/2304.11277 (mixed precision)
    """
    check_axes(axis_name, "gather")
    if reduce not in ("sum", "mean"):
        raise ValueError(message("gather(reduce)", f"got {reduce!r}.", "Type 'sum' or 'mean'."))
    axes = tuple(str(axis) for axis in compat.axis_names(axis_name))
    _check_not_averaged_again(axes)

    def apply(path: Any, x: Any, spec: PartitionSpec, low: Any) -> Any:
        if not is_array(x):
            return x
        split = _split(path, x, spec, axes)
        if not is_castable(x):
            return _gathered(x, split)
        return _gather_leaf(x, split, axes, jnp.dtype(low.dtype), reduce)

    return map_with_path(apply, tree, broadcast_specs(specs, tree), _computed(policy, tree))


def _check_not_averaged_again(axes: tuple[str, ...]) -> None:
    """Refuses what would mix the gradients of different shards."""
    averaged, where = averaging()
    twice = [axis for axis in axes if axis in averaged]
    if not twice:
        return
    got = f"it reduces gradients over {twice[0]!r}, and {where}(axis_name={twice[0]!r}) averages "
    got += "what it returns once more, although each device holds another part of the weights."
    raise ValueError(message("gather(axis_name)", got, step_without(twice[0])))


@names_keywords()
def gather_constraint(tree: T, shardings: Any, policy: PolicySpec = None) -> T:
    """Returns sharded parameters whole, rounded to the compute dtype; under `jit` with shardings.

    It does under `jit` what `gather` does inside `shard_map`. XLA chooses what is sent under `jit`;
    two constraints make it send 16 bits: the cast value first gets the shard's own sharding, and
    then it is replicated. Values come back in their own dtype. `autocast` then reads them in the
    compute dtype without another rounding, and returns weight gradients in float32, which are
    reduced in float32.

    Args:
      tree: parameters in a function that `jit` compiles.
      shardings: the `NamedSharding` in which each leaf, or subtree, is stored.
      policy: what `get_policy` takes; None for the scoped default.

    Returns:
      A tree like `tree`.

    Raises:
      TypeError: something among `shardings` is no `NamedSharding`.

    Dtypes:
      Unchanged; values are rounded to `compute_dtype`. Gradients pass as they are, sharded like the
      leaf.

    Transforms:
      jit, grad, scan, remat, autocast.

    Example:
      >>> mesh = mpjax.pods.get_topology("cpu:1").make_mesh({"fsdp": 1})
      >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
      >>> w = jax.jit(lambda w: mpjax.pods.gather_constraint(w, sharding, "bf16-mixed"))(
      ...     jnp.full(2, 1.001)
      ... )
      >>> w.dtype, float(w[0])
      (dtype('float32'), 1.0)
    """

    def apply(_: Any, x: Any, sharding: Any, low: Any) -> Any:
        if not isinstance(sharding, NamedSharding):
            got = f"must be jax.sharding.NamedShardings; got {type(sharding).__name__}."
            fix = "Type NamedSharding(mesh, PartitionSpec('fsdp'))."
            raise TypeError(message("gather_constraint(shardings)", got, fix))
        return _constrain_leaf(x, sharding, jnp.dtype(low.dtype)) if is_castable(x) else x

    return map_with_path(apply, tree, broadcast_specs(shardings, tree), _computed(policy, tree))


def broadcast_specs(specs: Any, tree: Any) -> Any:
    """Returns a tree like `tree` of the specs, or shardings, of its leaves."""
    is_leaf = lambda x: isinstance(x, (PartitionSpec, NamedSharding))  # noqa: E731
    return jax.tree.map(
        lambda spec, subtree: jax.tree.map(lambda _: spec, subtree), specs, tree, is_leaf=is_leaf
    )


def _computed(policy: Any, tree: Any) -> Any:
    """Returns specs of the leaves in the dtypes that they are computed with, by path."""
    return get_policy(policy).cast_to_compute(jax.eval_shape(lambda x: x, tree))


# -- shard_map -------------------------------------------------------------------------------------


def _split(path: Any, x: Any, spec: PartitionSpec, axes: tuple[str, ...]) -> Split:
    """Returns the axes of a leaf to gather, each with its axes of the mesh."""
    if not isinstance(spec, PartitionSpec):
        got = f"must be jax.sharding.PartitionSpecs; got {type(spec).__name__}."
        raise TypeError(message("gather(specs)", got, "Type PartitionSpec('fsdp')."))
    if len(spec) > x.ndim:
        where = f"gather at {jax.tree_util.keystr(path, simple=True, separator='/')!r}"
        got = f"{spec} has more entries than {x.dtype.name}{list(x.shape)} has axes."
        fix = "Inside scan leave the stacked axis out: PartitionSpec(*spec[1:])."
        raise ValueError(message(where, got, fix))
    splits: list[tuple[int, tuple[str, ...]]] = []
    for axis, entry in enumerate(spec):
        names = entry if isinstance(entry, tuple) else (entry,)
        chosen = tuple(name for name in names if name in axes)
        if chosen:
            splits.append((axis, chosen))
    return tuple(splits)


def _gathered(x: Array, split: Split) -> Array:
    for axis, names in split:
        x = jax.lax.all_gather(x, names, axis=axis, tiled=True)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather_leaf(
    x: Array, split: Split, axes: tuple[str, ...], low: DType, reduce: Reduction
) -> Array:
    # Typed as varying over all of them, so that under check_vma the cotangent, which varies, has
    # the same type.
    return _gathered(compat.to_varying(x.astype(low), axes), split)


def _gather_fwd(
    x: Array, split: Split, axes: tuple[str, ...], low: DType, reduce: Reduction
) -> tuple[Array, Array]:
    # An empty array carries the dtype: a dtype cannot be a residual of a custom_vjp.
    return _gather_leaf(x, split, axes, low, reduce), jnp.zeros((0,), x.dtype)


def _gather_bwd(
    split: Split,
    axes: tuple[str, ...],
    low: DType,
    reduce: Reduction,
    like: Array,
    grads: Array,
) -> tuple[Array]:
    grads = grads.astype(jnp.promote_types(like.dtype, FLOAT32))
    scattered = {name for _, names in split for name in names}
    rest = tuple(axis for axis in axes if axis not in scattered)
    for axis, names in reversed(split):
        grads = jax.lax.psum_scatter(grads, names, scatter_dimension=axis, tiled=True)
    if rest:
        grads = jax.lax.psum(grads, rest)
    if reduce == "mean":
        grads = grads / jax.lax.axis_size(axes)
    return (grads.astype(like.dtype),)


_gather_leaf.defvjp(_gather_fwd, _gather_bwd)


# -- jit -------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _constrain_leaf(x: Array, sharding: NamedSharding, low: DType) -> Array:
    shard = jax.lax.with_sharding_constraint(x.astype(low), sharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(shard, whole).astype(x.dtype)


def _constrain_fwd(x: Array, sharding: NamedSharding, low: DType) -> tuple[Array, None]:
    return _constrain_leaf(x, sharding, low), None


def _constrain_bwd(sharding: NamedSharding, low: DType, _: None, grads: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(grads, sharding),)


_constrain_leaf.defvjp(_constrain_fwd, _constrain_bwd)
