"""Writes api/operations.md from autocast's own table: `python docs/operations.py`.

`make docs` does that too, and a test compares the page with the table.
"""

import textwrap
from pathlib import Path

from mpjax._jaxpr.op_rules import ACTIVATIONS, AS_TRACED, COMPARISONS, OP_RULES, STRUCTURE, OpClass

PAGE = Path(__file__).parent / "api" / "operations.md"

HEAD = """# Every operation

Autocast's table of operations, `mpjax/_jaxpr/op_rules.py`, as a page. Names are those that
`jax.make_jaxpr` prints and `mpjax.explain` shows. `python docs/operations.py` writes this page.

To see the decisions for your own function, type `print(mpjax.explain(fun, policy)(*args))`. To
change the class of an operation, type `mpjax.autocast(fun, policy, rules={"tanh": "full"})`.
[Autocast](../autocast.md#the-four-classes) explains the classes.
"""

CLASSES = {
    OpClass.LOWER: "Operands are cast to the compute dtype. The sum inside is float32.",
    OpClass.FULL: "Operands are read in float32, and the result is float32.",
    OpClass.FOLLOW: "The result is low if the operands are low, and float32 if one of them is "
    "float32 by its class.",
    OpClass.KEEP: "The result has the dtype of its operand. No value is rounded.",
}

OTHERS = (
    (
        "Activations",
        "Functions that autocast takes as a whole. A low operand gives a low result, and the "
        "steps between are float32. Example: `jax.nn.gelu`.",
        ACTIVATIONS,
    ),
    (
        "Comparisons",
        "They read values and return integers or booleans. They run in float32, where every low "
        "value is exact.",
        COMPARISONS,
    ),
    ("Programs", "They contain other operations. Autocast decides for those.", STRUCTURE),
    (
        "As traced",
        "Integers, random bits, effects, and kernels of others. Autocast changes nothing: they "
        "get the dtypes that your function gave them.",
        AS_TRACED,
    ),
)


def page() -> str:
    """Returns the page as Markdown."""
    parts = [HEAD]
    for op_class, meaning in CLASSES.items():
        rules = [rule for rule in OP_RULES.values() if rule.op_class is op_class]
        parts.append(f"## {op_class.value.capitalize()}\n\n{meaning}\n")
        rows = [f"| `{rule.primitive}` | {rule.reason} | {rule.torch} |" for rule in rules]
        parts.append(
            "\n".join(["| operation | reason | PyTorch's list |", "| --- | --- | --- |", *rows, ""])
        )
    for title, meaning, names in OTHERS:
        listed = ", ".join(f"`{name}`" for name in sorted(names))
        told = "\n\n".join(textwrap.fill(t, 120, break_on_hyphens=False) for t in (meaning, listed))
        parts.append(f"## {title}\n\n{told}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
