"""Flags of facts: what is so of a value, as `facts` tells forwards through a program."""

from __future__ import annotations

CONSTANT = 1
"""No float argument went into it: a literal, a mask, a one-hot label."""
SCALAR = 2
"""It is one number, or copies of it."""
REPEATED = 4
"""A broadcast made it."""
EXTREME = 8
"""It is a maximum of rows, or made of nothing else."""
STEP = 16
"""It was multiplied by a small number, or by one that is not known: a step size."""
PRODUCT = 32
"""A product's result went into it."""
DERIVED = 64
"""A derivative that is taken inside the program made it."""
BY_DATA, BY_A_CONSTANT = 128, 256
"""It has an offset, which was added to what a product made, and a difference may take off again.

One by data, a statistic of rows, such as their mean, need not have.
"""
OFFSET = BY_DATA | BY_A_CONSTANT
