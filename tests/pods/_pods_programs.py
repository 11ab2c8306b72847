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


def program(fun):
    PROGRAMS[fun.__name__] = fun
    return fun


def check(name, topology, mistake=None):
    """Returns the report on a program."""
    target = mpjax.pods.get_topology(topology)
    step, args = PROGRAMS[name](target, mistake)
    return mpjax.pods.check(step, args, target, policy="bf16-mixed")


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def on(mesh, specs):
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))


def momentum(params, trace, grads):
    """Returns parameters and momentum after a step; in plain lists, as scripts have them."""
    trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, grads)
    return descend(params, trace), trace


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def mapped_step(local, mesh, specs, out, args, *, vma=False):
    """Returns a step that each device runs on its part, with its state donated, and arguments."""
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=vma)
    return jax.jit(mapped, donate_argnums=0), mpjax.pods.with_sharding(args, specs, mesh)


def low(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


# -- a convolutional network, data parallel --------------------------------------------------------


def cnn_loss(params, images):
    x = images
    for kernel in params["convolutions"]:
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return jnp.mean((jnp.mean(x, (1, 2)) @ params["dense"]) ** 2)


CNN = {"convolutions": [spec(3, 3, 8, 16), spec(3, 3, 16, 16)], "dense": spec(16, 16)}


@program
def cnn(topology, mistake):
    """Under shard_map, with autocast inside; gradients are averaged by hand."""
    mesh = topology.make_mesh({"data": -1})
    grad = jax.grad(mpjax.autocast(cnn_loss, "bf16-mixed"))

    def reduced(grads):
        if mistake == "never reduced":
            return grads
        if mistake == "one is never reduced":
            return grads | {"convolutions": jax.lax.pmean(grads["convolutions"], "data")}
        if mistake == "reduced in bf16":
            return jax.tree.map(lambda g: jax.lax.pmean(g, "data").astype(jnp.float32), low(grads))
        return jax.lax.pmean(grads, "data")

    def local(params, trace, images):
        if mistake == "reduced in each micro-batch":
            grads = micro(lambda x: reduced(grad(params, x)), images)
        else:
            grads = reduced(grad(params, images))
        if mistake == "a local decision":
            finite = jnp.all(jnp.isfinite(images))  # each device judges its own rows
            grads = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
        return momentum(params, trace, grads)

    batch = P() if mistake == "whole batch" else P("data")
    specs = (P(), P(), batch)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def step(state, images):
        return mapped(*state, images)

    args = ((CNN, CNN), spec(ROWS, 8, 8, 8))
    return jax.jit(step, donate_argnums=0), mpjax.pods.with_sharding(args, (P(), batch), mesh)


def micro(grad, batch):
    """Returns the sum of gradients over four micro-batches, in a loop."""
    parts = batch.reshape(4, -1, *batch.shape[1:])
    shapes = jax.eval_shape(grad, parts[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    add = functools.partial(jax.tree.map, jnp.add)
    return jax.lax.scan(lambda g, x: (add(g, grad(x)), None), zeros, parts)[0]


@program
def cnn_jit(topology, mistake):
    """The same as `make_train_step` has it: jit with a sharded batch, and autocast."""
    mesh = topology.make_mesh({"data": -1})
    step = mpjax.make_train_step(cnn_loss, optax.sgd(0.1, momentum=0.9), "bf16-mixed")
    state = jax.eval_shape(step.init, CNN)
    batch = P() if mistake == "whole batch" else P("data")
    args = (state, spec(ROWS, 8, 8, 8))
    return step, mpjax.pods.with_sharding(args, (P(), batch), mesh)


@program
def dropout(topology, mistake):
    """Under shard_map: devices along `data` drop other units, by keys of their own."""
    mesh = topology.make_mesh({"data": 4, "tensor": 2})

    def local(params, key, x):
        key, of_step = jax.random.split(key)
        own = jax.random.fold_in(of_step, jax.lax.axis_index("data"))

        def loss(params, x):
            hidden = jax.nn.relu(x.astype(jnp.bfloat16) @ low(params["first"]))
            kept = jax.random.bernoulli(own, 0.5, hidden.shape)
            out = jnp.where(kept, hidden, 0) @ low(params["second"])
            return jnp.mean(jax.lax.psum(out, "tensor").astype(jnp.float32) ** 2)

        varying = jax.tree.map(lambda w: jax.lax.pcast(w, "data", to="varying"), params)
        grads = jax.lax.pmean(jax.grad(loss)(varying, x), "data")
        return descend(params, grads), own if mistake == "own key is kept" else key

    layout = {"first": P(None, "tensor"), "second": P("tensor")}, P()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(*layout, P("data")), out_specs=layout, check_vma=not mistake
    )

    def step(state, x):
        return mapped(*state, x)

    args = (MLP, jax.eval_shape(lambda: jax.random.key(0))), spec(ROWS, WIDTH)
    specs = layout, P("data")
    return jax.jit(step, donate_argnums=0), mpjax.pods.with_sharding(args, specs, mesh)


# -- a transformer's layers, data and tensor parallel ----------------------------------------------

LAYERS = {"up": (3, WIDTH, 4 * WIDTH), "down": (3, 4 * WIDTH, WIDTH)}
TENSOR = {"up": P(None, None, "tensor"), "down": P(None, "tensor")}


@program
def transformer(topology, mistake):
    """Under shard_map: hidden units are split, a sum over them ends each layer."""
    mesh = topology.make_mesh({"data": 4, "tensor": 2})

    def layer(x, w):
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

    def loss(params, x):
        x, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), low(params))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def local(params, x):
        varying = jax.tree.map(lambda w: jax.lax.pcast(w, "data", to="varying"), params)
        grads = jax.grad(loss)(varying, x)
        if mistake != "never reduced":
            grads = jax.lax.pmean(grads, "data")
        return descend(params, grads)

    params = jax.tree.map(lambda s: spec(*s), LAYERS, is_leaf=lambda s: isinstance(s, tuple))
    args = params, spec(8 * ROWS, WIDTH)
    return mapped_step(local, mesh, (TENSOR, P("data")), TENSOR, args, vma=mistake is None)


