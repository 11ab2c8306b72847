"""What AdamW's step moves on a chip that is not here, in fewer bits and in float32.

    python benchmarks/low_precision_steps.py     # writes results/low_precision_steps.md and .json

The step is `tx.update` and `optax.apply_updates`, compiled alone, for the largest matrices of the
decoder of 872 million parameters (`networks/decoder.py`), which all devices share.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from measure import machine
from networks.decoder import Decoder

import mpjax.pods
from mpjax import optim

RESULTS = pathlib.Path(__file__).parent / "results" / "low_precision_steps.json"
TARGETS = ("v5e:4x4", "8xh100")


def int8(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optim.with_quantized_state(tx)


def low_moments(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optim.with_state_dtypes(tx, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16)


def split(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optim.with_master_weights(tx, bits=24)


# The dtype of parameters and gradients, and what wraps the optimizer.
FORMS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "float32": (jnp.float32, lambda tx: tx),
    "master weights": (jnp.bfloat16, optim.with_master_weights),
    "stochastic": (jnp.bfloat16, optim.with_stochastic_rounding),
    "kahan": (jnp.bfloat16, optim.with_kahan),
    "24 bits": (jnp.bfloat16, split),
    "stochastic + bfloat16 moments": (
        *(jnp.bfloat16, lambda tx: optim.with_stochastic_rounding(low_moments(tx))),
    ),
    "24 bits + int8 moments": (jnp.bfloat16, lambda tx: split(int8(tx))),
    "stochastic + int8 moments": (
        *(jnp.bfloat16, lambda tx: optim.with_stochastic_rounding(int8(tx))),
    ),
}


def placed(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns specs of parameters or of a state, matrices split as the decoder splits them."""

    def place(x: Any) -> Any:
        spec = P(None, "fsdp") if x.ndim == 3 else P()
        return x.update(sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def measured(target: str, form: str) -> dict[str, Any]:
    """Returns bytes for each parameter, and what the compiler needs besides."""
    dtype, wrap = FORMS[form]
    topology = mpjax.pods.get_topology(target)
    tx = wrap(optax.adamw(1e-3))
    params = {"up": Decoder().shapes["layers"]["up"].update(dtype=dtype)}
    state = jax.eval_shape(tx.init, params)

    def step(kept: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, kept[1], kept[0])
        return optax.apply_updates(kept[0], updates), state

    args = placed(((params, state), params), topology.make_mesh({"fsdp": -1}))
    report = mpjax.pods.check(jax.jit(step, donate_argnums=0), args, topology)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    here = count / topology.num_devices

    def size(tree: Any) -> float:
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / count

    return {
        "held": optim.bytes_per_parameter(tx, params, grad_dtype=dtype).total,
        "least": 2 * size((params, state)) + size(params),
        "accessed": (report.cost_analysis_bytes or 0) / here,
        "traffic": report.hbm_bytes / here,
        "peak": report.memory.peak / here,
    }


ABOUT = """\
# AdamW's step in fewer bits, on chips that were not there

The optimizer's step alone (`tx.update` and `optax.apply_updates`), compiled for devices that share
the decoder's largest matrices, `up`, 268 million parameters. Bytes for each parameter of a device:

* held: of weights, gradients (in the weights' dtype) and state.
* least: state and weights read and written once, gradients read.
* accessed: XLA's own count, which it has for TPUs alone. traffic: ours, of what kernels read and
  write. Both in one step; in brackets beside float32's.
* peak: the most that is allocated at a time.

| devices | form | held | least | accessed | traffic | peak |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = {f"{t}, {f}": measured(t, f) for t in TARGETS for f in FORMS}
    made = f"`python benchmarks/low_precision_steps.py`, {machine.made()}."
    data = {"rows": rows, "made": made}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(text(data))


def text(data: dict[str, Any]) -> str:
    lines = [ABOUT.rstrip("\n")]
    for target in TARGETS:
        base = data["rows"][f"{target}, float32"]
        for form in FORMS:
            row = data["rows"][f"{target}, {form}"]
            cells = [target, form, f"{row['held']:.2f}", f"{row['least']:.1f}"]
            for key in ("accessed", "traffic"):
                share = f"{row[key]:.1f} ({row[key] / base[key]:.2f})" if base[key] else "not known"
                cells.append(share)
            cells.append(f"{row['peak']:.1f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", data["made"], ""])


if __name__ == "__main__":
    main()
