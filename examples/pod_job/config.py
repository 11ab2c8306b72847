"""What a training job is, from a YAML file: hardware, mesh, model, precision, data, checkpoints."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import mpjax
from mpjax.pods import Report, Topology, get_topology
from pod_job.errors import message, nearest

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """How the devices are arranged: their product is the number of devices."""

    data: int = 1  # copies of the whole model
    fsdp: int = -1  # devices that share parameters and optimizer state; -1: all that are left
    tensor: int = 1  # devices that share the heads and hidden units of each layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder over bytes."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW behind clipping by global norm; a linear warm-up, then half a cosine."""

    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """The dynamic loss scale of float16; other precisions have none."""

    initial: float = 2.0**15
    growth_interval: int = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Files to learn from, and how many of them are held out."""

    path: str = "stdlib"  # a folder or a file; 'stdlib': Python's own sources
    pattern: str = "*.py"  # of the files in a folder
    held_out: float = 0.05  # part of the files
    cache: str = "outputs/corpus"  # where the bytes are laid out for memory mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where the state is saved, after how many steps, and how many are kept."""

    folder: str = "outputs/checkpoints"
    every: int = 500
    keep: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What the sizes above amount to; a test computes it again."""

    parameters_millions: float
    state_gb: float  # float32 parameters and moments, a device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """What `mpjax.pods.check` found; written by `train_pod.py FILE --check --record`."""

    date: str
    compiler: str
    result: str
    peak_gb: float | None = None  # a device
    limit_gb: float | None = None  # what a program may use
    bound: str | None = None  # 'compute', 'hbm' or 'network'
    milliseconds: float | None = None  # of a step, at least
    layers: int | None = None  # fewer than the model's, where it was checked small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training job; `load_config` reads it from a file."""

    hardware: str  # for people: what is rented
    accelerator: str  # for `get_topology`
    model: ModelSizes
    optimizer: Optimizer
    sequence_length: int
    global_batch_size: int  # sequences a step, over all devices
    steps: int
    num_slices: int = 1
    precision: str = "bf16-mixed"
    seed: int = 0
    log_every: int = 10
    max_consecutive_skips: int = 50
    mesh: Axes = Axes()
    loss_scale: LossScale = LossScale()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    expected: Expected | None = None
    checked: Checked | None = None

    @property
    def topology(self) -> Topology:
        """The accelerators that the job is for."""
        return get_topology(self.accelerator, num_slices=self.num_slices)

    def mesh_axes(self, num_devices: int) -> dict[str, int]:
        """Returns the size of each mesh axis on so many devices, checked against all sizes.

        Raises:
          ValueError: the axes do not multiply to the devices, or a size of the model or batch is
            not divisible by the axis that splits it.
        """
        sizes = dataclasses.asdict(self.mesh)
        free = [name for name, size in sizes.items() if size == -1]
        given = math.prod(size for size in sizes.values() if size != -1)
        if len(free) == 1 and given > 0:
            sizes[free[0]] = num_devices // given
        if min(sizes.values()) < 1 or math.prod(sizes.values()) != num_devices:
            asked = " x ".join(f"{n}={s}" for n, s in dataclasses.asdict(self.mesh).items())
            got = f"{asked} does not divide {num_devices} devices."
            fix = f"Sizes multiply to {num_devices}; one may be -1, e.g. --set mesh.fsdp=-1."
            raise ValueError(message("mesh", got, fix))
        _check_divisible(self, sizes)
        return sizes


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job that a YAML file describes.

    Args:
      path: of the file.
      overrides: 'key=value' with dots between keys, 'model.layers=2'; they win over the file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a key is unknown (with the nearest one) or missing, a value is of the wrong type
        or out of its range, or the accelerator, precision or mesh is not possible.

    Dtypes:
      `precision` is checked by `get_policy`; nothing is cast.

    Transforms:
      None: it reads a file.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
      ...     _ = file.write('''
      ...     hardware: a laptop
      ...     accelerator: cpu:1
      ...     model: {width: 8, layers: 1, heads: 2, hidden: 16}
      ...     optimizer: {learning_rate: 1.0e-3}
      ...     sequence_length: 8
      ...     global_batch_size: 2
      ...     steps: 10
      ...     ''')
      ...     file.flush()
      ...     load_config(file.name, ["steps=20"]).steps
      20
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        close = nearest(path.name, [p.name for p in path.parent.glob("*.yaml")])
        fix = f"Did you mean {path.parent / close[0]}?" if close else "Type the path of a .yaml."
        raise FileNotFoundError(message(f"config {str(path)!r}", "there is no such file.", fix))
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(message(str(path), "is not YAML.", *str(error).splitlines())) from error
    if not isinstance(values, dict):
        got = f"must hold 'key: value' lines; got {type(values).__name__}."
        raise ValueError(message(str(path), got, f"Keys: {', '.join(_names(Job))}."))
    for override in overrides:
        _override(values, override)
    job = _build(Job, values, str(path), "")
    _check_values(job, str(path))
    return job


