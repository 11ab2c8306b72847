"""One process of a job in which one process's rows overflow: see test_multiprocess.py.

    python _overflow_worker.py COORDINATOR COUNT ID WAY

Prints a line of JSON for each step: whether gradients were finite, the loss scale, the bits of the
parameters that this process holds, and how often the step was traced.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax

ROWS, BAD_STEP, STEPS = 2, 2, 4
traces = 0


def loss_fn(params, batch):
    global traces
    traces += 1
    # Small whole numbers, so that sums are exact in any order; one row is too large for float16.
    return jnp.mean((batch @ params["w"]).astype(jnp.float32) ** 2)


def rows_of(step: int, process: int, count: int) -> np.ndarray:
    values = np.random.default_rng((step, process)).integers(-2, 3, (ROWS, 4)).astype(np.float32)
    if step == BAD_STEP and process == count - 1:
        values[0, 0] = 60000.0  # finite in float16; its square's derivative is not
    return values


def make_step(way: str, mesh: jax.sharding.Mesh):
    step = mpjax.make_train_step(
        loss_fn,
        optax.sgd(0.125, momentum=0.5),
        "16-mixed",
        loss_scale=mpjax.DynamicLossScale(1024, growth_interval=100),
        donate=False,
        axis_name="data" if way == "shard_map" else None,
    )
    if way == "jit":
        return step, step.init
    specs = (P(), P("data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped), step.init


def main() -> None:
    coordinator, count, process, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, count, process, heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,))
    sharding, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    step, init = make_step(way, mesh)
    place = lambda x: jax.make_array_from_callback(x.shape, replicated, np.asarray(x).__getitem__)  # noqa: E731
    state = jax.tree.map(place, init({"w": jnp.array([1.0, -2.0, 0.5, 1.0])}))
    for index in range(STEPS):
        local = rows_of(index, process, count)
        state, metrics = step(state, jax.make_array_from_process_local_data(sharding, local))
        said = {name: float(metrics[name]) for name in ("grads_finite", "loss_scale")}
        bits = np.asarray(state.params["w"].addressable_data(0)).tobytes().hex()
        sys.stdout.write(json.dumps(said | {"bits": bits, "traces": traces}) + "\n")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
