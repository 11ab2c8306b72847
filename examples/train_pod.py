"""Trains a decoder on bytes, from a laptop to a pod: `python examples/train_pod.py --simulate 8`.

    train_pod.py --simulate 8                         here, on eight virtual devices: cpu-smoke.yaml
    train_pod.py tpu_configs/v5e-256.yaml --check     would it be right there? needs no hardware
    train_pod.py tpu_configs/v5e-256.yaml --dry-run --distributed      there: all but the steps
    train_pod.py tpu_configs/v5e-256.yaml --distributed     one process a host; it also resumes

Weights and optimizer state are shared over the mesh axis `fsdp`; `data` holds copies of the model,
`tensor` splits heads and hidden units. A layer's weights are gathered in the compute dtype when it
runs, and again for its backward pass; gradients are reduced in float32 (`mpjax.pods.gather`). With
a float16 precision the optimizer unscales and skips (`mpjax.with_loss_scale`). SIGTERM saves,
and ends with exit code 143: to a scheduler the job is not done, and it starts it again.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pod_job.checkpoints import Checkpoints
from pod_job.config import Job, flat, load_config, record_check
from pod_job.corpus import Corpus, open_corpus, trigram_bits
from pod_job.processes import agree, gather_values, initialize, together

import mpjax
from mpjax import pods

PyTree = Any
BATCH_AXES = ("data", "fsdp")  # each of their devices has its own rows
BATCH = P(BATCH_AXES)
HELD_OUT_BATCHES = 8
COUNTED = 1 << 30  # bytes that the trigram model learns from: 64 for each of its contexts and bytes
INTERRUPTED = 128 + signal.SIGTERM  # the exit code of a process that SIGTERM ended
OF_THE_STATE = ("model", "optimizer", "loss_scale", "precision", "seed", "sequence", "global")


# -- the model, inside shard_map -------------------------------------------------------------------


def param_shapes(job: Job) -> PyTree:
    """Returns the parameters' shapes: one stacked array for all layers' weights of a kind."""
    n, d, f = job.model.layers, job.model.width, job.model.hidden
    layers = {"norm1": (n, d), "qkv": (n, d, 3, d), "out": (n, d, d)}
    layers |= {"norm2": (n, d), "up": (n, d, f), "down": (n, f, d)}
    shapes = {"table": (job.model.vocabulary, d), "layers": layers, "norm": (d,)}
    dtype = mpjax.get_policy(job.precision).param_dtype
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), shapes, is_leaf=is_shape)


PARAM_SPECS = {
    "table": P(None, "fsdp"),
    "layers": {
        "norm1": P(),
        "qkv": P(None, "fsdp", None, "tensor"),
        "out": P(None, "tensor", "fsdp"),
        "norm2": P(),
        "up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
    },
    "norm": P(),
}
LAYER_SPECS = jax.tree.map(
    lambda spec: P(*spec[1:]), PARAM_SPECS["layers"], is_leaf=lambda x: isinstance(x, P)
)


def init_params(job: Job, key: jax.Array) -> PyTree:
    """Returns parameters: normal, by the number of inputs; ones for norms."""

    def init(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        if name.startswith("norm"):
            return jnp.ones(leaf.shape, leaf.dtype)
        inputs = job.model.hidden if name == "down" else job.model.width
        own_key = jax.random.fold_in(key, sum(map(ord, name)))
        return jax.random.normal(own_key, leaf.shape, leaf.dtype) * inputs**-0.5

    return jax.tree_util.tree_map_with_path(init, param_shapes(job))


def local_loss(job: Job, precision: str, shards: PyTree, tokens: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of this device's rows, in nats a byte."""
    gather = functools.partial(pods.gather, policy=precision, axis_name=BATCH_AXES, reduce="mean")
    table = gather(shards["table"], PARAM_SPECS["table"])
    dim = job.model.width // job.model.heads

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x: jax.Array, shards: PyTree) -> tuple[jax.Array, None]:
        w = gather(shards, LAYER_SPECS)
        attended = attention(normalised(x, w["norm1"]), w["qkv"], dim)
        x = x + jax.lax.psum(attended @ w["out"], "tensor")
        hidden = jax.nn.gelu(normalised(x, w["norm2"]) @ w["up"])
        return x + jax.lax.psum(hidden @ w["down"], "tensor"), None

    x, _ = jax.lax.scan(layer, table[tokens[:, :-1]], shards["layers"])
    x = normalised(x, gather(shards["norm"], P()))
    logits = (x @ table.T).astype(jnp.float32)  # sums of exponentials are float32
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def attention(x: jax.Array, qkv: jax.Array, dim: int) -> jax.Array:
    """Returns causal attention of this device's heads, [rows, time, heads x dim]."""
    rows, time, _ = x.shape
    heads = jnp.einsum("btd,dkh->kbth", x, qkv).reshape(3, rows, time, -1, dim)
    q, k, v = rotated(heads[0]) * dim**-0.5, rotated(heads[1]), heads[2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e4)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp((scores - largest).astype(jnp.float32))
    # Divided behind the product: 16 bits hold the exponentials, and the quotients are not stored.
    total = jnp.swapaxes(jnp.sum(weights, axis=-1, keepdims=True), 1, 2)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v).astype(jnp.float32)
    return (out / total).astype(v.dtype).reshape(rows, time, -1)


