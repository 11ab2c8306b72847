"""A small train step as it should be on a pod, and the mistakes that `pods.check` must find in it.

Two scanned, rematerialised layers with attention's shapes left out: parameters and Adam's state
sharded over `fsdp`, hidden units split over `tensor`, one vocabulary table at either end.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
import mpjax.pods

LAYERS, WIDTH, HIDDEN, VOCAB, TIME = 2, 256, 1024, 2048, 64
SPECS = {
    "table": P("fsdp"),
    "layers": {
        "scale": P(None, "fsdp"),
        "up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
    },
    "head": P("fsdp"),
}
SHAPES = {
    "table": (VOCAB, WIDTH),
    "layers": {
        "scale": (LAYERS, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
    },
    "head": (WIDTH, VOCAB),
}
AXES = {"fsdp": 4, "tensor": 2}
CULPRITS = {
    "late_cast": ("weights", "state/params/layers/up"),
    "low_reduction": ("gradients", "state/params/layers/up"),
    "wide_activations": ("activations", "_pods_step.py"),
    "replicated_state": ("replication", "state/opt_state/1/0/mu/head"),
    "no_donation": ("donation", "state/"),
    "callback": ("callbacks", "_pods_step.py"),
    "large_batch": ("memory", "_pods_step.py"),
    "other_program": ("agreement", "_pods_step.py"),
}
"""For each mistake the check that finds it, and part of the culprit that is named."""


def late_gather(tree, specs):
    """Gathers float32, computes with that and casts last; a bare late cast XLA itself moves."""

    def whole(x, spec):
        if "fsdp" in spec:
            x = jax.lax.all_gather(x, "fsdp", axis=spec.index("fsdp"), tiled=True)
        return (x - jnp.mean(x)).astype(jnp.bfloat16)

    return jax.tree.map(whole, tree, specs)


def low_gather(tree, specs):
    """Casts before the gather, whose derivative then sums in bfloat16."""

    def whole(x, spec):
        x = x.astype(jnp.bfloat16)
        if "fsdp" in spec:
            x = jax.lax.all_gather(x, "fsdp", axis=spec.index("fsdp"), tiled=True)
        return x

    return jax.tree.map(whole, tree, specs)


def good_gather(tree, specs):
    return mpjax.pods.gather(tree, specs, "bf16-mixed", axis_name="fsdp", reduce="mean")


def without_stack(spec):
    return P(*spec[1:])


def make_loss(mistake):
    gathers = {"late_cast": late_gather, "low_reduction": low_gather}
    gather = gathers.get(mistake or "", good_gather)
    layer_specs = jax.tree.map(without_stack, SPECS["layers"], is_leaf=lambda x: isinstance(x, P))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, shards):
        w = gather(shards, layer_specs)
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, -1, keepdims=True)
        y = (wide * jax.lax.rsqrt(mean + 1e-6)).astype(jnp.bfloat16) * w["scale"]
        out = jax.nn.gelu(y @ w["up"]) @ w["down"]
        if mistake == "wide_activations":
            out = jax.lax.psum(out.astype(jnp.float32), "tensor").astype(jnp.bfloat16)
        else:
            out = jax.lax.psum(out, "tensor")
        return x + out, None

    def loss(params, tokens):
        x = gather(params["table"], SPECS["table"])[tokens[:, :-1]]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        logits = (x @ gather(params["head"], SPECS["head"])).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        value = losses.mean()
        if mistake == "other_program" and jax.process_index() == 0:
            value = value * 1.0001  # process 0 means something else
        return value

    return loss


def make_step(mesh, mistake=None):
    """Returns the step, the optimizer and the specs of its state."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = jax.tree.map(shaped, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    opt_state = jax.eval_shape(tx.init, params)
    opt_specs = optax.tree.map_params(
        tx, lambda _, spec: spec, opt_state, SPECS, transform_non_params=lambda _: P()
    )
    if mistake == "replicated_state":
        opt_specs = jax.tree.map(lambda _: P(), opt_state)
    specs = {"params": SPECS, "opt_state": opt_specs}
    state = {"params": params, "opt_state": opt_state}
    grad = jax.shard_map(
        value_and_grad(make_loss(mistake)),
        mesh=mesh,
        in_specs=(SPECS, P("fsdp")),
        out_specs=(P(), SPECS),
    )

    def step(state, tokens):
        value, grads = grad(state["params"], tokens)
        if mistake == "callback":
            jax.debug.print("loss {}", value)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": value}

    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
    donated = () if mistake == "no_donation" else (0,)
    return (jax.jit(step, donate_argnums=donated, out_shardings=(shardings, None)), state, specs)


def value_and_grad(loss):
    def run(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.lax.pmean(value, "fsdp"), grads

    return run


def is_spec(x):
    return isinstance(x, P)


def shaped(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def check(name, mistake=None, batch=2, **options):
    """Runs the check of the step, with the mistake or without, on a topology of eight devices."""
    topology = mpjax.pods.get_topology(name)
    mesh = topology.make_mesh(AXES)
    step, state, specs = make_step(mesh, mistake)
    rows = (1 << 17 if mistake == "large_batch" else batch) * AXES["fsdp"]
    tokens = jax.ShapeDtypeStruct((rows, TIME + 1), jnp.int32)
    args = mpjax.pods.with_sharding((state, tokens), (specs, P("fsdp")), mesh)
    return mpjax.pods.check(step, args, topology, **options)