# -- what jit lays out from shardings --------------------------------------------------------------

MLP = {"first": spec(WIDTH, 4 * WIDTH), "second": spec(4 * WIDTH, WIDTH)}


def mlp_loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["first"]) @ params["second"]) ** 2)


@program
def fsdp(topology, mistake):
    """Weights and momentum split over all devices; the momentum is a list beside them."""
    mesh = topology.make_mesh({"fsdp": -1})
    stored = jax.tree.map(lambda _: NamedSharding(mesh, P("fsdp")), MLP)

    def loss(params, x):
        return mlp_loss(mpjax.pods.gather_constraint(params, stored, "bf16-mixed"), x)

    def step(state, x):
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


SQUARES = {name: {"kernel": spec(4 * WIDTH, 4 * WIDTH)} for name in ("split", "turned", "whole")}
LAID = {"split": P("fsdp", "tensor"), "turned": P("tensor", "fsdp"), "whole": P()}


@program
def laid_out(topology, mistake):
    """Weights of one shape, each laid out in its own way, and its momentum as the weight is."""
    mesh = topology.make_mesh({"fsdp": 4, "tensor": 2})
    specs = {"params": {name: {"kernel": LAID[name]} for name in LAID}}
    specs["trace"] = jax.tree.map(lambda s: s, specs["params"], is_leaf=lambda s: isinstance(s, P))
    wrong = {"momentum on fewer axes": P(None, "tensor"), "momentum turned": P("tensor", "fsdp")}
    if mistake:
        specs["trace"]["split"]["kernel"] = wrong[mistake]

    def loss(params, x):
        low = mpjax.pods.gather_constraint(params, on(mesh, specs["params"]), "bf16-mixed")
        for name in LAID:
            x = jnp.tanh(x @ low[name]["kernel"])
        return jnp.mean(x**2)

    def step(state, x):
        grads = jax.grad(mpjax.autocast(loss, "bf16-mixed"))(state["params"], x)
        params, trace = momentum(state["params"], state["trace"], grads)
        return {"params": params, "trace": trace}

    jitted = jax.jit(step, donate_argnums=0, out_shardings=on(mesh, specs))
    state = {"params": SQUARES, "trace": SQUARES}
    batch = P(("fsdp", "tensor"))
    return jitted, mpjax.pods.with_sharding(
        (state, spec(8 * ROWS, 4 * WIDTH)), (specs, batch), mesh
    )


@program
def optimizer_shards(topology, mistake):
    """Whole weights, of which each device updates its part: their momentum is split."""
    mesh = topology.make_mesh({"data": -1})

    def step(state, x):
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
def micro_batches(topology, mistake):
    """A loop over micro-batches under jit: the examples in each are split, or the loop's axis."""
    mesh = topology.make_mesh({"data": -1})

    def step(params, images):
        def add(total, x):
            grads = jax.grad(mpjax.autocast(mlp_loss, "bf16-mixed"))(params, x)
            return jax.tree.map(jnp.add, total, grads), None

        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), images)
        return descend(params, grads)

    split = P("data") if mistake else P(None, "data")
    args = mpjax.pods.with_sharding((MLP, spec(8, ROWS, WIDTH)), (P(), split), mesh)
    return jax.jit(step, donate_argnums=0), args


