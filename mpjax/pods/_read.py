"""Reads a compiled step for its report: leaves, memory, traffic, time, and findings."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from mpjax._base import compat
from mpjax._base.dtypes import describe
from mpjax._base.tree import leaf_paths
from mpjax._jaxpr.equation import Jaxpr
from mpjax.pods import _args, _cost, _programs, _rules, _state_rules
from mpjax.pods._collectives import Collective, Names, as_traced, find_collectives, find_unknown
from mpjax.pods._copies import Differs, outputs_that_differ
from mpjax.pods._findings import Finding, Memory, Times
from mpjax.pods._flow import Place, ValueFlow
from mpjax.pods._hlo import Instruction, Module, read_module
from mpjax.pods._loops import Runs, run_counts
from mpjax.pods._network import bandwidth, crossing
from mpjax.pods._report import Report
from mpjax.pods._state_rules import Leaf
from mpjax.pods._topology import Topology


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A step before it is compiled."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Mesh | None
    jaxpr: Jaxpr
    difference: str  # between the traces of the first and the last process
    lowered: Any  # None where it cannot be lowered
    fingerprint: str


def read(report: Report, lowered: Lowered, compiled: Any, topology: Topology) -> Report:
    module = read_module(compiled)
    runs, flow = run_counts(module), ValueFlow(module)
    inputs, numbers = _inputs(lowered, module, flow)
    outputs = _outputs(lowered, compiled, module, inputs, numbers)
    parameters = {n: inputs[i] for n, i in numbers.items()}
    mesh = dict(lowered.mesh.shape) if lowered.mesh else {}
    names = Names(
        inputs={n: leaf.path for n, leaf in parameters.items()},
        outputs={n: leaf.path for n, leaf in enumerate(outputs)},
        state_inputs=frozenset(n for n, leaf in parameters.items() if leaf.is_state),
        state_outputs=frozenset(n for n, leaf in enumerate(outputs) if leaf.is_state),
        mesh=mesh,
        slice_axes=crossing(lowered.mesh, "slice_index") if lowered.mesh else (),
    )
    collectives = find_collectives(module, flow, runs, names, user_source)
    collectives = _as_on_accelerators(collectives, lowered, topology)
    memory = _memory(compiled, topology)
    cost = _cost.count(module, runs)
    axes = {n: leaf.axes for n, leaf in parameters.items()}
    differing = outputs_that_differ(module, axes, mesh, names.slice_axes)
    leaves = [*parameters.values()]
    findings = [
        *report.findings,
        *_of_memory(lowered, memory, topology),
        *_sent(report, collectives, outputs, leaves, mesh, topology.chip.platform),
        *_rules.unknown(find_unknown(module, runs, user_source)),
        *_state_rules.copies(outputs, differing, inputs),
        *_state_rules.replication(leaves),
        *_state_rules.donation(parameters, outputs, module.aliases),
    ]
    analysis = (compiled.cost_analysis() or {}).get("bytes accessed")
    return dataclasses.replace(
        report,
        findings=tuple(findings),
        collectives=collectives,
        memory=memory,
        flops=cost.flops,
        hbm_bytes=cost.hbm_bytes,
        cost_analysis_bytes=analysis and int(analysis),
        uncounted=cost.uncounted,
        unjudged=tuple(_unjudged(report, collectives, leaves, outputs, differing)),
        open_loops=_open_loops(module, runs),
        times=_times(cost, collectives, lowered.mesh, topology),
    )


def _as_on_accelerators(
    collectives: tuple[Collective, ...], lowered: Lowered, topology: Topology
) -> tuple[Collective, ...]:
    if topology.chip.platform != "cpu" or compat.cpu_as_accelerator():
        return collectives
    return as_traced(collectives, _programs.sent_dtypes(lowered.jaxpr))


def _of_memory(lowered: Lowered, memory: Memory, topology: Topology) -> Iterator[Finding]:
    if memory.limit and memory.peak > memory.limit:
        needs = f"needs {memory.peak / 1e9:.2f} of the {memory.limit / 1e9:.2f} GB"
        yield too_large(lowered, needs, topology)


def _sent(
    report: Report,
    collectives: Sequence[Collective],
    outputs: Sequence[Leaf],
    inputs: Sequence[Leaf],
    mesh: Mapping[str, int],
    platform: str,
) -> Iterator[Finding]:
    """Yields the findings about collectives, and about those that are missing."""
    shared = frozenset(a for c in collectives if c.role == "activations" for a in c.axes)
    yield from _state_rules.batch(inputs, mesh, shared)
    yield from _rules.weights(collectives, report.compute_dtype)
    yield from _rules.gradients(collectives, report.compute_dtype, platform)
    yield from _rules.repeated(collectives, outputs, mesh)
    yield from _rules.activations(collectives, report.compute_dtype)
    yield from _rules.gathered(collectives, _state_rules.batch_axes(inputs))


def _unjudged(
    report: Report,
    collectives: Sequence[Collective],
    inputs: Iterable[Leaf],
    outputs: Sequence[Leaf],
    differing: Sequence[Differs],
) -> Iterator[str]:
    """Yields the checks that had nothing to judge: they are not reported as 'ok'."""
    sent = {c.role for c in collectives}
    yield from (role for role in ("weights", "gradients", "activations") if role not in sent)
    leaves = [*inputs]
    if all(leaf.is_replicated for leaf in leaves if leaf.is_state):
        yield "replication"  # it compares with sharded parameters, and there are none
    if not any(not leaf.is_state for leaf in leaves) or report.num_devices == 1:
        yield "batch"
    if report.num_devices == 1 or _state_rules.undecided(outputs, differing):
        yield "copies"
    if not sent:
        yield "unknown"


def _open_loops(module: Module, runs: Runs) -> tuple[str, ...]:
    """Returns the source lines of loops whose number of trips is not in the program."""
    lines = (user_source(module.source(loop)) or loop.op_name for loop in runs.loops)
    return tuple(dict.fromkeys(lines))


def too_large(lowered: Lowered, needs: str, topology: Topology) -> Finding:
    arrays = _programs.largest_arrays(lowered.jaxpr)
    largest = arrays[0] if arrays else _programs.Array("", 0, "")
    named = "; ".join(f"{a.text} at {a.source}" for a in arrays)
    return Finding(
        check="memory",
        severity="error",
        what=f"the step {needs} that a device of {topology.name} has for a program. Largest "
        f"arrays: {named}.",
        culprit=largest.source,
        fix="Take a smaller batch a device, jax.checkpoint around layers, accumulate=, or shard "
        "more.",
    )


def user_source(lines: Sequence[str]) -> str:
    """Returns the innermost line that is the user's: not of an installed library, nor of mpjax."""
    mine = (line for line in lines if not re.search(r"/(?:site|dist)-packages/|^<", line))
    return _programs.shorten(next((x for x in mine if not x.startswith(_programs.PACKAGE)), ""))


