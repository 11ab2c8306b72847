"""Every precision name that people already type: `python examples/precision_names.py`.

`mpjax.get_policy` understands the names of Lightning, Keras, Apex and jmp, and objects of theirs.
The first table lists them with the three dtypes that each stands for: parameters are stored in p,
computed with in c, and what the model returns is in o; whether the loss is scaled; what this
machine makes of it; and the dtype of a product of parameters and data that was computed so.

The second shows what is refused, and how: 'bf16' is mixed precision to Lightning and all bfloat16
to jmp, so that guessing would be wrong for one of the two.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from rich import box, print
from rich.markup import escape
from rich.table import Table

import mpjax

NAMES: dict[str, list[Any]] = {
    "Lightning": ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", 32, 16, "64-true"],
    "Keras": ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16"],
    "Apex": ["O0", "O1", "O2", "O3"],
    "jmp": ["full", "half", "params=float32,compute=bfloat16", "p=f32,c=f16,o=f32"],
    "JAX": [jnp.bfloat16, jnp.dtype("float16")],
    "a config": [{"config": {"name": "mixed_bfloat16"}}],  # as Keras saves it
}
REFUSED: list[Any] = ["bf16", "bf16_mixed", "float23", "int8", "p=f32,c=bf16,c=f16", 3.5]


def spelt(name: Any) -> str:
    return name.__name__ if isinstance(name, type) else repr(name)


def product_dtype(policy: mpjax.Policy) -> str:
    """Returns the dtype of a product of parameters and data under a policy, computed."""
    params = policy.cast_to_param(jnp.ones((2, 2)))
    operands = policy.cast_to_compute((params, jnp.ones((2, 2))))
    return jax.jit(jnp.matmul)(*operands).dtype.name


def known() -> Table:
    table = Table(title="What is understood", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for head in ("of", "name", "means", "scaled", "here", "product"):
        table.add_column(head, overflow="fold", no_wrap=head == "means")
    for library, names in NAMES.items():
        for index, name in enumerate(names):
            policy = mpjax.get_policy(name)
            is_scaled = isinstance(mpjax.get_loss_scale(policy), mpjax.DynamicLossScale)
            scale = "yes" if is_scaled else "no"
            cells = escape(spelt(name)), str(policy), scale, *here(policy)
            table.add_row("" if index else library, *cells)
        table.add_section()
    return table


def here(policy: mpjax.Policy) -> tuple[str, str]:
    """Returns what this machine makes of a policy, and the dtype of a product under it."""
    try:
        report = mpjax.check_support(policy)
    except ValueError:
        return "needs x64", ""  # jax.config.update("jax_enable_x64", True)
    return report.status, product_dtype(policy)


def refused() -> Table:
    table = Table(title="What is refused", box=box.SIMPLE_HEAD, show_lines=True)
    for head in ("name", "says"):
        table.add_column(head)
    for name in REFUSED:
        try:
            mpjax.get_policy(name)
        except (TypeError, ValueError) as error:
            table.add_row(escape(spelt(name)), escape(str(error)))
    return table


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=layout).parse_args()
    print(known())
    print(refused())
    policy = mpjax.get_policy("mixed_bfloat16")
    print(
        f"And back: str gives {str(policy)!r}, which get_policy reads; to_dict {policy.to_dict()}."
    )


if __name__ == "__main__":
    main()
