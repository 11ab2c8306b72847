"""The text of a random program: its arguments, and blocks of lines that know what they can read."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]
Steps = Sequence[Callable[["Block"], None]]
SIZES = (2, 3, 4)
SHAPES: tuple[Shape, ...] = ((), (3,), (4,), (2, 3), (3, 4), (4, 4), (2, 3, 4))
HEADER = """\
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec as P
from mpjax import full_precision

mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


def conv(x, w, **options):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, **options)


def on_host(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    halved = lambda a: np.asarray(a) * np.float32(0.5)
    return jax.pure_callback(halved, like, lax.stop_gradient(x), vmap_method="sequential")


def watched(x):
    jax.debug.callback(lambda a: None, x)
    return x

"""


@dataclasses.dataclass(frozen=True)
class Var:
    """A name in a program: f float32, h bfloat16, i int32, b bool, k key, s Python float."""

    name: str
    shape: Shape
    kind: str = "f"


@dataclasses.dataclass
class Program:
    """A function of arrays as text, with its arguments."""

    seed: int
    inputs: list[Var] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    loops: bool = False  # holds a while loop: no reverse mode
    backward_rule: bool = False  # holds a custom_vjp: no forward mode
    mapped: bool = False  # inside a shard_map, while it is written
    names: int = 0

    def fresh(self, stem: str) -> str:
        self.names += 1
        return f"{stem}{self.names}"

    @property
    def source(self) -> str:
        """The program and its arguments, as a script."""
        body = "\n".join(f"    {line}" for line in self.lines)
        head = f"def program({', '.join(v.name for v in self.inputs)}):\n{body}\n"
        args = ", ".join(map(self._argument, self.inputs))
        return f"{HEADER}\n{head}\nargs = ({args},)\n"

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function and its arguments."""
        space: dict[str, Any] = {}
        exec(compile(self.source, f"<program {self.seed}>", "exec"), space)
        return space["program"], space["args"]

    def _argument(self, var: Var) -> str:
        seed = self.seed + self.inputs.index(var)
        rng = f"np.random.default_rng({seed})"
        match var.kind:
            case "k":
                return f"jax.random.key({seed})"
            case "s":
                return str(0.25 + seed % 5)
            case "i":
                return f"{rng}.integers(0, 9, {var.shape}, dtype=np.int32)"
            case "b":
                return f"{rng}.random({var.shape}) < 0.6"
            case "h":
                return f"{rng}.normal(size={var.shape}).astype(jnp.bfloat16)"
            case _:  # every fourth is a NumPy float64, which JAX reads as float32
                dtype = "np.float64" if seed % 4 == 0 else "np.float32"
                return f"np.asarray({rng}.normal(size={var.shape}), {dtype})"


class Block:
    """The body of a function that is being written: the names it can read, and its lines."""

    def __init__(
        self,
        program: Program,
        rng: random.Random,
        choices: tuple[Steps, Steps],
        scope: Sequence[Var] = (),
        depth: int = 0,
    ) -> None:
        self.program, self.rng, self.choices, self.depth = program, rng, choices, depth
        self.scope = list(scope)
        self.outer = len(scope)
        self.lines: list[str] = []

    # -- names -----------------------------------------------------------------------------

    def let(self, expression: str, shape: Shape, kind: str = "f") -> Var:
        var = Var(self.program.fresh("v"), shape, kind)
        self.lines.append(f"{var.name} = {expression}")
        self.scope.append(var)
        return var

    def input(self, shape: Shape, kind: str = "f") -> Var:
        """Returns a new argument of the whole program: a weight, where a block reads it."""
        var = Var(self.program.fresh("a"), shape, kind)
        self.program.inputs.append(var)
        self.scope.insert(self.outer, var)
        self.outer += 1
        return var

    def find(self, kind: str, accept: Callable[[Shape], bool] = lambda _: True) -> Var | None:
        """Returns one of the latest names of a kind, mostly."""
        known = [v for v in self.scope if v.kind == kind and accept(v.shape)]
        return self.rng.choice(known[-5:]) if known else None

    def need(self, kind: str, shape: Shape) -> Var:
        found = self.find(kind, lambda s: s == shape) if self.rng.random() < 0.7 else None
        return found or self.input(shape, kind)

    def operand(self, accept: Callable[[Shape], bool] = lambda _: True) -> Var:
        found = self.find("f", accept)
        return found or self.input(self.rng.choice([s for s in SHAPES if accept(s)]))

    # -- steps -----------------------------------------------------------------------------

    def grow(self, steps: int) -> None:
        """Writes a number of random steps: `choices` holds those fit for blocks and for leaves."""
        for _ in range(steps):
            self.rng.choice(self.choices[self.depth >= 2])(self)

    def fill(self, line: str, x: Var, **more: Any) -> str:
        fields: dict[str, Any] = {"x": x.name, **more}
        for letter, kind in (("y", "f"), ("b", "b"), ("i", "i")):
            if f"{{{letter}}}" in line and letter not in fields:
                fields[letter] = self.need(kind, x.shape).name
        return line.format(**fields)

    def body(self, params: list[Var], steps: int, result: list[Var]) -> tuple[list[str], list[Var]]:
        """Returns the lines of an inner function, ending in variables like those of `result`."""
        inner = Block(self.program, self.rng, self.choices, self.scope + params, self.depth + 1)
        before = len(self.program.inputs)
        inner.grow(steps)
        found = [inner.last(v) for v in result]
        new = self.program.inputs[before:]
        self.scope[self.outer : self.outer] = new
        self.outer += len(new)
        return inner.lines, found

    def last(self, like: Var) -> Var:
        """Returns the newest name of a shape that the block made, or one made for it."""
        made = [v for v in self.scope[self.outer :] if v.kind == "f" and v.shape == like.shape]
        return made[-1] if made else self.let(f"jnp.tanh({like.name})", like.shape)

    def define(self, params: list[Var], lines: list[str], returns: str, decorator: str = "") -> str:
        name = self.program.fresh("fun")
        if decorator:
            self.lines.append(decorator)
        self.lines.append(f"def {name}({', '.join(v.name for v in params)}):")
        self.lines.extend(f"    {line}" for line in lines)
        self.lines.append(f"    return {returns}")
        return name

    def param(self, shape: Shape, kind: str = "f") -> Var:
        return Var(self.program.fresh("p"), shape, kind)
