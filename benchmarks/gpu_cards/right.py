"""Card 1: whether the device computes what it should; each row says `right`, true or false."""

import collections
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measure.errors import LOSS_SCALE
from measure.variants import autocast, hand_cast
from networks import NETWORKS, Network

import mpjax
from mpjax import optim

from .jobs import Job, Row, attempted
from .plans import Plan

WORST = 1.25  # autocast's gradient error beside that of a cast by hand: more is wrong
RECIPES: dict[str, Any] = {
    "bf16-mixed": "bf16-mixed",
    "16-mixed": "16-mixed",
    **{
        recipe.__name__: mpjax.QuantizedPolicy("bf16-mixed", recipe())
        for recipe in (
            *(mpjax.Int8CurrentScaling, mpjax.Float8CurrentScaling, mpjax.DelayedScaling),
            *(mpjax.Float8BlockScaling, mpjax.MXFP8BlockScaling),
        )
    },
}
OWNERS: dict[str, Callable[[Any], Any]] = {
    "master weights": optim.with_master_weights,
    "24 bits": functools.partial(optim.with_master_weights, bits=24),
    "kahan": optim.with_kahan,
    "stochastic": optim.with_stochastic_rounding,
}
# Where a thousand steps of a thousandth, from 1, must end; of 1024 stochastic ones the mean.
END, WITHIN = 2.0, 2.0**-6
# How many products of three layers have two 8-bit operands: the middle one's, but int8's last.
EIGHT_BIT = {"Int8CurrentScaling": 2, "Float8CurrentScaling": 3, "DelayedScaling": 3}
_PRODUCT = re.compile(r" (?:dot|custom-call)\(([^)]*)\)(?=.*(?:contracting|cublas))")
_VALUE = re.compile(r"(%?[\w.\-]+) = \(?(\w+)\[")
_EIGHT = re.compile(r"f8\w+|s8")


def jobs(plan: Plan, code: str) -> list[Job]:
    """Returns a job for each check, and one a network for its gradients."""
    rows = 2048 if plan.size == "full" else 256
    return [
        _check("skipped step", {"bit-equal": _skipped, "each leaf": _each_leaf}, code),
        _check("NaN and inf", {n: functools.partial(_seen, p) for n, p in RECIPES.items()}, code),
        _check("roundings", {n: functools.partial(_rounded, w) for n, w in OWNERS.items()}, code),
        _check(
            "8-bit products",
            {
                name: functools.partial(_multiplied, name, policy, rows)
                for name, policy in RECIPES.items()
                if not isinstance(policy, str)
            },
            code,
        ),
        *(_gradients(plan, name, code) for name in plan.right),
    ]


def _check(name: str, variants: dict[str, Callable[[], Row]], code: str) -> Job:
    def measure(prepared: dict[str, Any]) -> dict[str, Any]:
        return prepared

    return Job(1, name, "tiny", tuple(variants), dict(variants), measure, code, 15.0)


def host() -> Any:
    """Returns a context in which the host computes."""
    return jax.default_device(jax.devices("cpu")[0])


# -- gradients -----------------------------------------------------------------------------------


def _gradients(plan: Plan, name: str, code: str) -> Job:
    network = NETWORKS[name]("tiny")
    ways = {"hand cast": hand_cast, "autocast": autocast}
    losses = {f"{dtype} {w}": (way, dtype) for dtype in ("bf16", "f16") for w, way in ways.items()}
    exact = "float64"
    prepare: dict[str, Callable[[], Any]] = {
        variant: functools.partial(_grads, network, way(network, dtype), plan.seeds)
        for variant, (way, dtype) in losses.items()
    }
    prepare[exact] = functools.partial(_exact, network, plan.seeds)

    def measure(prepared: dict[str, Any]) -> dict[str, Any]:
        wanted = prepared.pop(exact)
        if isinstance(wanted, Exception):
            raise wanted
        grads = {n: r if isinstance(r, Exception) else attempted(r) for n, r in prepared.items()}
        rows: dict[str, Any] = {
            variant: g if isinstance(g, Exception) else {"errors": _errors(g, wanted)}
            for variant, g in grads.items()
        }
        for dtype in ("bf16", "f16"):
            _judge(rows[f"{dtype} autocast"], rows[f"{dtype} hand cast"])
        return rows

    return Job(1, name, "tiny", tuple(losses), prepare, measure, code, 20.0)


