"""Checks a train step for a pod before the job starts: compiles it ahead of time, and reads it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from mpjax._base import compat
from mpjax._base.dtypes import describe, short_name
from mpjax._base.errors import message
from mpjax._base.foreign_keywords import POLICIES_OF
from mpjax._base.keywords import names_keywords
from mpjax._base.typing import PolicySpec
from mpjax._hardware import examine, find_accelerator
from mpjax._jaxpr.equation import Jaxpr
from mpjax._policies.parts import default_of
from mpjax._policies.policy import get_policy
from mpjax.pods import _args, _programs, _rules
from mpjax.pods._findings import Finding, Times
from mpjax.pods._read import Lowered, read, too_large
from mpjax.pods._report import Report
from mpjax.pods._topology import Topology, get_topology


@names_keywords(POLICIES_OF)
def check(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    topology: str | Topology,
    *,
    policy: PolicySpec = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Report:
    """Checks a train step for hardware that need not be here, and returns a report.

    It traces the step, compiles it for the topology, and reads the program. The report says whether
    the step fits, what devices send to each other in which dtype, and what limits its time. Nothing
    runs: it needs no accelerator and no data, and arguments are specs.

    Args:
      step: the jitted step, with its donated arguments (a plain function is jitted); what
        `make_train_step` returns; `shard_map` inside. Build it on `topology.make_mesh(...)`, or let
        it read the mesh from its context (`jax.set_mesh`), which is set to the arguments' mesh.
      args: the arguments, as a tuple: `jax.ShapeDtypeStruct`s with shardings (`with_sharding`
        makes them) or arrays. Shardings on a mesh of other devices are carried over by axis name.
        An argument that comes back with equal structure is the state.
      topology: a name such as 'v5e-256' or '8xh100', or what `get_topology` returned.
      policy: whatever `get_policy` takes. None for the step's own policy (`make_train_step`), or
        for the dtype that most products of the step read.
      compiler_options: XLA's, as the job will have them.

    Returns:
      A `Report`: `print(report)`, `report.ok`, `report.exit_code`, `report.findings`,
      `report.collectives`, `report.memory`, `report.to_dict()`.

    Raises:
      ValueError: the topology is unknown, a mesh or batch does not divide, or no argument says how
        it is laid out.
      TypeError: `args` is not a tuple, or holds what is neither array nor number.
      ModuleNotFoundError: the compiler for that platform is not installed; 'cpu:N' needs none.

    Dtypes:
      Judged, not changed.

    Transforms:
      None. While it traces, `jax.process_index()` answers for the first and the last process of
      the job in turn, to see whether they would trace the same program.

    Example:
      >>> def step(state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state)
      ...     return state - 0.1 * grads
      >>> report = mpjax.pods.check(step, (jnp.ones((64, 64)), jnp.ones((8, 64))), "cpu:1")
      >>> [(finding.check, finding.culprit) for finding in report.findings]
      [('donation', 'state')]
    """
    topology = get_topology(topology)
    if not isinstance(args, tuple):
        got = f"must be a tuple, one entry for each argument; got {type(args).__name__}."
        raise TypeError(message("check(args)", got, "Type check(step, (state, batch), ...)."))
    lowered = _lower(step, args, topology)
    findings = [*_rules.callbacks(_programs.callbacks(lowered.jaxpr))]
    findings += _rules.agreement(lowered.difference, max(1, topology.num_hosts - 1))
    policy = getattr(step, "policy", None) if policy is None else get_policy(policy)
    compute = _compute_dtype(policy, lowered.jaxpr)
    findings += _precision(policy, compute, topology)
    options = dict(compiler_options or {})
    if topology.chip.platform == "cpu":
        options = compat.cpu_as_accelerator() | options
    started = time.perf_counter()
    compiled, refusal = _compile(lowered, topology, options)
    seconds = time.perf_counter() - started
    report = Report(
        topology=str(topology),
        num_devices=topology.num_devices,
        mesh=dict(lowered.mesh.shape) if lowered.mesh else {},
        compute_dtype=compute,
        findings=(*findings, *refusal),
        collectives=(),
        memory=None,
        flops={},
        hbm_bytes=0,
        cost_analysis_bytes=None,
        uncounted=(),
        open_loops=(),
        unjudged=(),
        times=Times(compute=0.0, hbm=0.0, network=0.0),
        fingerprint=lowered.fingerprint,
        hash_seeds=1,
        compile_seconds=seconds,
    )
    return report if compiled is None else read(report, lowered, compiled, topology)


@names_keywords(POLICIES_OF)
def check_job(
    build: Callable[[Topology], tuple[Callable[..., Any], tuple[Any, ...]]],
    topology: str | Topology,
    *,
    num_slices: int = 1,
    policy: PolicySpec = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Report:
    """Returns `check`'s report on a job that `build` makes for the topology; for a command line.

    Args:
      build: `build(topology) -> (step, args)`, as `check` takes them; it makes its mesh of
        `topology.make_mesh(...)`, so that one function serves every topology.
      topology: as in `check`.
      num_slices: as in `get_topology`, where `topology` is a name.
      policy, compiler_options: as in `check`.

    Raises:
      TypeError: `build` does not return a step and a tuple of arguments.
      ValueError, ModuleNotFoundError: as in `check`.

    Dtypes:
      Judged, not changed.

    Transforms:
      None.

    Example:
      >>> def build(topology):
      ...     mesh = topology.make_mesh({"data": -1})
      ...     spec = jax.sharding.PartitionSpec("data")
      ...     args = mpjax.pods.with_sharding((jnp.ones((8, 4)),), spec, mesh)
      ...     return jax.jit(lambda x: x + 1, donate_argnums=0), args
      >>> mpjax.pods.check_job(build, "cpu:1").exit_code
      0
    """
    topology = get_topology(topology, num_slices=num_slices)
    step, args = build_job(build, topology)
    return check(step, args, topology, policy=policy, compiler_options=compiler_options)


def build_job(build: Callable[[Topology], Any], topology: Topology) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step and the arguments of a build function; an error says what to return."""
    built = build(topology)
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], tuple)):
        got = f"must return (step, args), args a tuple; got {describe(built)}."
        raise TypeError(message("check_job(build)", got, "Type return step, (state, batch)."))
    return built


