"""Products as programs that are linear in each of two arrays, with their transposed forms.

A product reads operands in the dtypes of its direction (`config`), and so do the products of its
gradient. Their programs come from tracing JAX's own derivative and `jax.vmap` of the float32
product, so that convolutions need no formulas here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from mpjax._autocast import speed
from mpjax._autocast.known import traits
from mpjax._autocast.product import (
    backends,
    blocks,
    config,
    convolutions,
    scaled,
)
from mpjax._autocast.product.config import Config, Direction, Roles, Scaling
from mpjax._base import compat
from mpjax._base.dtypes import FLOAT32
from mpjax._jaxpr import axes as axes_of
from mpjax._jaxpr import binding
from mpjax._jaxpr.axes import Axes
from mpjax._jaxpr.equation import Eqn
from mpjax._jaxpr.op_rules import PRODUCTS


@dataclass(frozen=True, eq=False, repr=False)
class Bilinear:
    """A float32 program of two arrays (and integer extras) that is linear in each.

    Compared by identity: the caches below return the same object for the same product, so that
    `jit` does not trace it again.
    """

    traced: Any
    config: Config  # the dtypes of each direction
    roles: Roles  # of both operands and the result: they tell the direction of this product
    axes: Axes = ()  # of a `dot_general`: they tell the axes of scales
    convolved: Any = None  # the same program as a convolution, if a GPU runs that better

    @property
    def product(self) -> Eqn:
        """The product itself, in float32."""
        return _product_equation(self.traced)

    @property
    def may_meet_a_weight(self) -> bool:
        """Whether this gives a gradient in 16 bits, and an operand may be a weight.

        An axis of both operands and the result is a batch axis. Products with one are those of
        attention's queries, keys and values, and not of a weight, unless `jax.vmap` made the axis.
        """
        is_gradient = self.roles[2] is not config.ArrayRole.RESULT and not self.config.is_scaled
        return is_gradient and all(None in axis[:3] or axis.mapped for axis in self.axes)

    def run(
        self,
        args: Sequence[jax.Array],
        out_dtype: Any,
        backend: backends.Backend,
        stored: Sequence[Any] = (None, None),
    ) -> jax.Array:
        """Returns the product of two arrays, each cast to its dtype, as `out_dtype`.

        `stored` has 8-bit values and scales of an operand, used if their dtype and axes fit.
        """
        direction = self.config.direction(self.roles)
        if self._is_scaled(direction, args[0].shape):
            return self._run_scaled(args, direction, stored).astype(out_dtype)
        low = self.config.low if direction.scaling else None
        pairs = zip(args[:2], self.roles[:2], strict=True)
        operands = [x.astype(low or direction.dtype(role)) for x, role in pairs]
        traced = self.convolved if backend.low_convolutions and self.convolved else self.traced
        made = out_dtype if _only_moves(traced) else FLOAT32
        bind = functools.partial(low_product, out_dtype=made, backend=backend)
        return _eval(traced, [*operands, *args[2:]], bind).astype(out_dtype)

    def _is_scaled(self, direction: Direction, shape: tuple[int, ...]) -> bool:
        if direction.scaling is None or not self.axes or not _only_moves(self.traced):
            return False
        if all(axis.result is not None for axis in self.axes):
            return False  # an outer product: the gradient of a weight for a single vector
        dtype, block_size = direction.dtype(self.roles[0]), direction.scaling.block_size
        return scaled.fits(self.axes, shape, dtype, block_size)

    def kept(self, args: Sequence[jax.Array], stored: Sequence[Any]) -> Sequence[Any]:
        """Returns, for each operand, the 8-bit values and scales that its gradient's products read.

        None where they read others: of another dtype, with another scale, or none. Outside a loop
        nothing has to be saved: XLA's CSE removes the second of two equal quantisations.
        """
        direction = self.config.direction(self.roles)
        if not self.config.keeps or not self._is_scaled(direction, args[0].shape):
            return stored
        return [
            tuple(self._quantized(i, args, direction, None))
            if mine is None and self._is_read_again(i, direction)
            else mine
            for i, mine in enumerate(stored)
        ]

    def _is_read_again(self, operand: int, direction: Direction) -> bool:
        role, scaling = self.roles[operand], direction.scaling
        later = self.config.direction(config.transposed(self.roles, 1 - operand))
        if later.scaling != scaling or later.dtype(role) != direction.dtype(role):
            return False
        # The next product sums over the rows: a scale a row could not be factored out of that sum.
        return scaling is not None and scaling.granularity == "tensor"

    def _run_scaled(
        self, args: Sequence[jax.Array], direction: Direction, stored: Sequence[Any]
    ) -> jax.Array:
        """Returns a product of 8-bit operands: quantised, multiplied, scaled after."""
        ndim = self.traced.jaxpr.outvars[0].aval.ndim
        operands = [self._quantized(i, args, direction, stored[i]) for i in (0, 1)]
        scales = [scaled.as_result(x.scale, self.axes, i, ndim) for i, x in enumerate(operands)]
        how = direction.accumulates
        if direction.scaling is not None and direction.scaling.granularity == "block":
            how = [direction.dtype(role) for role in self.roles[:2]], direction.scaling.block_size
        bind = functools.partial(scaled_product, how=how)
        values = [x.values for x in operands]
        if set(self.roles[:2]) == {config.ArrayRole.INPUT, config.ArrayRole.WEIGHT}:
            weight = self.roles.index(config.ArrayRole.WEIGHT)
            values[1 - weight], scales[weight] = speed.alone(values[1 - weight], scales[weight])
        out = _eval(self.traced, [*values, *args[2:]], bind).astype(FLOAT32)
        first, second = (speed.spread(s, out.shape, self.axes) for s in scales)
        return out * first * second

    def _quantized(
        self, operand: int, args: Sequence[jax.Array], direction: Direction, stored: Any
    ) -> scaled.Quantized:
        """Returns one operand in 8 bits, as `stored` if usable; blocks are quantised later."""
        x, role = args[operand], self.roles[operand]
        scaling = direction.scaling or Scaling("tensor")
        shared = scaled.shared_axes(self.axes, operand, scaling)
        dtype = direction.dtype(role)
        if scaling.granularity == "block":
            return scaled.Quantized(x, scaled.marks(x, shared))
        if stored is not None and scaled.is_usable(stored, self.axes, operand, dtype):
            return scaled.Quantized(*stored)
        x = self.config.read(x, role)
        if scaling.is_delayed:
            amax = args[-1][config.PLACES[role]]
            return scaled.quantize_delayed(x, amax, dtype, scaling.margin)
        return scaled.quantize(x, dtype, shared, scaling.margin)

    def __repr__(self) -> str:
        ops = "+".join(eqn.primitive.name for eqn in binding.live(self.traced.jaxpr))
        direction = self.config.direction(self.roles)
        dtypes = {str(dtype): None for _, dtype in direction.operands}
        return f"<{ops} in {', '.join(dtypes)}>"


Bind = Callable[[str, dict[str, Any], Sequence[Any]], Any]
"""Binds a product: its name, its parameters and its operands."""


def _eval(jaxpr: Any, args: Sequence[Any], product: Bind) -> Any:
    """Returns the result of a program on other operands, its product bound by `product`."""

    def one(eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "jit":
            return [_eval(compat.closed(eqn.params["jaxpr"]), values, product)]
        if eqn.primitive.name in PRODUCTS:
            return [product(eqn.primitive.name, eqn.params, values)]
        if eqn.primitive.name == "pad":  # its zero is a float32 literal
            values[1] = jnp.asarray(values[1], values[0].dtype)
        return binding.bind(eqn, values)

    return binding.evaluate(jaxpr, args, one, only_live=True)[0]


@functools.lru_cache(maxsize=4096)
def _only_moves(jaxpr: Any) -> bool:
    """Whether a program only moves its product, so that rounding it at once changes nothing."""
    return all(
        _only_moves(compat.closed(eqn.params["jaxpr"]))
        if eqn.primitive.name == "jit"
        else eqn.primitive.name in PRODUCTS | traits.TURNS
        for eqn in binding.live(jaxpr.jaxpr)
    )


def _product_equation(jaxpr: Any) -> Eqn:
    """Returns the product of a program, which may stand in an inner function."""
    for eqn in binding.live(jaxpr.jaxpr):
        if eqn.primitive.name in PRODUCTS:
            return eqn
        if eqn.primitive.name == "jit":
            return _product_equation(compat.closed(eqn.params["jaxpr"]))
    raise ValueError(f"no product in {jaxpr}")


def low_product(
    name: str,
    params: dict[str, Any],
    values: Sequence[Any],
    out_dtype: Any,
    backend: backends.Backend,
) -> Any:
    """Returns the product of two low operands, accumulated in float32, as `out_dtype`.

    Args:
      name: the primitive.
      params: its parameters; the dtype of the result is replaced.
      values: low operands, then integer extras.
      out_dtype: the dtype of the result.
      backend: the backend for which the product is bound.
    """
    algorithm = isinstance(params.get("precision"), (lax.DotAlgorithm, lax.DotAlgorithmPreset))
    made = out_dtype if backend.low_results and not algorithm else jnp.dtype(jnp.float32)
    kwargs = dict(params, preferred_element_type=made)
    if name == "ragged_dot_general":
        kwargs.pop("group_offset", None)
        values = [*map(backend.hides, values[:2]), *values[2:]]
        return _rounded(lax.ragged_dot_general(*values, **kwargs), out_dtype, backend)
    x, y = values
    if name == "dot_general" and backend.ordered:
        x, y, kwargs["dimension_numbers"] = backends.plain_layout(x, y, kwargs["dimension_numbers"])
    x, y = backend.hides(x), backend.hides(y)
    if name == "conv_general_dilated":
        return backends.convolved(x, y, kwargs, out_dtype, backend)
    if x.dtype != jnp.bfloat16:  # XLA:CPU lacks kernels of bfloat16 alone: see `backends`
        return _rounded(lax.dot_general(x, y, **kwargs), out_dtype, backend)
    out = lax.dot_general(backend.operand(x), backend.operand(y), **kwargs)
    return _rounded(backend.result(out), out_dtype, backend)


def _rounded(x: jax.Array, dtype: Any, backend: backends.Backend) -> jax.Array:
    return backends.rounded(x, dtype) if backend.rounds else x


def scaled_product(name: str, params: dict[str, Any], values: Sequence[Any], *, how: Any) -> Any:
    """Returns a product of 8-bit values accumulated in `how`, or of blocks of `how`'s dtypes."""
    del name  # only `dot_general` has axes
    if isinstance(how, tuple):
        return blocks.block_product(values[0], values[1], params["dimension_numbers"], *how)
    kwargs = dict(params, preferred_element_type=how, precision=None)
    return lax.dot_general(*values, **kwargs)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    dtype = jnp.float32 if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=compat.sharding_on_a_mesh(aval))