def _inputs(lowered: Lowered, module: Module, flow: ValueFlow) -> tuple[list[Leaf], dict[int, int]]:
    """Returns the leaves of the arguments, and the program's parameter → its leaf."""
    paths = _args.input_paths(lowered.step, lowered.args)
    state = _args.state_arguments(lowered.args, lowered.lowered.out_info)
    flat = [
        (key_path, leaf, number in state)
        for number, arg in enumerate(lowered.args)
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(arg)
    ]
    numbers = _kept(paths, module)
    parameters = {i: module.entry.parameters[n] for n, i in numbers.items()}
    entry = module.entry.name

    def reads(parameter: Instruction) -> bool:
        return flow.reaches_product(Place(entry, parameter.name))

    leaves: list[Leaf] = []
    for i, (path, (key_path, leaf, is_state)) in enumerate(zip(paths, flat, strict=True)):
        local = parameters[i].shapes[0] if i in parameters else None
        leaves.append(
            Leaf(
                path=path,
                key_path=key_path,
                shape=leaf.shape,
                dtype=describe(leaf).partition("[")[0],
                bytes=local.bytes if local else 0,
                elements=local.elements if local else 0,
                dims=_split(getattr(leaf, "sharding", None), leaf.shape, lowered.mesh),
                is_state=is_state,
                is_weight=is_state and local is not None and reads(parameters[i]),
            )
        )
    return leaves, numbers


def _kept(paths: list[str], module: Module) -> dict[int, int]:
    """Returns parameter → leaf, by number: JAX leaves out arguments that are not used."""
    parameters = module.entry.parameters
    if len(parameters) == len(paths):
        return {n: n for n in parameters}
    # JAX names them as Python would reach them: state['params'].w[0].
    tails = {"/".join(path.split("/")[1:]) or path: i for i, path in enumerate(paths)}
    whole = {path: i for i, path in enumerate(paths)}
    leaf_of: dict[int, int] = {}
    for number, instruction in parameters.items():
        parts = re.findall(r"\['(.*?)'\]|\[(\d+)\]|\.(\w+)|^(\w+)", instruction.op_name)
        named = [part for groups in parts for part in groups if part]
        leaf = whole.get("/".join(named), tails.get("/".join(named[1:])))
        if leaf is not None:
            leaf_of[number] = leaf
    return _filled(leaf_of, sorted(parameters), len(paths))


