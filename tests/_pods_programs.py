"""Train steps of different make, right ones and with a mistake each, for `pods.check`.

Every program is a function of a topology and of the name of a mistake, or none; it returns a step
and its arguments. They are small: what is looked at is what they send, not how much.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
import mpjax.pods

PROGRAMS: dict[str, Callable[..., Any]] = {}
WIDTH, ROWS = 64, 32


def program(fun: Callable[..., Any]) -> Callable[..., Any]:
    PROGRAMS[fun.__name__] = fun
    return fun


def check(name: str, topology: str, mistake: str | None = None) -> mpjax.pods.Report:
    """Returns the report on a program."""
    target = mpjax.pods.get_topology(topology)
    step, args = PROGRAMS[name](target, mistake)
    return mpjax.pods.check(step, args, target, policy="bf16-mixed")


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def on(mesh: Any, specs: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))


def momentum(params: Any, trace: Any, grads: Any) -> tuple[Any, Any]:
    """Returns parameters and momentum after a step; in plain lists, as scripts have them."""
    trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, grads)
    return jax.tree.map(lambda p, t: p - 0.1 * t, params, trace), trace


def low(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


# -- a convolutional network, data parallel --------------------------------------------------------


def cnn_loss(params: Any, images: Any) -> Any:
    x = images
    for kernel in params["convolutions"]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return jnp.mean((jnp.mean(x, (1, 2)) @ params["dense"]) ** 2)


CNN = {"convolutions": [spec(3, 3, 8, 16), spec(3, 3, 16, 16)], "dense": spec(16, 16)}


@program
def cnn(topology: Any, mistake: str | None) -> Any:
    """Under shard_map, with autocast inside; gradients are averaged by hand."""
    mesh = topology.make_mesh({"data": -1})
    grad = jax.grad(mpjax.autocast(cnn_loss, "bf16-mixed"))

    def reduced(grads: Any) -> Any:
        if mistake == "never reduced":
            return grads
        if mistake == "one is never reduced":
            return grads | {"convolutions": jax.lax.pmean(grads["convolutions"], "data")}
        if mistake == "reduced in bf16":
            return jax.tree.map(lambda g: jax.lax.pmean(g, "data").astype(jnp.float32), low(grads))
        return jax.lax.pmean(grads, "data")

    def local(params: Any, trace: Any, images: Any) -> Any:
        if mistake == "reduced in each micro-batch":
            grads = micro(lambda x: reduced(grad(params, x)), images)
        elif mistake == "micro-batches, right":
            grads = reduced(micro(lambda x: grad(params, x), images))
        else:
            grads = reduced(grad(params, images))
        if mistake == "a local decision":
            finite = jnp.all(jnp.isfinite(images))  # each device judges its own rows
            grads = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
        return momentum(params, trace, grads)

    batch = P() if mistake == "whole batch" else P("data")
    specs = (P(), P(), batch)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def step(state: Any, images: Any) -> Any:
        return mapped(*state, images)

    args = ((CNN, CNN), spec(ROWS, 8, 8, 8))
    return jax.jit(step, donate_argnums=0), mpjax.pods.with_sharding(args, (P(), batch), mesh)


def micro(grad: Callable[..., Any], batch: Any) -> Any:
    """Returns the sum of gradients over four micro-batches, in a loop."""
    parts = batch.reshape(4, -1, *batch.shape[1:])
    shapes = jax.eval_shape(grad, parts[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = functools.partial(jax.tree.map, jnp.add)
    return jax.lax.scan(lambda g, x: (add(g, grad(x)), None), zeros, parts)[0]


@program
def cnn_jit(topology: Any, mistake: str | None) -> Any:
    """The same as `make_train_step` has it: jit with a sharded batch, and autocast."""
    mesh = topology.make_mesh({"data": -1})
    step = mpjax.make_train_step(cnn_loss, optax.sgd(0.1, momentum=0.9), "bf16-mixed")
    state = jax.eval_shape(step.init, CNN)
    batch = P() if mistake == "whole batch" else P("data")
    args = (state, spec(ROWS, 8, 8, 8))
    return step, mpjax.pods.with_sharding(args, (P(), batch), mesh)


# -- a transformer's layers, data and tensor parallel ----------------------------------------------

LAYERS = {"up": (3, WIDTH, 4 * WIDTH), "down": (3, 4 * WIDTH, WIDTH)}
TENSOR = {"up": P(None, None, "tensor"), "down": P(None, "tensor")}


@program
def transformer(topology: Any, mistake: str | None) -> Any:
    """Under shard_map: hidden units are split, a sum over them ends each layer."""
    mesh = topology.make_mesh({"data": 4, "tensor": 2})

    def layer(x: Any, w: Any) -> Any:
        if mistake == "activations gathered whole":
            whole = jax.lax.all_gather(x, "data", tiled=True)
            start = jax.lax.axis_index("data") * x.shape[0]
            x = jax.lax.dynamic_slice_in_dim(jnp.tanh(whole), start, x.shape[0])
        out = jnp.tanh(x @ w["up"]) @ w["down"]
        if mistake == "activations in f32":
            out = jax.lax.psum(out.astype(jnp.float32), "tensor").astype(jnp.bfloat16)
        else:
            out = jax.lax.psum(out, "tensor")
        return x + out, None

    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), low(params))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def local(params: Any, x: Any) -> Any:
        varying = jax.tree.map(lambda w: jax.lax.pcast(w, "data", to="varying"), params)
        grads = jax.grad(loss)(varying, x)
        if mistake != "never reduced":
            grads = jax.lax.pmean(grads, "data")
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    specs = (TENSOR, P("data"))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=TENSOR, check_vma=mistake is None
    )
    params = jax.tree.map(lambda s: spec(*s), LAYERS, is_leaf=lambda s: isinstance(s, tuple))
    args = mpjax.pods.with_sharding((params, spec(8 * ROWS, WIDTH)), specs, mesh)
    return jax.jit(mapped, donate_argnums=0), args


# -- what jit lays out from shardings --------------------------------------------------------------

MLP = {"first": spec(WIDTH, 4 * WIDTH), "second": spec(4 * WIDTH, WIDTH)}


def mlp_loss(params: Any, x: Any) -> Any:
    return jnp.mean((jax.nn.relu(x @ params["first"]) @ params["second"]) ** 2)


@program
def fsdp(topology: Any, mistake: str | None) -> Any:
    """Weights and momentum split over all devices; the momentum is a list beside them."""
    mesh = topology.make_mesh({"fsdp": -1})
    stored = jax.tree.map(lambda _: NamedSharding(mesh, P("fsdp")), MLP)

    def loss(params: Any, x: Any) -> Any:
        if mistake != "left to the compiler":
            params = mpjax.pods.gather_constraint(params, stored, "bf16-mixed")
        return mlp_loss(params, x)

    def step(state: Any, x: Any) -> Any:
        params, trace = state
        grad = jax.grad(mpjax.autocast(loss, "bf16-mixed"))
        grads = grad(params, x)
        params, trace = momentum(params, dict(zip(params, trace, strict=True)), grads)
        return (params, [*trace.values()])

    whole = mistake == "momentum in a list, whole"
    specs = (jax.tree.map(lambda _: P("fsdp"), MLP), [P() if whole else P("fsdp")] * 2)
    state = (MLP, [*MLP.values()])
    donated = () if mistake == "not donated" else (0,)
    jitted = jax.jit(step, donate_argnums=donated, out_shardings=on(mesh, specs))
    batch = P() if mistake == "whole batch" else P("fsdp")
    args = mpjax.pods.with_sharding((state, spec(8 * ROWS, WIDTH)), (specs, batch), mesh)
    return jitted, args


@program
def optimizer_shards(topology: Any, mistake: str | None) -> Any:
    """Whole weights, of which each device updates its part: their momentum is split."""
    mesh = topology.make_mesh({"data": -1})

    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(mpjax.autocast(mlp_loss, "bf16-mixed"))(state["params"], x)
        params, trace = momentum(state["params"], state["trace"], grads)
        return {"params": params, "trace": trace}

    specs = {"params": jax.tree.map(lambda _: P(), MLP)}
    specs["trace"] = jax.tree.map(lambda _: P("data"), MLP)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=on(mesh, specs))
    state = {"params": MLP, "trace": MLP}
    args = mpjax.pods.with_sharding((state, spec(ROWS, WIDTH)), (specs, P("data")), mesh)
    return jitted, args


@program
def two_networks(topology: Any, mistake: str | None) -> Any:
    """A student and a teacher whose weights do not change: they are no state, nor a batch."""
    mesh = topology.make_mesh({"data": -1})

    def loss(params: Any, teacher: Any, x: Any) -> Any:
        return jnp.mean((x @ params["first"] - x @ teacher["first"]) ** 2)

    def step(params: Any, teacher: Any, x: Any) -> Any:
        grads = jax.grad(mpjax.autocast(loss, "bf16-mixed"))(params, teacher, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"first": MLP["first"]}
    teacher = {"first": MLP["first"], "unused": spec(2)}
    args = (params, teacher, spec(ROWS, WIDTH))
    return jax.jit(step, donate_argnums=0), mpjax.pods.with_sharding(
        args, (P(), P(), P("data")), mesh
    )


# -- libraries -------------------------------------------------------------------------------------


@program
def equinox(topology: Any, mistake: str | None) -> Any:
    """An Equinox network under shard_map, weights gathered whole by `mpjax.pods.gather`."""
    import equinox as eqx

    mesh = topology.make_mesh({"data": 2, "fsdp": 4})
    model = eqx.filter_eval_shape(eqx.nn.MLP, WIDTH, 64, 128, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    specs = jax.tree.map(lambda x: P("fsdp"), params)
    axes = ("data", "fsdp")

    def loss(shards: Any, x: Any) -> Any:
        if mistake == "gathered in f32":
            whole = jax.tree.map(lambda w: jax.lax.all_gather(w, "fsdp", tiled=True), shards)
            whole = low(jax.tree.map(lambda w: w - jnp.mean(w), whole))
        else:
            whole = mpjax.pods.gather(shards, specs, "bf16-mixed", axis_name=axes, reduce="mean")
        y = jax.vmap(eqx.combine(whole, static))(x.astype(jnp.bfloat16))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def local(shards: Any, x: Any) -> Any:
        grads = jax.grad(loss)(shards, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, shards, grads)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, P(axes)), out_specs=specs, check_vma=mistake is None
    )
    args = mpjax.pods.with_sharding((params, spec(ROWS, WIDTH)), (specs, P(axes)), mesh)
    return jax.jit(mapped, donate_argnums=0), args


@program
def flax(topology: Any, mistake: str | None) -> Any:
    """A linen network with dropout and Adam, laid out by jit over data and tensor."""
    from flax import linen

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            y = jax.nn.relu(linen.Dense(4 * WIDTH, name="up")(x))
            y = linen.Dense(WIDTH, name="down")(linen.Dropout(0.1, deterministic=False)(y))
            return linen.Dense(WIDTH, name="head")(y)

    mesh = topology.make_mesh({"data": 4, "tensor": 2})
    network, tx = Network(), optax.adam(1e-3)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(network.init, keys, spec(8, WIDTH))["params"]

    def loss(params: Any, x: Any, key: Any) -> Any:
        return jnp.mean(network.apply({"params": params}, x, rngs={"dropout": key}) ** 2)

    def step(state: Any, x: Any, key: Any) -> Any:
        grads = jax.grad(mpjax.autocast(loss, "bf16-mixed"))(state["params"], x, key)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    split = {"up": {"kernel": P(None, "tensor"), "bias": P("tensor")}}
    split |= {"down": {"kernel": P("tensor"), "bias": P()}}
    split |= {name: jax.tree.map(lambda _: P(), params[name]) for name in {*params} - {*split}}
    split = {name: split[name] for name in params}
    opt_state = jax.eval_shape(tx.init, params)
    held = jax.tree.map(lambda _: P(), split) if mistake == "moments are whole" else split
    opt_specs = optax.tree.map_params(
        tx, lambda _, s: s, opt_state, held, transform_non_params=lambda _: P()
    )
    specs = {"params": split, "opt_state": opt_specs}
    donated = () if mistake == "not donated" else (0,)
    jitted = jax.jit(step, donate_argnums=donated, out_shardings=on(mesh, specs))
    key = jax.eval_shape(jax.random.key, 0)
    args = ({"params": params, "opt_state": opt_state}, spec(ROWS, WIDTH), key)
    return jitted, mpjax.pods.with_sharding(args, (specs, P("data"), P()), mesh)


# -- work that is split otherwise ------------------------------------------------------------------


def used(received: Any) -> Any:
    """Computes with what was sent and casts then: a cast alone XLA moves to before the sending."""
    return (received - jnp.mean(received)).astype(jnp.bfloat16)


@program
def pipeline(topology: Any, mistake: str | None) -> Any:
    """Each device along `stage` has a layer, and hands its result to the next."""
    mesh = topology.make_mesh({"data": 2, "stage": 4})
    ring = [(i, (i + 1) % 4) for i in range(4)]
    sent = jnp.float32 if mistake == "activations in f32" else jnp.bfloat16

    def loss(w: Any, x: Any) -> Any:
        carried = jnp.zeros_like(x[0])
        total = jnp.zeros((), jnp.float32)
        for turn in range(7):  # four micro-batches through four stages
            first = jax.lax.axis_index("stage") == 0
            given = jnp.where(first, x[min(turn, 3)], carried)
            y = jnp.tanh(jnp.matmul(given, low(w[0]), preferred_element_type=sent))
            last = (jax.lax.axis_index("stage") == 3) & (turn >= 3)
            total += jnp.where(last, jnp.mean(y.astype(jnp.float32) ** 2), 0.0)
            carried = used(jax.lax.ppermute(y, "stage", ring))
        return total

    def local(w: Any, x: Any) -> Any:
        parts = x.reshape(4, -1, WIDTH).astype(jnp.bfloat16)
        grad = jax.grad(loss)(w, parts)
        return w - 0.1 * (grad if mistake == "never reduced" else jax.lax.pmean(grad, "data"))

    specs = (P("stage"), P("data"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("stage"), check_vma=False)
    args = mpjax.pods.with_sharding((spec(4, WIDTH, WIDTH), spec(ROWS, WIDTH)), specs, mesh)
    return jax.jit(mapped, donate_argnums=0), args


@program
def experts(topology: Any, mistake: str | None) -> Any:
    """Each device has an expert; rows are sent to theirs and back, and the router is whole."""
    mesh = topology.make_mesh({"expert": -1})
    sent = jnp.float32 if mistake == "rows are sent in f32" else jnp.bfloat16

    def loss(params: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ params["router"]).astype(sent)
        rows = gates.T[:, :, None] * x.astype(sent)
        theirs = used(jax.lax.all_to_all(rows, "expert", 0, 1, tiled=True))
        made = jnp.matmul(theirs, low(params["expert"]), preferred_element_type=sent)
        back = jax.lax.all_to_all(jnp.tanh(made), "expert", 1, 0, tiled=True)
        return jnp.mean(jnp.sum(back, 0).astype(jnp.float32) ** 2)

    def local(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        if mistake != "router is never reduced":
            grads["router"] = jax.lax.pmean(grads["router"], "expert")
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    own = {"expert": P("expert"), "router": P()}
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(own, P("expert")), out_specs=own, check_vma=False
    )
    count = topology.num_devices
    params = {"expert": spec(count, WIDTH, WIDTH), "router": spec(WIDTH, count)}
    args = mpjax.pods.with_sharding((params, spec(8 * ROWS, WIDTH)), (own, P("expert")), mesh)
    return jax.jit(mapped, donate_argnums=0), args


@program
def context(topology: Any, mistake: str | None) -> Any:
    """Time is split, and keys and values are gathered over it: none of it is the batch."""
    mesh = topology.make_mesh({"data": 2, "time": 4})

    def loss(params: Any, x: Any) -> Any:
        x = x.astype(jnp.bfloat16)
        wide = jnp.float32 if mistake == "keys are gathered in f32" else jnp.bfloat16
        q, k, v = (jnp.matmul(x, w, preferred_element_type=wide) for w in low(params))
        k, v = (used(jax.lax.all_gather(y, "time", axis=1, tiled=True)) for y in (k, v))
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", low(q), k).astype(jnp.float32))
        return jnp.mean(jnp.einsum("bts,bsd->btd", weights.astype(jnp.bfloat16), v) ** 2)

    def local(params: Any, x: Any) -> Any:
        axes = ("data",) if mistake == "reduced over one axis" else ("data", "time")
        grads = jax.grad(lambda p, x: loss(p, x).astype(jnp.float32))(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * jax.lax.pmean(g, axes), params, grads)

    specs = ([P()] * 3, P("data", "time"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    shapes = ([spec(WIDTH, WIDTH)] * 3, spec(8, 4 * ROWS, WIDTH))
    args = mpjax.pods.with_sharding(shapes, specs, mesh)
    return jax.jit(mapped, donate_argnums=0), args
