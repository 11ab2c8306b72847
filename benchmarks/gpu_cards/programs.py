"""Programs compiled ahead, in threads, and the arrays that they start from."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import jaxprs
from networks import Network

from mpjax._autocast.speed import hints

from .jobs import Row

# Tracing holds the interpreter's lock anyway; and a hint is left out for all threads at once.
_TRACING = threading.Lock()


def lowered(fun: Any, *args: Any, without: Iterable[str] = (), forget: bool = False) -> Any:
    """Returns `jax.stages.Lowered` of a jitted function.

    Args:
      fun: has a `lower`.
      args: arrays or specs.
      without: names of hints to leave out.
      forget: trace everything anew, as nothing that was traced with other hints may be taken.
    """
    with _TRACING, contextlib.ExitStack() as stack:
        if forget:
            jax.clear_caches()
        for name in without:
            stack.enter_context(hints.without(name))
        return fun.lower(*args)


def compiled(lower: Callable[[], Any]) -> tuple[Any, Row]:
    """Returns a compiled program, and the facts of it that go into a row.

    Args:
      lower: returns `jax.stages.Lowered`.
    """
    started = time.perf_counter()
    program = lower()
    traced = time.perf_counter()
    program = program.compile()
    done = time.perf_counter()
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return program, {
        "peak_bytes": held + memory.temp_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "trace_s": traced - started,
        "compile_s": done - traced,
    }


class Values:
    """A network's parameters and batch, drawn on the device by programs that are compiled once."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._lock = threading.Lock()
        self._programs: tuple[Any, Any] | None = None
        self._batch: Any = None

    def prepare(self) -> None:
        """Compiles what draws them, unless another thread did."""
        with self._lock:
            if self._programs is None:
                jits = (jax.jit(self.network.init), jax.jit(self.network.sample))
                key = jax.eval_shape(lambda: jax.random.key(0))
                self._programs = tuple(compiled(lambda f=f: lowered(f, key))[0] for f in jits)

    def params(self) -> Any:
        """Returns new arrays, the same values each time."""
        self.prepare()
        return self._programs[0](jax.random.key(0))

    def batch(self) -> Any:
        """Returns the batch, one for all variants."""
        self.prepare()
        if self._batch is None:
            self._batch = self._programs[1](jax.random.key(1))
        return self._batch


def items(network: Network) -> tuple[int, str]:
    """Returns how many samples or tokens a step takes, and which of the two."""
    numbers = network.numbers
    length = numbers.get("time", numbers.get("steps"))
    if length is None:
        return numbers["batch"], "samples"
    return numbers["batch"] * length, "tokens"


def product_flops(fun: Callable[..., Any], *args: Any) -> int:
    """Returns the floating operations of all matrix products and convolutions, loops as they run.

    Of the program as it is written: what a compiler computes twice counts once.
    """
    return _flops(jax.make_jaxpr(fun)(*args).jaxpr)


def _flops(jaxpr: Any) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        inner = sum(_flops(j) for j in jaxprs.inner_jaxprs(eqn))
        if eqn.primitive.name == "scan":
            inner *= eqn.params["length"]
        total += inner + _of_product(eqn)
    return total


def _of_product(eqn: Any) -> int:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        return _of_convolution(eqn)
    return 0


def _of_convolution(eqn: Any) -> int:
    """Returns twice the products of a convolution, without those with holes and padding.

    The gradients of a convolution with strides are convolutions with holes: each pair of an input
    and a kernel place meets an output in at most one way, and is counted where it does.
    """
    params, (x, kernel) = eqn.params, (v.aval.shape for v in eqn.invars)
    numbers, out = params["dimension_numbers"], eqn.outvars[0].aval.shape
    pairs = 1
    for dim, (low, _) in enumerate(params["padding"]):
        count, places = x[numbers.lhs_spec[2 + dim]], kernel[numbers.rhs_spec[2 + dim]]
        step, holes = params["window_strides"][dim], params["lhs_dilation"][dim]
        at = np.arange(out[numbers.out_spec[2 + dim]])[:, None] * step - low
        at = at + np.arange(places)[None, :] * params["rhs_dilation"][dim]
        pairs *= int(np.sum((at % holes == 0) & (at >= 0) & (at <= (count - 1) * holes)))
    batch, channels = x[numbers.lhs_spec[0]], kernel[numbers.rhs_spec[1]]
    features = kernel[numbers.rhs_spec[0]]
    return 2 * batch // params["batch_group_count"] * features * channels * pairs


def random(shape: tuple[int, ...], dtype: Any) -> Callable[[], jax.Array]:
    """Returns a maker of random normal values: zeros run faster than data."""
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype))
    return lambda: draw(jax.random.key(0))