def rotated(x: jax.Array) -> jax.Array:
    """Returns queries or keys with rotary positions."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `x` over its root mean square, which is computed in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


# -- the step --------------------------------------------------------------------------------------


class Trainer:
    """A job on a mesh: its state, its step, and what the state is worth."""

    def __init__(self, job: Job, mesh: Mesh):
        self.job, self.mesh, options = job, mesh, job.optimizer
        scaled = isinstance(mpjax.get_loss_scale(job.precision), mpjax.DynamicLossScale)
        settings = {"growth_interval": job.loss_scale.growth_interval}
        self.decay_steps = max(job.steps, options.warmup_steps + 1)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, options.learning_rate, options.warmup_steps, self.decay_steps
        )
        self.tx = mpjax.with_loss_scale(
            optax.chain(
                optax.clip_by_global_norm(options.clip_norm),
                optax.adamw(schedule, b2=0.95, weight_decay=options.weight_decay),
            ),
            mpjax.DynamicLossScale(job.loss_scale.initial, **settings) if scaled else None,
            max_consecutive_skips=job.max_consecutive_skips,
        )
        self.state_shapes = jax.eval_shape(self._init, jax.random.key(0))
        opt_specs = optax.tree.map_params(
            self.tx,
            lambda _, spec: spec,
            self.state_shapes["opt_state"],
            PARAM_SPECS,
            transform_non_params=lambda _: P(),
        )
        self.state_specs = {"params": PARAM_SPECS, "opt_state": opt_specs}
        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        self.shardings = jax.tree.map(self._named, self.state_specs, is_leaf=is_spec)
        self.batch_sharding = self._named(BATCH)
        out = (self.shardings, self._named(P()))  # metrics: whole on every process
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=out)
        self.loss = jax.jit(self._mapped(self._float32_loss, P()), out_shardings=self._named(P()))

    def _named(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _mapped(self, fun: Callable[..., Any], out_specs: PyTree, *more: P) -> Callable[..., Any]:
        specs = (PARAM_SPECS, BATCH, *more)
        return jax.shard_map(fun, mesh=self.mesh, in_specs=specs, out_specs=out_specs)

    def _init(self, key: jax.Array) -> PyTree:
        params = init_params(self.job, key)
        return {"params": params, "opt_state": self.tx.init(params)}

    def init(self) -> PyTree:
        """Returns the first state, each device computing its own part."""
        return jax.jit(self._init, out_shardings=self.shardings)(jax.random.key(self.job.seed))

    def _step(self, state: PyTree, tokens: jax.Array) -> tuple[PyTree, dict[str, jax.Array]]:
        params, opt_state = state["params"], state["opt_state"]
        grad = self._mapped(self._local_grads, (P(), PARAM_SPECS), P())
        loss, grads = grad(params, tokens, mpjax.current_loss_scale(opt_state))
        # Outside of shard_map: the norm is global, and all devices skip or none.
        updates, opt_state = self.tx.update(grads, opt_state, params)
        params = mpjax.optim.apply_updates(params, updates)
        metrics = {name: getattr(opt_state, name) for name in ("loss_scale", "skipped_steps")}
        return {"params": params, "opt_state": opt_state}, metrics | {"loss": loss}

    def _local_grads(self, shards: PyTree, tokens: jax.Array, loss_scale: Any) -> Any:
        fun = functools.partial(local_loss, self.job, self.job.precision)
        grad = mpjax.value_and_grad(fun, loss_scale=loss_scale)
        loss, grads = grad(shards, tokens)
        return jax.lax.pmean(loss, BATCH_AXES), grads

    def _float32_loss(self, shards: PyTree, tokens: jax.Array) -> jax.Array:
        return jax.lax.pmean(local_loss(self.job, "32-true", shards, tokens), BATCH_AXES)

    def specs(self) -> tuple[PyTree, jax.ShapeDtypeStruct]:
        """Returns the step's arguments, without their values."""
        shape = (self.job.global_batch_size, self.job.sequence_length + 1)
        shapes = (self.state_shapes, jax.ShapeDtypeStruct(shape, jnp.int32))
        return pods.with_sharding(shapes, (self.state_specs, BATCH), self.mesh)

    def bits_per_byte(self, params: PyTree, windows: np.ndarray) -> float:
        """Returns what the model needs for a byte, computed in float32 whatever it trained in."""
        losses = []
        for part in np.split(windows, len(windows) // self.job.global_batch_size):
            place = functools.partial(jax.make_array_from_callback, part.shape, self.batch_sharding)
            losses.append(self.loss(params, place(part.__getitem__)))
        return float(np.mean([float(loss) for loss in losses])) / math.log(2)


# -- the run ---------------------------------------------------------------------------------------


def train(job: Job, trainer: Trainer, corpus: Corpus, out: Path) -> int:
    """Trains from the newest whole checkpoint to the last step, and returns an exit code."""
    with Checkpoints(job.checkpoint.folder, keep=job.checkpoint.keep) as checkpoints:
        decisive = {k: v for k, v in flat(job).items() if k.startswith(OF_THE_STATE)}
        decisive |= {"corpus": corpus.digest, "steps of the schedule": trainer.decay_steps}
        checkpoints.claim(decisive)
        start, restored, said = checkpoints.restore(trainer.specs()[0])
        first = trainer.init() if restored is None else restored
        for line in said:
            say(line)
        say(f"starting at step {start} of {job.steps}")
        last, state = start, first
        stop = stop_asked()
        for last, state in steps(job, trainer, corpus, first, start, out):
            checkpoints.seal()
            stopping = stop(last)
            if stopping or last == job.steps or last % job.checkpoint.every == 0:
                checkpoints.save(last, state)
            if stopping:
                break
    if last < job.steps:
        gather_values(last)  # a launcher may end all when one has ended: first all have saved
        say(f"SIGTERM: saved step {last}; the same command goes on from there.")
        return INTERRUPTED
    windows = corpus.held_out_windows(HELD_OUT_BATCHES * job.global_batch_size, job.sequence_length)
    bits = {"bits_per_byte": trainer.bits_per_byte(state["params"], windows)}
    if jax.process_index() == 0:
        bits["trigram_bits_per_byte"] = trigram_bits(corpus.train[:COUNTED], windows)
        record(out, {"step": last, "held_out": bits})
        ours, trigram = bits.values()
        say(f"held-out files: {ours:.3f} bits a byte; a byte-trigram model: {trigram:.3f}")
    return 0


def steps(
    job: Job, trainer: Trainer, corpus: Corpus, state: PyTree, start: int, out: Path
) -> Iterator[tuple[int, PyTree]]:
    """Yields each step's number and state, and reports some of them."""
    count, length = job.global_batch_size, job.sequence_length
    size = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    flops = (6 * size + 12 * job.model.layers * job.model.width * length) * count * length
    peak = job.topology.chip.dense_flops * jax.device_count()
    since, began = start, time.perf_counter()
    for step in range(start, job.steps):
        batch = corpus.batch(
            trainer.batch_sharding, step=step, seed=job.seed, count=count, length=length
        )
        state, metrics = trainer.step(state, batch)
        done = step + 1
        if done % job.log_every == 0 or done == job.steps:
            values = {name: float(value) for name, value in metrics.items()}  # waits
            mpjax.raise_if_diverged(state["opt_state"], state["params"])
            seconds = (time.perf_counter() - began) / (done - since)
            values["bytes_per_second"] = count * length / seconds
            values["mfu"] = flops / seconds / peak if peak else None
            report(out, done, job.steps, values)
            since, began = done, time.perf_counter()
        yield done, state


def report(out: Path, step: int, last: int, values: dict[str, Any]) -> None:
    record(out, {"step": step} | values)
    mfu = "" if values["mfu"] is None else f"  MFU {values['mfu']:.1%}"
    say(
        f"step {step:>6}/{last}  {values['loss'] / math.log(2):.3f} bits a byte"
        f"  loss scale {values['loss_scale']:g}  skipped {values['skipped_steps']:.0f}"
        f"  {values['bytes_per_second']:,.0f} bytes/s{mfu}"
    )


def record(out: Path, values: dict[str, Any]) -> None:
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def stop_asked() -> Callable[[int], bool]:
    """Returns whether SIGTERM came; with several processes, at a step that all agree on."""
    if jax.process_count() > 1:  # JAX's coordinator has taken the signal
        return multihost_utils.reached_preemption_sync_point
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    return lambda _: bool(seen)


# -- before the run --------------------------------------------------------------------------------


def check(job: Job, path: Path, arguments: argparse.Namespace) -> int:
    """Compiles the step for the accelerators of the config, reports, and returns an exit code."""
    topology = job.topology
    mesh = topology.make_mesh(job.mesh_axes(topology.num_devices))
    trainer = Trainer(job, mesh)
    found = pods.check(trainer.step, trainer.specs(), topology, policy=job.precision)
    print(found.to_json() if arguments.json else found)
    if arguments.record:
        record_check(path, job, found)
    return found.exit_code


def surroundings() -> dict[str, str | None]:
    """Returns what decides, beside the config, which program a process compiles."""
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    flags = {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    return versions | {"mpjax": mpjax.__version__} | flags


def prepare(job: Job) -> tuple[Trainer, Corpus]:
    """Returns the trainer and the corpus, once all processes agree on what they are about to do."""
    agree(flat(job) | surroundings(), "config")
    corpus = open_corpus(job.data, job.sequence_length)
    agree({"digest": corpus.digest}, "corpus")
    mpjax.check_support(job.precision)
    trainer = Trainer(job, pods.make_mesh(job.mesh_axes(jax.device_count())))
    sizes = [leaf.size for leaf in jax.tree.leaves(trainer.state_shapes["params"])]
    axes = ", ".join(f"{name} {size}" for name, size in trainer.mesh.shape.items())
    count = jax.device_count()
    say(f"{job.hardware}; devices: {count} ({axes}); processes: {jax.process_count()}")
    megabytes = [len(part) / 1e6 for part in (corpus.train, corpus.held_out)]
    say(
        f"{sum(sizes) / 1e6:,.2f} million parameters in {job.precision}; {megabytes[0]:.2f} MB"
        f" to learn from, {megabytes[1]:.2f} MB held out"
    )
    lowered = trainer.step.lower(*trainer.specs())
    agree({"program": hashlib.sha256(lowered.as_text().encode()).hexdigest()}, "train step")
    trainer.step = lowered.compile()
    peak = trainer.step.memory_analysis().peak_memory_in_bytes
    say(f"the step is compiled, and takes {peak / 1e6:,.2f} MB a device at its worst moment")
    return trainer, corpus


def parse_arguments() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    smoke = Path(__file__).parent.parent / "tpu_configs" / "cpu-smoke.yaml"
    text = "a file of tpu_configs/, or your own (default: cpu-smoke.yaml)"
    add("config", type=Path, nargs="?", default=smoke, help=text)
    text = "overrides a value of the config, e.g. model.layers=2; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    add("--out", type=Path, default=Path("outputs/train_pod"), help="of metrics.jsonl")
    text = "compile for the config's accelerators, report, and train nothing; needs no hardware"
    add("--check", action="store_true", help=text)
    add("--json", action="store_true", help="with --check: the report as JSON")
    add("--record", action="store_true", help="with --check: write the result to the config")
    add("--dry-run", action="store_true", help="all but the steps")
    add("--simulate", type=int, metavar="N", help="run on N virtual CPU devices")
    text = "one of several processes; Cloud TPU, GKE, Slurm and Open MPI say which"
    add("--distributed", action="store_true", help=text)
    add("--coordinator", metavar="HOST:PORT", help="elsewhere: the address of process 0,")
    add("--num-processes", type=int, help="how many there are,")
    add("--process-id", type=int, help="and which of them this is, from 0")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    job = load_config(arguments.config, arguments.set)
    virtual = arguments.simulate
    if virtual is not None and virtual < 1:
        raise ValueError(f"--simulate: must be at least 1; got {virtual}.\n  Type --simulate 8.")
    if (arguments.json or arguments.record) and not arguments.check:
        raise ValueError("--json and --record: they belong to --check.\n  Add it, or drop them.")
    if arguments.out.is_file():
        raise ValueError(f"--out {arguments.out}: is a file.\n  Type a folder's name.")
    if arguments.check or virtual is not None:
        jax.config.update("jax_platforms", "cpu")
        here = job.topology.num_devices if job.topology.chip.platform == "cpu" else 1
        jax.config.update("jax_num_cpu_devices", virtual or here)
    if arguments.check:
        return check(job, arguments.config, arguments)
    ids = (arguments.coordinator, arguments.num_processes, arguments.process_id)
    if arguments.distributed or any(value is not None for value in ids):
        initialize(*ids)
    with together(job.checkpoint.folder):
        trainer, corpus = prepare(job)
        if arguments.dry_run:
            say("a dry run: nothing was trained or saved")
            return 0
        return train(job, trainer, corpus, arguments.out)


def main() -> int:
    try:
        return run(parse_arguments())
    except (ValueError, OSError, ModuleNotFoundError, RuntimeError) as error:
        if isinstance(error, jax.errors.JAXTypeError | jax.errors.JaxRuntimeError):
            raise  # not the user's input: the trace says where
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