def record_check(path: str | Path, job: Job, report: Report) -> None:
    """Writes what `check` found at the end of a config, in place of what stood there before.

    Args:
      path: of the config.
      job: what was checked: the config's, or one with fewer layers.
      report: what `check` returned.

    Dtypes:
      None are concerned.

    Transforms:
      None: it writes a file.
    """
    package = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}.get(job.topology.chip.platform)
    compiler = f"{package} {importlib.metadata.version(package)}" if package else "XLA for CPUs"
    memory, times, own = report.memory, report.times, load_config(path)
    seconds = max(times.compute, times.hbm, times.network)
    checked = Checked(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        compiler=f"jax {jax.__version__}, {compiler}",
        result="; ".join(f"{f.severity}: {f.check}" for f in report.findings) or "nothing wrong",
        peak_gb=round(memory.peak / 1e9, 2) if memory else None,
        limit_gb=round(memory.limit / 1e9, 2) if memory and memory.limit else None,
        bound=times.bound if seconds else None,
        milliseconds=float(f"{seconds * 1e3:.3g}") if seconds else None,
        layers=job.model.layers if job.model.layers != own.model.layers else None,
    )
    lines = [f"  {k}: {json.dumps(v)}" for k, v in flat(checked).items() if v is not None]
    path = Path(path)
    head = path.read_text().partition("\nchecked:")[0].rstrip("\n")
    path.write_text("\n".join([head, "", "checked:", *lines, ""]))


def flat(job: Any, prefix: str = "") -> dict[str, Any]:
    """Returns a job as {'model.width': 64, ...}: to compare jobs, on one host or between hosts.

    Example:
      >>> flat(Axes(fsdp=8))
      {'data': 1, 'fsdp': 8, 'tensor': 1}
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(job):
        value = getattr(job, field.name)
        name = f"{prefix}{field.name}"
        found |= flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


# -- the file --------------------------------------------------------------------------------------


def _override(values: dict[str, Any], text: str) -> None:
    import yaml

    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(message(f"--set {text}", "there is no '='.", "Type key=value."))
    *sections, key = name.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            got = f"{section!r} is a value, not a section."
            raise ValueError(message(f"--set {text}", got, f"Type {section}=..."))
    try:
        values[key] = yaml.safe_load(value)
    except yaml.YAMLError:  # '*.txt' is a reference to YAML, and a pattern to everyone else
        values[key] = value


def _build(cls: type[Any], values: Mapping[str, Any], where: str, prefix: str) -> Any:
    """Returns a dataclass of a section's values, each of its field's type."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            close = nearest(str(key), fields, 1)
            known = f"Keys{f' of {prefix[:-1]!r}' if prefix else ''}: {', '.join(fields)}."
            lines = [known, *([f"Did you mean '{prefix}{close[0]}'?"] if close else [])]
            raise ValueError(message(where, f"unknown key '{prefix}{key}'.", *lines))
    missing = [name for name in fields if _is_required(fields[name]) and name not in values]
    if missing:
        fix = f"Add a line such as '{missing[0]}: {_example(hints[missing[0]])}'."
        raise ValueError(message(where, f"key '{prefix}{missing[0]}' is missing.", fix))
    return cls(**{k: _value(hints[k], v, where, f"{prefix}{k}") for k, v in values.items()})


