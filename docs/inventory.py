"""Addresses of the names of JAX and Flax that these pages use, as Sphinx's inventories.

Sphinx reads an inventory from the network; with these the pages are built without. A name that is
not here stays plain text.
"""

import zlib
from pathlib import Path

JAX = """
jax.Array jax.ShapeDtypeStruct jax.checkpoint jax.custom_jvp jax.custom_vjp jax.debug_nans
jax.device_put jax.eval_shape jax.grad jax.jit jax.lax.all_gather jax.lax.cond jax.lax.pmean
jax.lax.psum jax.lax.reduce_precision jax.lax.scan jax.lax.while_loop jax.make_jaxpr
jax.named_scope jax.nn.gelu jax.nn.relu jax.nn.softmax jax.numpy.where jax.pmap jax.shard_map
jax.tree.map jax.value_and_grad jax.vjp jax.vmap
"""

PAGES = {
    "jax": {name: f"_autosummary/{name}.html" for name in JAX.split()},
    "flax": {"flax.training.train_state.TrainState": "api_reference/flax.training.html"},
}


def write(folder: Path) -> dict[str, Path]:
    """Writes an inventory for each project, and returns their paths."""
    folder.mkdir(exist_ok=True)
    paths: dict[str, Path] = {}
    for project, pages in PAGES.items():
        head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        lines = [f"{name} py:function 1 {page}#$ -\n" for name, page in sorted(pages.items())]
        paths[project] = folder / f"{project}.inv"
        paths[project].write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
    return paths
