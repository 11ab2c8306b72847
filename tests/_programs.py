"""Random programs as source text: what failed can be read, shrunk, and run on its own.

A generator is driven by any `random.Random`: Hypothesis' own (then every choice shrinks), or a
seeded one. Programs are straight lines of steps from `_program_ops`, with blocks inside: loops,
branches, functions with derivative rules, checkpoints, inner jits, vmaps and named scopes, all of
which may read what was computed outside them.
"""

import random
from collections.abc import Callable

import _program_ops as ops
from _program_text import SHAPES, SIZES, Block, Program, Shape, Var

# -- plain steps -------------------------------------------------------------------------------


def _same_shape(lines: tuple[str, ...], kind: str = "f") -> Callable[[Block], None]:
    def step(block: Block) -> None:
        x = block.operand()
        block.let(block.fill(block.rng.choice(lines), x), x.shape, kind)

    return step


def _along_axis(block: Block) -> None:
    x = block.operand(lambda s: len(s) >= 1)
    axis = block.rng.randrange(len(x.shape))
    block.let(block.fill(block.rng.choice(ops.ALONG), x, a=axis), x.shape)


def _dropping_axis(lines: tuple[str, ...], kind: str) -> Callable[[Block], None]:
    def step(block: Block) -> None:
        x = block.operand(lambda s: len(s) >= 1)
        axis = block.rng.randrange(len(x.shape))
        shape = x.shape[:axis] + x.shape[axis + 1 :]
        block.let(block.fill(block.rng.choice(lines), x, a=axis), shape, kind)

    return step


def _integers(block: Block) -> None:
    i = block.find("i") or block.input((3,), "i")
    block.let(block.rng.choice(ops.INTEGER).format(i=i.name), i.shape, "i")


def _from_integers(block: Block) -> None:
    i = block.find("i") or block.input((3,), "i")
    block.let(block.rng.choice(ops.FROM_INT).format(i=i.name), i.shape)


def _sample(block: Block) -> None:
    key = block.find("k") or block.input((), "k")
    shape = block.operand().shape
    block.let(block.rng.choice(ops.SAMPLES).format(k=key.name, shape=shape), shape)


def _half(block: Block) -> None:
    """Works in bfloat16 as the program's author wrote it."""
    x = block.find("h") or block.input(block.operand().shape, "h")
    line = block.rng.choice(["jnp.tanh({x})", "{x} * 2", "{x} + {x}", "lax.exp(-jnp.abs({x}))"])
    y = block.let(line.format(x=x.name), x.shape, "h")
    block.let(f"{y.name}.astype(jnp.float32)", y.shape)


def _python_scalar(block: Block) -> None:
    scalar = block.find("s") or block.input((), "s")
    x = block.operand()
    block.let(f"{x.name} * {scalar.name}", x.shape)


def _bind_sizes(pattern: str, shape: Shape, sizes: dict[str, int]) -> bool:
    """Gives each letter of a pattern its size; false where a shape does not fit."""
    if len(pattern) != len(shape):
        return False
    for letter, size in zip(pattern, shape, strict=True):
        if letter.isdigit():
            sizes.setdefault(letter, int(letter))
        if sizes.setdefault(letter, size) != size:
            return False
    return True


def _sized(block: Block, pattern: str, sizes: dict[str, int]) -> Shape:
    for letter in pattern:
        if letter not in sizes:
            sizes[letter] = int(letter) if letter.isdigit() else block.rng.choice(SIZES)
    return tuple(sizes[letter] for letter in pattern)


def _product(block: Block) -> None:
    x_pattern, weights, out, line = map(str.strip, block.rng.choice(ops.PRODUCTS).split("|"))
    x_pattern = x_pattern.removeprefix("x:")
    x = block.operand(lambda s: _bind_sizes(x_pattern, s, {}))
    sizes: dict[str, int] = {}
    _bind_sizes(x_pattern, x.shape, sizes)
    names = {"x": x.name}
    for part in filter(None, weights.split(",")):
        name, pattern = part.split(":")
        names[name] = block.need("f", _sized(block, pattern, sizes)).name
    shape = _sized(block, out, sizes)
    scale = "0.5 * " if block.rng.random() < 0.5 else ""
    block.let(f"{scale}({line.format(**names)})", shape)


def _move(block: Block) -> None:
    pattern, out, line = map(str.strip, block.rng.choice(ops.MOVES).split("|"))
    fits = [v for v in block.scope if v.kind == "f" and _bind_sizes(pattern, v.shape, {})]
    shapes = [s for s in SHAPES if _bind_sizes(pattern, s, {})]
    x = block.rng.choice(fits[-5:]) if fits else block.input(block.rng.choice(shapes))
    sizes: dict[str, int] = {}
    _bind_sizes(pattern, x.shape, sizes)
    _sized(block, "abc", sizes)
    shape = _sized(block, out, sizes)
    if len(shape) <= 3:
        block.let(line.format(x=x.name, **sizes), shape)


# -- blocks ------------------------------------------------------------------------------------