def _value(hint: Any, value: Any, where: str, name: str) -> Any:
    """Returns a value in the type of its field; a whole number is a float too."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return None
    kind = next(k for k in kinds if k is not types.NoneType)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            got = f"'{name}' must be a section; got {value!r}."
            raise ValueError(message(where, got, f"Keys of {name!r}: {', '.join(_names(kind))}."))
        return _build(typing.cast(Any, kind), value, where, f"{name}.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, datetime.date):  # YAML reads 2026-11-21 as a date
        return value.isoformat()
    if not isinstance(value, kind) or isinstance(value, bool):
        got = f"'{name}' must be {_words(kind)}; got {value!r}."
        # YAML 1.1 reads 1e-3 as text: a float has a point there.
        exponent = isinstance(value, str) and kind is float
        fix = "YAML wants a point: 1.0e-3." if exponent else f"Type e.g. {_example(kind)}."
        raise ValueError(message(where, got, fix))
    return value


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


def _words(kind: Any) -> str:
    return {int: "a whole number", float: "a number", str: "text"}[kind]


def _example(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "{" + ", ".join(f"{name}: ..." for name in _names(kind)) + "}"
    return {int: "8", float: "1.0e-3", str: "'text'"}[kind]


# -- the values ------------------------------------------------------------------------------------


# The least value of each number that has one; those of _ABOVE_ZERO are finite, and above 0.
_LEAST = {
    **dict.fromkeys(("steps", "sequence_length", "global_batch_size", "num_slices"), 1),
    **dict.fromkeys(("model.width", "model.layers", "model.heads", "model.hidden"), 1),
    **dict.fromkeys(("log_every", "checkpoint.every", "max_consecutive_skips"), 1),
    **dict.fromkeys(("seed", "optimizer.warmup_steps", "optimizer.weight_decay"), 0),
    "model.vocabulary": 256,  # a token is a byte
}
_ABOVE_ZERO = ("optimizer.learning_rate", "optimizer.clip_norm")


def _check_values(job: Job, where: str) -> None:
    values = flat(job)
    for name, least in _LEAST.items():
        if not values[name] >= least:
            got = f"'{name}' must be at least {least}; got {values[name]}."
            raise ValueError(message(where, got, f"Type e.g. {name.split('.')[-1]}: {least or 1}."))
    for name in _ABOVE_ZERO:
        if not 0 < values[name] < math.inf:
            got = f"'{name}' must be above 0 and finite; got {values[name]}."
            raise ValueError(message(where, got, f"Type e.g. {name.split('.')[-1]}: 1.0e-3."))
    if job.checkpoint.keep < 2:
        got = f"'checkpoint.keep' must be at least 2; got {job.checkpoint.keep}."
        fix = "The one before is what is left if the last is broken."
        raise ValueError(message(where, got, fix))
    if not 0 < job.data.held_out < 1:
        got = f"'data.held_out' must lie between 0 and 1; got {job.data.held_out}."
        raise ValueError(message(where, got, "It is a part of the files: 0.05."))
    if job.model.width % job.model.heads or job.model.width // job.model.heads % 2:
        got = f"a width of {job.model.width} does not split into {job.model.heads} even heads."
        fix = "Rotary positions take pairs: model.width is a multiple of 2 x model.heads."
        raise ValueError(message(where, got, fix))
    mpjax.get_policy(job.precision)
    job.mesh_axes(job.topology.num_devices)


def _check_divisible(job: Job, axes: Mapping[str, int]) -> None:
    model = job.model
    batch = axes["data"] * axes["fsdp"]
    pairs = (
        ("global_batch_size", job.global_batch_size, "data x fsdp", batch),
        ("model.width", model.width, "fsdp", axes["fsdp"]),
        ("model.heads", model.heads, "tensor", axes["tensor"]),
        ("model.hidden", model.hidden, "tensor", axes["tensor"]),
    )
    for name, size, axis, count in pairs:
        if size % count:
            below, above = size // count * count, (size // count + 1) * count
            near = f"{below} or {above}" if below else str(above)
            got = f"{size} does not divide over {axis} = {count}."
            raise ValueError(message(name, got, f"Type {near}, or another mesh."))