def _filled(leaf_of: Mapping[int, int], numbers: Sequence[int], count: int) -> dict[int, int]:
    """Returns parameter → leaf, by their order too: a step may call its arguments otherwise.

    Both are in one order. Parameters between two that are known are the leaves between these, if
    there are as many.
    """
    filled = dict(leaf_of)
    known = [(-1, -1), *sorted(leaf_of.items()), (len(numbers), count)]
    for (before, first), (after, last) in itertools.pairwise(known):
        if after - before == last - first:
            filled.update(zip(range(before + 1, after), range(first + 1, last), strict=True))
    return filled


def _outputs(
    lowered: Lowered,
    compiled: Any,
    module: Module,
    inputs: list[Leaf],
    numbers: dict[int, int],
) -> list[Leaf]:
    """Returns the leaves of the results, under the paths of the state that they replace."""
    root = module.entry.root
    flat = jax.tree_util.tree_leaves_with_path(lowered.lowered.out_info)
    state = {leaf.path: leaf for leaf in inputs if leaf.is_state}
    by_tail = {"/".join(path.split("/")[1:]): path for path in state}
    paths = leaf_paths(lowered.lowered.out_info)
    leaves: list[Leaf] = []
    shardings = jax.tree.leaves(compiled.output_shardings)
    known_by = zip(flat, paths, shardings, strict=True)
    for number, ((key_path, out), path, sharding) in enumerate(known_by):
        donor = numbers.get(module.aliases.get(number, -1))
        tail = "/".join(path.split("/")[1:])
        of = inputs[donor].path if donor is not None else by_tail.get(path, by_tail.get(tail))
        known = state.get(of or "")
        is_state = known is not None and known.shape == out.shape
        local = root.shapes[number] if number < len(root.shapes) else None
        leaves.append(
            Leaf(
                path=known.path if known and is_state else f"result {path}".strip(),
                key_path=key_path,
                shape=out.shape,
                dtype=describe(out).partition("[")[0],
                bytes=local.bytes if local else 0,
                elements=local.elements if local else 0,
                dims=_split(sharding, out.shape, lowered.mesh),
                is_state=is_state,
            )
        )
    return leaves


def _split(sharding: Any, shape: tuple[int, ...], mesh: Mesh | None) -> tuple[frozenset[str], ...]:
    """Returns the mesh axes that split each axis of an array."""
    if mesh is None or sharding is None:
        return ()
    if not isinstance(sharding, NamedSharding):
        return _split_by_device(sharding.devices_indices_map(shape), len(shape), mesh)
    dims = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    dims += [()] * (len(shape) - len(dims))  # a spec may leave out the last ones
    return tuple(frozenset(a for a in dim if mesh.shape.get(a, 1) > 1) for dim in dims)


def _split_by_device(indices: Mapping[Any, Any], ndim: int, mesh: Mesh) -> tuple[Any, ...]:
    """Returns `_split` of a sharding that the compiler chose: it names no axes."""
    first = indices[mesh.devices.flat[0]]
    there = {
        axis: indices[mesh.devices[tuple(int(n == number) for n in range(mesh.devices.ndim))]]
        for number, axis in enumerate(mesh.axis_names)
        if mesh.shape[axis] > 1
    }
    return tuple(frozenset(a for a in there if there[a][dim] != first[dim]) for dim in range(ndim))


def _memory(compiled: Any, topology: Topology) -> Memory:
    stats = compiled.memory_analysis()
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    limit = topology.chip.hbm_bytes
    if topology.chip.platform == "cuda":
        limit = int(limit * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")))
    return Memory(
        peak=stats.peak_memory_in_bytes or arguments + outputs - aliased + temporaries,
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        limit=limit,
    )


def _times(
    cost: _cost.Cost,
    collectives: tuple[Collective, ...],
    mesh: Mesh | None,
    topology: Topology,
) -> Times:
    """Returns the counts divided by the chip's peaks; overlap and latency are left out."""
    chip = topology.chip
    if not chip.dense_flops:
        return Times(compute=0.0, hbm=0.0, network=0.0)
    wide = sum(n for dtype, n in cost.flops.items() if dtype in ("f32", "f64"))
    compute = (cost.total_flops - wide) / chip.dense_flops + wide / chip.float32_flops
    network = 0.0
    for c in collectives:
        speed = bandwidth(topology, mesh, c.axes) if mesh else chip.link_bandwidth
        network += c.wire_bytes / speed
    return Times(compute=compute, hbm=cost.hbm_bytes / chip.hbm_bandwidth, network=network)