def traced(
    step: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh | None, topology: Topology
) -> Any:
    """Returns the jaxpr of a step as the first process of the job would trace it."""
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    with _context(mesh), _on_devices(topology):
        return _programs.trace(jitted, args, process=0, count=max(2, topology.num_hosts))


# -- before compiling ------------------------------------------------------------------------------


def _lower(step: Callable[..., Any], args: tuple[Any, ...], topology: Topology) -> Lowered:
    args, mesh = _args.place(args, topology)
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    # Two traces for one host as well: a program that differs from trace to trace also differs
    # between processes.
    count = max(2, topology.num_hosts)
    with _context(mesh), _on_devices(topology):
        jaxpr = _programs.trace(jitted, args, process=0, count=count)
        other = _programs.trace(jitted, args, process=count - 1, count=count)
        if _programs.callbacks(jaxpr):
            # There is no host to call without a device: such a step does not lower.
            lowered, text = None, str(jaxpr)
        else:
            lowered = jitted.lower(*args)
            text = lowered.as_text()
    return Lowered(
        step=jitted,
        args=args,
        mesh=mesh,
        jaxpr=jaxpr,
        difference=_programs.first_difference(jaxpr, other),
        lowered=lowered,
        fingerprint=_programs.fingerprint(text),
    )


@contextlib.contextmanager
def _context(mesh: Mesh | None) -> Generator[None]:
    if mesh is None:
        yield
        return
    with jax.set_mesh(mesh):
        yield


@contextlib.contextmanager
def _on_devices(topology: Topology) -> Generator[None]:
    """Returns the error of a step that was built for other devices, with a fix."""
    try:
        yield
    except ValueError as error:
        if not re.search(r"incompatible devices|should match the mesh passed to", str(error)):
            raise
        got = f"it holds a mesh of other devices than those of {topology.name!r}."
        fix = "Build it on topology.make_mesh({...}), or let it read the mesh from its context."
        raise ValueError(message("check(step)", got, fix)) from error


def _compute_dtype(policy: Any, jaxpr: Jaxpr) -> str:
    if policy is None:
        return _programs.compute_dtype(jaxpr)
    return short_name(default_of(policy).compute_dtype)


def _precision(policy: Any, compute: str, topology: Topology) -> Iterator[Finding]:
    """Yields a finding if the accelerator gains nothing from the policy's dtypes."""
    if topology.chip.platform == "cpu" or (policy is None and compute != "f16"):
        return
    judged = get_policy("16-mixed") if policy is None else policy
    report = examine(judged, find_accelerator(topology.chip.key))
    if report.status in ("slow", "unsupported"):
        lines = report.lines("slow", "unsupported")
        yield Finding(
            check="precision",
            severity="error" if report.status == "unsupported" else "warning",
            what=f"{report.policy} gains little or nothing on {report.accelerator.name}: "
            f"{'; '.join(lines[:-1])}.",
            culprit=str(judged),
            fix=lines[-1],
        )


# -- compiling -------------------------------------------------------------------------------------


def _compile(
    lowered: Lowered, topology: Topology, options: dict[str, Any]
) -> tuple[Any, list[Finding]]:
    """Returns the compiled step, or None and a finding that says why."""
    if lowered.lowered is None:
        return None, []
    try:
        with _lines_of_now():
            return lowered.lowered.compile(compiler_options=options or None), []
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = re.search(r"\(([\d.]+[KMGT])\) exceeds available HBM", str(error))
        needs = f"needs {needed[1]}" if needed else "needs more"
        limit = topology.chip.hbm_bytes
    return None, [too_large(lowered, f"{needs} of the {limit / 1e9:.2f} GB", topology)]


@contextlib.contextmanager
def _lines_of_now() -> Generator[None]:
    """Keeps out what JAX's cache on disk has of an earlier edit: the program, and other lines."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)