def values(network: Network, seed: int) -> Any:
    """Returns parameters and a batch as the host draws them: a GPU rounds some otherwise."""
    with host():
        return jax.tree.map(np.asarray, network.values(seed))


def _grads(network: Network, loss: Any, seeds: int) -> Callable[[], list[Any]]:
    """Returns what computes gradients on the device for each seed, compiled.

    Not run here, in a thread: on an H200 cuDNN's attention failed in one ("capturing stream has
    unjoined work") and the program beside it had a NaN.
    """
    drawn = [values(network, seed) for seed in range(seeds)]
    scaled = jax.jit(jax.grad(lambda p, b: loss(p, b) * LOSS_SCALE)).lower(*drawn[0]).compile()

    def run() -> list[Any]:
        grads = [scaled(*given) for given in drawn]
        return [jax.tree.map(lambda g: np.asarray(g, np.float64) / LOSS_SCALE, g) for g in grads]

    return run


def _exact(network: Network, seeds: int) -> list[Any]:
    """Returns them in float64, from the host."""
    drawn = [values(network, seed) for seed in range(seeds)]
    with host(), jax.enable_x64(True):
        grad = jax.jit(jax.grad(network.written(jnp.float64)))
        wide = ((jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), p), b) for p, b in drawn)
        return [jax.tree.map(np.asarray, grad(*args)) for args in wide]


def _errors(grads: list[Any], exact: list[Any]) -> list[float]:
    def norm(leaves: list[Any]) -> float:
        return math.sqrt(sum(float(np.sum(np.square(x))) for x in leaves))

    pairs = [(jax.tree.leaves(a), jax.tree.leaves(b)) for a, b in zip(grads, exact, strict=True)]
    return [
        norm([x - y for x, y in zip(low, full, strict=True)]) / norm(full) for low, full in pairs
    ]


def _judge(ours: Any, hand: Any) -> None:
    """Says whether autocast's errors are those of a cast by hand."""
    if isinstance(ours, Exception) or isinstance(hand, Exception):
        return
    logs = [math.log(a / b) for a, b in zip(ours["errors"], hand["errors"], strict=True)]
    ours["ratio"] = math.exp(sum(logs) / len(logs))
    hand["right"] = bool(np.isfinite(hand["errors"]).all())
    ours["right"] = bool(ours["ratio"] <= WORST)  # not of a NaN


# -- skips and roundings -------------------------------------------------------------------------


def _skipped() -> Row:
    """Runs a step with an inf in its batch: it must leave all but the loss scale as it was."""
    network = NETWORKS["mlp"]("tiny")
    params, batch = values(network, 0)
    step = mpjax.make_train_step(network.loss, optax.adamw(1e-3), "16-mixed", donate=False)
    state, _ = step(step.init(params), batch)
    bad = {**batch, "x": np.where(np.arange(batch["x"].shape[1]) == 3, np.inf, batch["x"])}
    after, metrics = step(state, {**bad, "x": bad["x"].astype(np.float32)})
    kept = [(s.params, s.opt_state.inner_state) for s in (state, after)]
    same = _same_bits(*kept)
    halved = float(after.opt_state.loss_scale / state.opt_state.loss_scale)
    skipped = not bool(metrics["grads_finite"])
    return {"right": same and skipped and halved == 0.5, "same": same, "scale_by": halved}


def _each_leaf() -> Row:
    """Plants a NaN or inf in each gradient alone, which share kernels: that leaf must be named."""
    random = np.random.default_rng(3)
    shapes = {"weight": (768, 513), "wide": (64, 12, 64), "bias": (768,), "short": (7,)}
    layers = [{n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()}] * 6
    params = {f"layer{i}": jax.tree.map(np.copy, layer) for i, layer in enumerate(layers)}
    tx = mpjax.with_loss_scale(optax.sgd(1.0), 1.0)
    flags = jax.jit(lambda grads, state: tx.update(grads, state, params)[1].leaf_finite)
    state, missed = tx.init(params), []
    leaves, structure = jax.tree.flatten(params)
    for place, leaf in enumerate(leaves):
        for value in (np.nan, np.inf, -np.inf):
            spoilt = leaf.copy()
            spoilt.reshape(-1)[random.integers(leaf.size)] = value
            given = structure.unflatten([*leaves[:place], spoilt, *leaves[place + 1 :]])
            if np.flatnonzero(~np.asarray(flags(given, state))).tolist() != [place]:
                missed.append(f"{value} in {place}")
    return {"right": not missed, "missed": ", ".join(missed)}