@program
def watched(topology, mistake):
    """A train step that looks at its values once in a hundred steps, by gradients of its own."""
    mesh = topology.make_mesh({"data": -1})
    step = mpjax.make_train_step(mlp_loss, optax.sgd(0.1), "bf16-mixed", watch=100)
    state = jax.eval_shape(step.init, MLP)
    return step, mpjax.pods.with_sharding((state, spec(ROWS, WIDTH)), (P(), P("data")), mesh)


@program
def two_networks(topology, mistake):
    """A student and a teacher whose weights do not change: they are no state, nor a batch."""
    mesh = topology.make_mesh({"data": -1})

    def loss(params, teacher, x):
        return jnp.mean((x @ params["first"] - x @ teacher["first"]) ** 2)

    def step(params, teacher, x):
        grads = jax.grad(mpjax.autocast(loss, "bf16-mixed"))(params, teacher, x)
        return descend(params, grads)

    params = {"first": MLP["first"]}
    teacher = {"first": MLP["first"], "unused": spec(2)}
    args = (params, teacher, spec(ROWS, WIDTH))
    return jax.jit(step, donate_argnums=0), mpjax.pods.with_sharding(
        args, (P(), P(), P("data")), mesh
    )


# -- work that is split otherwise ------------------------------------------------------------------


def used(received):
    """Computes with what was sent and casts then: a cast alone XLA moves to before the sending."""
    return (received - jnp.mean(received)).astype(jnp.bfloat16)


@program
def pipeline(topology, mistake):
    """Each device along `stage` has a layer, and hands its result to the next."""
    mesh = topology.make_mesh({"data": 2, "stage": 4})
    ring = [(i, (i + 1) % 4) for i in range(4)]
    sent = jnp.float32 if mistake == "activations in f32" else jnp.bfloat16

    def loss(w, x):
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

    def local(w, x):
        parts = x.reshape(4, -1, WIDTH).astype(jnp.bfloat16)
        grad = jax.grad(loss)(w, parts)
        return w - 0.1 * (grad if mistake == "never reduced" else jax.lax.pmean(grad, "data"))

    args = spec(4, WIDTH, WIDTH), spec(ROWS, WIDTH)
    return mapped_step(local, mesh, (P("stage"), P("data")), P("stage"), args)


@program
def experts(topology, mistake):
    """Each device has an expert; rows are sent to theirs and back, and the router is whole."""
    mesh = topology.make_mesh({"expert": -1})
    sent = jnp.float32 if mistake == "rows are sent in f32" else jnp.bfloat16

    def loss(params, x):
        gates = jax.nn.softmax(x @ params["router"]).astype(sent)
        rows = gates.T[:, :, None] * x.astype(sent)
        theirs = used(jax.lax.all_to_all(rows, "expert", 0, 1, tiled=True))
        made = jnp.matmul(theirs, low(params["expert"]), preferred_element_type=sent)
        back = jax.lax.all_to_all(jnp.tanh(made), "expert", 1, 0, tiled=True)
        return jnp.mean(jnp.sum(back, 0).astype(jnp.float32) ** 2)

    def local(params, x):
        grads = jax.grad(loss)(params, x)
        if mistake != "router is never reduced":
            grads["router"] = jax.lax.pmean(grads["router"], "expert")
        return descend(params, grads)

    own = {"expert": P("expert"), "router": P()}
    count = topology.num_devices
    params = {"expert": spec(count, WIDTH, WIDTH), "router": spec(WIDTH, count)}
    args = params, spec(8 * ROWS, WIDTH)
    return mapped_step(local, mesh, (own, P("expert")), own, args)


@program
def context(topology, mistake):
    """Time is split, and keys and values are gathered over it: none of it is the batch."""
    mesh = topology.make_mesh({"data": 2, "time": 4})

    def loss(params, x):
        x = x.astype(jnp.bfloat16)
        wide = jnp.float32 if mistake == "keys are gathered in f32" else jnp.bfloat16
        q, k, v = (jnp.matmul(x, w, preferred_element_type=wide) for w in low(params))
        k, v = (used(jax.lax.all_gather(y, "time", axis=1, tiled=True)) for y in (k, v))
        weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", low(q), k).astype(jnp.float32))
        return jnp.mean(jnp.einsum("bts,bsd->btd", weights.astype(jnp.bfloat16), v) ** 2)

    def local(params, x):
        axes = ("data",) if mistake == "reduced over one axis" else ("data", "time")
        grads = jax.grad(lambda p, x: loss(p, x).astype(jnp.float32))(params, x)
        return descend(params, jax.lax.pmean(grads, axes))

    specs = ([P()] * 3, P("data", "time"))
    args = [spec(WIDTH, WIDTH)] * 3, spec(8, 4 * ROWS, WIDTH)
    return mapped_step(local, mesh, specs, specs[0], args)
