"""What several test files share: counting traces, finding casts, comparing bits."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import CACHING

import mpjax
from mpjax import pods

# For processes that tests start and that compile more than they run: as conftest.py has it.
UNOPTIMISED = {
    "XLA_FLAGS": " ".join(f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f),
    **{name: value for name, value in os.environ.items() if name in CACHING},
}


class Traced:
    """A jitted function that counts how often it is traced."""

    def __init__(self, fun: Callable[..., Any], **options: Any):
        self.traces = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return fun(*args, **kwargs)

        self._jitted = jax.jit(counted, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*args, **kwargs)


def as_owned(loss_scale: Any) -> Any:
    """Returns a loss scale as the optimizer that adjusts it gives it: gradients stay scaled."""
    tx = mpjax.with_loss_scale(optax.identity(), loss_scale)
    return mpjax.current_loss_scale(tx.init({"w": jnp.ones(())}))


def count_casts(fun: Callable[..., Any], *args: Any) -> int:
    """Returns how many conversions between dtypes the jaxpr of `fun` has, at its top level."""
    eqns = jax.make_jaxpr(fun)(*args).jaxpr.eqns
    return sum(eqn.primitive.name == "convert_element_type" for eqn in eqns)


def compiled_for(target: str, fun: Callable[..., Any], *args: Any) -> str:
    """Returns what XLA makes of a function of arrays or shapes, for a device that is not here."""
    place = jax.sharding.SingleDeviceSharding(pods.get_topology(target).devices[0])

    def spec(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    return jax.jit(fun).lower(*jax.tree.map(spec, args)).compile().as_text()


def over_shards(
    fun: Any, mesh: jax.sharding.Mesh, *in_specs: Any, out_specs: Any = None, check_vma: bool = True
) -> Any:
    """Returns a jitted function whose body runs once a shard; results are whole unless said."""
    out_specs = jax.P() if out_specs is None else out_specs
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(fun, mesh=mesh, check_vma=check_vma, **specs))


def bits(x: Any) -> tuple[Any, ...]:
    """Returns the dtype, shape and bytes of an array, so that -0.0 is not 0.0 and NaN is NaN."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()