def program_of(fun: Callable[..., Any], *args: Any) -> Any:
    """Returns a product as a program, which is remembered: JAX's global precision is not in it.

    It may be set where this is traced, as where a gradient is pulled back, and not be set later.
    """
    with jax.default_matmul_precision(None):
        return jax.make_jaxpr(fun)(*args)


def params_key(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the parameters of a product as a key."""
    return tuple(sorted(params.items()))


def of(name: str, params: dict[str, Any], values: Sequence[Any], how: Config) -> Bilinear:
    """Returns the program of one product equation."""
    structs = tuple(_struct(jax.typeof(v)) for v in values)
    return _bilinear(jax.sharding.get_abstract_mesh(), name, params_key(params), structs, how)


@functools.lru_cache(maxsize=4096)
def _bilinear(
    _mesh: Any, name: str, params: Any, structs: tuple[jax.ShapeDtypeStruct, ...], how: Config
) -> Bilinear:
    kwargs = dict(params)
    fun: Callable[..., Any]
    if name == "ragged_dot_general":
        kwargs.pop("group_offset", None)
        fun = functools.partial(lax.ragged_dot_general, **kwargs)
    else:
        bare = functools.partial(getattr(lax, name), **kwargs)
        fun = bare if not how.is_delayed else lambda x, y, _amaxes: bare(x, y)
    traced = program_of(fun, *structs)
    if name != "conv_general_dilated" or not convolutions.is_pointwise(kwargs, structs):
        axes: Axes = ()
        if name == "dot_general":
            ndims = structs[0].ndim, structs[1].ndim
            axes = axes_of.of_dot_general(kwargs["dimension_numbers"], ndims)
        return Bilinear(traced, how, how.roles, axes)
    point = program_of(convolutions.pointwise(kwargs), *structs)
    return Bilinear(point, how, how.roles, convolved=traced)


@functools.lru_cache(maxsize=4096)
def transposed(_mesh: Any, program: Bilinear, wrt: int) -> Bilinear:
    """Returns the program of (cotangent, other operand) → cotangent of operand `wrt`."""
    # A kernel's gradient is better a product, with a float32 result. An image's is better a
    # convolution: cuDNN also adds another image as it writes the result.
    convolved = program.convolved if wrt == 0 else None
    return Bilinear(
        _untransposed(_pullback(program.traced, wrt)),
        program.config,
        config.transposed(program.roles, wrt),
        axes_of.transposed(program.axes, wrt),
        convolved and _pullback(convolved, wrt),
    )


def _pullback(program: Any, wrt: int) -> Any:
    eval_jaxpr = jaxpr_as_fun(program)
    structs = [_struct(v.aval) for v in program.jaxpr.invars]
    out = _struct(program.jaxpr.outvars[0].aval.to_ct_aval())
    mine, other, extras = structs[wrt], structs[1 - wrt], structs[2:]

    def pullback(ct: jax.Array, fixed: jax.Array, *rest: jax.Array) -> jax.Array:
        def partial(x: jax.Array) -> jax.Array:
            pair = (x, fixed) if wrt == 0 else (fixed, x)
            return eval_jaxpr(*pair, *rest)[0]

        # `jax.linear_transpose` asserts inside a `shard_map` that tracks varying axes.
        return jax.vjp(partial, compat.zeros(mine))[1](ct)[0]

    return program_of(pullback, out, other, *extras)


def _untransposed(program: Any) -> Any:
    """Returns a program `(ctᵀ x)ᵀ`, as JAX writes a weight's gradient, as `xᵀ ct`.

    Written with the transpose, XLA:CPU would store both results.
    """
    live = binding.live(program.jaxpr)
    if [eqn.primitive.name for eqn in live] != ["dot_general", "transpose"]:
        return program
    product, transpose = live
    x, y = product.invars
    kwargs = dict(product.params)
    (contract_x, contract_y), (batch_x, batch_y) = kwargs["dimension_numbers"]
    batch, ndim = len(batch_x), product.outvars[0].aval.ndim
    second = x.aval.ndim - len(contract_x)  # where the free dimensions of `y` begin
    swapped = (*range(batch), *range(second, ndim), *range(batch, second))
    if transpose.params["permutation"] != swapped or kwargs.get("out_sharding") is not None:
        return program
    kwargs["dimension_numbers"] = ((contract_y, contract_x), (batch_y, batch_x))

    def in_order(*args: jax.Array) -> jax.Array:
        env = dict(zip(program.jaxpr.invars, args, strict=True))
        return lax.dot_general(env[y], env[x], **kwargs)

    return program_of(in_order, *(_struct(v.aval) for v in program.jaxpr.invars))


@functools.lru_cache(maxsize=4096)
def batched(_mesh: Any, program: Bilinear, size: int, in_axes: tuple[int | None, ...]) -> Bilinear:
    """Returns the program of `size` products, of arguments that are batched along some axis."""
    fun = jax.vmap(jaxpr_as_fun(program.traced), in_axes=in_axes, axis_size=size)

    def widen(struct: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        if axis is None:
            return struct
        shape = (*struct.shape[:axis], size, *struct.shape[axis:])
        return jax.ShapeDtypeStruct(shape, struct.dtype)

    structs = [_struct(v.aval) for v in program.traced.jaxpr.invars]
    args = [widen(s, axis) for s, axis in zip(structs, in_axes, strict=True)]
    wider = program_of(lambda *xs: fun(*xs)[0], *args)
    axes = program.axes and axes_of.mapped(program.axes, *in_axes[:2])
    return Bilinear(wider, program.config, program.roles, axes)
