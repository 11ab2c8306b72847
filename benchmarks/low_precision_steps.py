"""What AdamW's step moves on a chip that is not here, in fewer bits and in float32.

    python benchmarks/low_precision_steps.py     # writes results/low_precision_steps.md and .json

First the step alone, `tx.update` and `optax.apply_updates`, for the largest matrices of the decoder
of 872 million parameters (`networks/decoder.py`), which all devices share; then the decoder's whole
training step.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
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


def int8_rows(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optim.with_quantized_state(tx, block_size=None)


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
    "24 bits + bfloat16 moments": (jnp.bfloat16, lambda tx: split(low_moments(tx))),
    "stochastic + int8 moments": (
        *(jnp.bfloat16, lambda tx: optim.with_stochastic_rounding(int8(tx))),
    ),
    "24 bits + int8 moments": (jnp.bfloat16, lambda tx: split(int8(tx))),
    "stochastic + int8 rows": (
        *(jnp.bfloat16, lambda tx: optim.with_stochastic_rounding(int8_rows(tx))),
    ),
    "24 bits + int8 rows": (jnp.bfloat16, lambda tx: split(int8_rows(tx))),
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


def whole(target: str, form: str) -> dict[str, Any]:
    """Returns bytes of the decoder's whole training step, for each device."""
    dtype, wrap = FORMS[form]
    topology = mpjax.pods.get_topology(target)
    mesh = topology.make_mesh({"fsdp": -1})
    decoder = Decoder(param_dtype=jnp.dtype(dtype).name)
    tx = wrap(optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((topology.num_devices, decoder.time + 1), jnp.int32)
    specs = (decoder.state_specs(tx), P("fsdp"))
    args = mpjax.pods.with_sharding((decoder.state_shapes(tx), tokens), specs, mesh)
    report = mpjax.pods.check(decoder.train_step(tx, mesh), args, topology)
    held = optim.bytes_per_parameter(tx, decoder.shapes, grad_dtype=None)
    return {
        "state": held.total * held.count / topology.num_devices,
        "peak": report.memory.peak,
        "accessed": report.cost_analysis_bytes or 0,
        "traffic": report.hbm_bytes,
        "findings": [finding.what for finding in report.findings],
    }


def apart(target: str, form: str) -> dict[str, Any]:
    """Returns `whole` from a process of its own: compilers take memory."""
    script = [sys.executable, __file__, "--whole", target, form]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{target}, {form}: {done.stderr}")
    return json.loads(done.stdout)


ABOUT = """\
# AdamW's step in fewer bits, on chips that were not there

The optimizer's step alone (`tx.update` and `optax.apply_updates`), compiled for devices that share
the decoder's largest matrices, `up`, 268 million parameters. Bytes for each parameter of a device:

* held: of weights, gradients (in the weights' dtype) and state.
* least: state and weights read and written once, gradients read.
* accessed: XLA's own count, which it has for TPUs alone, and where what is copied into a TPU's
  vector memory counts again. traffic: ours, of what kernels read from the main memory and write
  to it. Both in one step; in brackets beside float32's.
* peak: the most that is allocated at a time, vector memory included.

int8 moments: in blocks of 256, or, as rows, with one scale for each row.

| devices | form | held | least | accessed | traffic | peak |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
"""
WHOLE = """\
## The decoder's whole step

One sequence of 2048 tokens for each device, parameters, state and gradients shared by all
(`networks/decoder.py`), weights in the form's dtype, products in bfloat16. GB for each device:
state is what stays between two steps, weights included; in brackets beside float32's.

| devices | form | state | peak | accessed | traffic |
| --- | --- | ---: | ---: | ---: | ---: |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", nargs=2, metavar=("DEVICES", "FORM"), help="one row, as JSON")
    if one := parser.parse_args().whole:
        print(json.dumps(whole(*one)))
        return
    data = {
        "rows": {f"{t}, {f}": measured(t, f) for t in TARGETS for f in FORMS},
        "whole": {f"{t}, {f}": apart(t, f) for t in TARGETS for f in FORMS},
        "made": f"`python benchmarks/low_precision_steps.py`, {machine.made()}.",
    }
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(text(data))


def text(data: dict[str, Any]) -> str:
    lines = [ABOUT.rstrip("\n")]
    for target, form, row, base in cases(data["rows"]):
        cells = [target, form, f"{row['held']:.2f}", f"{row['least']:.1f}"]
        cells += [beside(row[key], base[key], 1) for key in ("accessed", "traffic")]
        cells.append(f"{row['peak']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", WHOLE.rstrip("\n")]
    for target, form, row, base in cases(data["whole"]):
        keys = ("state", "peak", "accessed", "traffic")
        cells = [target, form, *(beside(row[key], base[key], 1e9) for key in keys)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", data["made"], ""])


def cases(rows: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Returns devices, form, row and float32's row on the same devices, of each row."""
    pairs = [(target, form) for target in TARGETS for form in FORMS]
    return [(t, f, rows[f"{t}, {f}"], rows[f"{t}, float32"]) for t, f in pairs]


def beside(value: float, base: float, unit: float) -> str:
    if not base:
        return "not known"
    return f"{value / unit:.{1 if unit == 1 else 2}f} ({value / base:.2f})"


if __name__ == "__main__":
    main()