def _same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def _rounded(wrap: Any) -> Row:
    """Runs an optimizer that keeps what bfloat16 cannot: on the device, and on the host."""
    tx = wrap(optax.sgd(1.0))

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(optax.apply_updates, params, updates), state

    @functools.partial(jax.jit, static_argnums=3)
    def many(params: Any, state: Any, grads: Any, count: int) -> Any:
        def body(carry: Any, _: None) -> Any:
            return step(*carry, grads), None

        return jax.lax.scan(body, (params, state), None, count)[0]

    ones, grads = jnp.ones(1024, jnp.bfloat16), np.full(1024, -1e-3, np.float32)
    end = np.asarray(many(ones, tx.init(ones), grads, 1000)[0], np.float64)
    same = _same_bits(*(_random_steps(tx, step, where) for where in (jax.devices()[0], None)))
    off = abs(float(end.mean()) - END)
    return {"right": same and off <= WITHIN, "as_on_the_host": same, "off": off}


def _random_steps(tx: Any, step: Any, device: Any) -> Any:
    """Returns where steps of every size end, on a device or on the host."""
    random, count = np.random.default_rng(5), 50_000
    size = np.ldexp(random.choice([-1, 1], count), random.integers(-13, 15, count))
    start = (size * random.uniform(1, 2, count)).astype(np.float32)
    steps = size * np.ldexp(random.normal(size=count), random.integers(-24, 1, count))
    with host() if device is None else jax.default_device(device):
        params = jnp.asarray(start).astype(jnp.bfloat16)
        state = tx.init(params)
        for grads in (steps, steps[::-1], -steps):
            params, state = step(params, state, grads.astype(np.float32))
        return params, state


# -- 8 bits --------------------------------------------------------------------------------------


def three(params: Any, x: jax.Array) -> jax.Array:
    """Returns a loss of three layers: the middle one is what recipes multiply in 8 bits."""
    for name in ("first", "middle", "last"):
        x = jax.nn.relu(x @ params[name])
    return jnp.mean(x**2)


def _inputs(rows: int) -> tuple[Any, Any]:
    random, width = np.random.default_rng(0), max(256, rows // 2)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32)

    return {n: normal(width, width) for n in ("first", "middle", "last")}, normal(rows, width)


def _gradient(policy: Any, params: Any, x: Any) -> Callable[[Any, Any], Any]:
    """Returns the gradient of the three layers under a policy."""
    if getattr(getattr(policy, "recipe", None), "has_history", False):
        fast = mpjax.with_amax_history(three, policy)
        history = fast.init(params, x)
        grad = jax.grad(fast.apply, argnums=(0, 1))
        return lambda params, x: grad(history, params, x)
    return jax.grad(mpjax.autocast(three, policy))


def _seen(policy: Any) -> Row:
    """Plants NaN and inf in the input and in the middle weight: gradients must not be finite."""
    params, x = _inputs(256)
    run = jax.jit(lambda p, x: mpjax.all_finite(_gradient(policy, params, x0)(p, x)))
    x0 = x
    missed = []
    for value in (np.nan, np.inf, -np.inf):
        for place in ("input", "weight"):
            p, y = {n: w.copy() for n, w in params.items()}, x.copy()
            (y if place == "input" else p["middle"])[7, 11] = value
            if run(p, y):
                missed.append(f"{value} in {place}")
    clean = bool(run(params, x))
    return {"right": clean and not missed, "clean": clean, "missed": ", ".join(missed)}


def _multiplied(name: str, policy: Any, rows: int) -> Row:
    """Counts the products that the device really multiplies in 8 bits."""
    params, x = _inputs(rows)
    text = jax.jit(_gradient(policy, params, x)).lower(params, x).compile().as_text()
    types = dict(_VALUE.findall(text))
    found: collections.Counter[str] = collections.Counter()
    for operands in _PRODUCT.findall(text):
        read = [types.get(operand.strip().split(" ")[-1], "?") for operand in operands.split(",")]
        found[" × ".join(read[:2])] += 1
    eight = sum(n for read, n in found.items() if len(_EIGHT.findall(read)) == 2)
    row: Row = {"eight_bit": eight, "products": dict(found)}
    if jax.devices()[0].platform == "cpu":
        return {**row, "note": "a CPU multiplies in more: not judged"}
    if name not in EIGHT_BIT:
        return {**row, "note": "scales of blocks are applied to wider values: not judged"}
    return {**row, "right": eight >= EIGHT_BIT[name]}