def _steps(block: Block) -> int:
    return block.rng.randint(1, 3)


def _scan(block: Block) -> None:
    """A residual stream, an accumulator from zero, slices in and results stacked."""
    x = block.operand(lambda s: len(s) <= 2)
    length = block.rng.choice((2, 3))
    xs = block.need("f", (length, *x.shape)) if len(x.shape) < 3 else None
    carry, total, t = block.param(x.shape), block.param(()), block.param(x.shape)
    lines, (new, y) = block.body([carry, t], _steps(block), [carry, t])
    residual = block.rng.choice([f"{new.name}", f"{carry.name} + 0.5 * {new.name}"])
    packed = block.param(())
    unpack = f"{carry.name}, {total.name} = {packed.name}"
    kept = block.rng.choice([y.name, carry.name, total.name])
    grown = f"{total.name} + jnp.sum({new.name})"
    name = block.define([packed, t], [unpack, *lines], f"(({residual}), {grown}), {kept}")
    shape = () if kept == total.name else x.shape
    options = block.rng.choice(["", ", reverse=True", ", unroll=2"])
    out = block.program.fresh("v")
    block.lines.append(
        f"{out} = lax.scan({name}, ({x.name}, 0.0), {xs.name if xs else None}{options})"
    )
    block.let(f"{out}[0][0]", x.shape)
    block.let(f"{out}[0][1]", ())
    block.let(f"{out}[1]", (length, *shape))


def _fori(block: Block) -> None:
    x = block.operand()
    index, carry = block.param((), "i"), block.param(x.shape)
    lines, (new,) = block.body([index, carry], _steps(block), [carry])
    name = block.define([index, carry], lines, new.name)
    block.let(f"lax.fori_loop(0, 3, {name}, {x.name})", x.shape)


def _while(block: Block) -> None:
    x = block.operand()
    block.program.loops = True
    carry, state = block.param(x.shape), block.param(())
    lines, (new,) = block.body([carry], _steps(block), [carry])
    unpack = f"i, {carry.name} = {state.name}"
    name = block.define([state], [unpack, *lines], f"(i + 1, {new.name})")
    start = block.let(f"lax.while_loop(lambda s: s[0] < 3, {name}, (0, {x.name}))[1]", x.shape)
    del start


def _branches(block: Block, count: int) -> tuple[list[str], Var]:
    x = block.operand()
    names = []
    for _ in range(count):
        param = block.param(x.shape)
        if block.rng.random() < 0.25:
            names.append(block.define([param], [], param.name))
        else:
            lines, (out,) = block.body([param], _steps(block), [param])
            names.append(block.define([param], lines, out.name))
    return names, x


def _cond(block: Block) -> None:
    (yes, no), x = _branches(block, 2)
    pred = block.need("b", ())
    block.let(f"lax.cond({pred.name}, {yes}, {no}, {x.name})", x.shape)


def _switch(block: Block) -> None:
    names, x = _branches(block, 3)
    index = block.need("i", ())
    block.let(f"lax.switch({index.name} % 4, [{', '.join(names)}], {x.name})", x.shape)


def _calling(*ways: str) -> Callable[[Block], None]:
    """A function of one array, wrapped: `{fun}` is its name and `{x}` its operand."""

    def step(block: Block) -> None:
        x = block.operand()
        param = block.param(x.shape)
        lines, (out,) = block.body([param], _steps(block), [param])
        name = block.define([param], lines, out.name)
        block.let(block.rng.choice(ways).format(fun=name, x=x.name), x.shape)

    return step


def _shard_map(block: Block) -> None:
    """Collectives over one device: each is the identity, and its derivative another collective."""
    if block.program.mapped:  # JAX wants the inner one's mesh to be the context's
        return
    x = block.operand(lambda s: len(s) >= 1)
    param = block.param(x.shape)
    block.program.mapped = True
    lines, (out,) = block.body([param], _steps(block), [param])
    block.program.mapped = False
    collective, spec = block.rng.choice(
        [
            ("lax.psum({}, 'd')", "P()"),
            ("lax.pmean({}, 'd')", "P()"),
            ("lax.psum_scatter({}, 'd', tiled=True)", "P('d')"),
            ("lax.all_gather({}, 'd', tiled=True)", "P('d')"),
            ("lax.ppermute({}, 'd', [(0, 0)])", "P('d')"),
        ]
    )
    name = block.define([param], lines, collective.format(out.name))
    # With check_vma JAX itself refuses some of the steps inside.
    options = f"mesh=mesh, in_specs=P('d'), out_specs={spec}, check_vma=False"
    block.let(f"jax.shard_map({name}, {options})({x.name})", x.shape)


_call = _calling(
    "jax.jit({fun})({x})",
    "jax.checkpoint({fun})({x})",
    "jax.checkpoint({fun}, policy=jax.checkpoint_policies.dots_saveable)({x})",
    "jax.checkpoint({fun}, policy=jax.checkpoint_policies.everything_saveable)({x})",
    "jax.checkpoint({fun}, policy=jax.checkpoint_policies.save_only_these_names('saved'))({x})",
    "jax.named_call({fun}, name='layer')({x})",
    "jax.vmap({fun})(jnp.stack([{x}, 0.5 * {x}]))[1]",
)
_differentiated = _calling(
    "jax.grad(lambda t: jnp.sum({fun}(t)))({x})",
    "jax.jvp({fun}, ({x},), (jnp.ones_like({x}),))[1]",
    "jax.vjp({fun}, {x})[1](jnp.ones_like({x}))[0]",
)


def _inner_grad(block: Block) -> None:
    loops, block.program.loops = block.program.loops, False
    lines, scope = list(block.lines), list(block.scope)
    _differentiated(block)
    if block.program.loops or block.program.backward_rule:  # no derivative of what it holds
        block.lines, block.scope = lines, scope
        block.scope[block.outer : block.outer] = []
        known = {v.name for v in block.scope}
        new = [v for v in block.program.inputs if v.name not in known]
        block.scope[:0] = new
        block.outer += len(new)
    block.program.loops = block.program.loops or loops


def _scope(block: Block) -> None:
    """A module's name, or a region that stays in float32."""
    x = block.operand()
    lines, (out,) = block.body([], _steps(block), [x])
    named = f"jax.named_scope('{block.program.fresh('scope')}')"
    block.lines.append(f"with {block.rng.choice([named, 'full_precision()'])}:")
    block.lines.extend(f"    {line}" for line in lines or ["pass"])
    block.let(f"{out.name} * 1.0", x.shape)


def _custom_jvp(block: Block) -> None:
    """A tanh whose derivative is another one: a rule that is lost shows."""
    x = block.operand()
    name = block.program.fresh("rule")
    block.lines += [
        "@jax.custom_jvp",
        f"def {name}(x):",
        "    return jnp.tanh(x)",
        f"@{name}.defjvp",
        f"def {name}_jvp(primals, tangents):",
        f"    return {name}(*primals), tangents[0] * 0.375",
    ]
    block.let(f"{name}({x.name})", x.shape)


def _custom_vjp(block: Block) -> None:
    """A straight-through rounding, or a clipped gradient."""
    x = block.operand()
    name = block.program.fresh("rule")
    forward, backward = block.rng.choice(
        [("jnp.sin(3.0 * x)", "ct"), ("x", "jnp.clip(ct, -0.5, 0.5)"), ("x * 2.0", "ct * res")]
    )
    block.program.backward_rule = True
    block.lines += [
        "@jax.custom_vjp",
        f"def {name}(x):",
        f"    return {forward}",
        f"def {name}_fwd(x):",
        f"    return {name}(x), x",
        f"def {name}_bwd(res, ct):",
        f"    return ({backward},)",
        f"{name}.defvjp({name}_fwd, {name}_bwd)",
    ]
    block.let(f"{name}({x.name})", x.shape)


_FLAT: tuple[tuple[Callable[[Block], None], int], ...] = (
    (_product, 9),
    (_same_shape(ops.UNARY), 8),
    (_same_shape(ops.BINARY), 6),
    (_along_axis, 4),
    (_move, 4),
    (_dropping_axis(ops.REDUCE, "f"), 3),
    (_same_shape(ops.WITH_BOOL), 2),
    (_same_shape(ops.TO_BOOL, "b"), 1),
    (_dropping_axis(ops.REDUCE_TO_INT, "i"), 1),
    (_integers, 1),
    (_from_integers, 1),
    (_sample, 1),
    (_half, 1),
    (_python_scalar, 1),
    (_custom_jvp, 1),
    (_custom_vjp, 1),
)
_BLOCKS: tuple[tuple[Callable[[Block], None], int], ...] = (
    (_call, 4),
    (_scan, 3),
    (_cond, 2),
    (_switch, 1),
    (_fori, 1),
    (_while, 1),
    (_scope, 2),
    (_shard_map, 1),
    (_inner_grad, 1),
)
_FLAT_WEIGHTS = [step for step, weight in _FLAT for _ in range(weight)]
_WEIGHTS = [step for step, weight in _FLAT + _BLOCKS for _ in range(weight)]


def random_program(rng: random.Random, steps: int = 8) -> Program:
    """Returns a program of a few steps, with at least one differentiable argument and result."""
    program = Program(seed=rng.randrange(1000))
    block = Block(program, rng, (_WEIGHTS, _FLAT_WEIGHTS))
    block.input(rng.choice(SHAPES))
    for steps_before_a_product in (rng.randint(0, 1), rng.randint(0, 2)):
        block.grow(steps_before_a_product)
        _product(block)
    block.grow(rng.randint(0, steps - 3))
    made = block.scope[block.outer :] or block.scope
    floats = [v for v in made if v.kind == "f"][-3:] or [block.operand()]
    others = [v for v in made if v.kind in "ib"][-2:]
    program.lines = [*block.lines, f"return ({', '.join(v.name for v in floats + others)},)"]
    return program
