"""What a compiled step says: its leaves, memory, traffic and time, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from mpjax._dtypes import describe
from mpjax._tree import leaf_paths
from mpjax.pods import _args, _cost, _programs, _rules
from mpjax.pods._collectives import Collective, Names, find_collectives
from mpjax.pods._findings import Finding, Memory, Times
from mpjax.pods._hlo import Module, read_module
from mpjax.pods._loops import Runs, run_counts
from mpjax.pods._network import bandwidth, crossing
from mpjax.pods._report import Report
from mpjax.pods._rules import Leaf
from mpjax.pods._topology import Topology

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A step before it is compiled."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Mesh | None
    jaxpr: Any
    difference: str  # between what the first and the last process trace
    lowered: Any  # None where it cannot be lowered
    fingerprint: str


def read(report: Report, lowered: Lowered, compiled: Any, topology: Topology) -> Report:
    module = read_module(compiled)
    runs = run_counts(module)
    inputs, numbers = _inputs(lowered, module)
    outputs = _outputs(lowered, module, inputs, numbers)
    parameters = {n: inputs[i] for n, i in numbers.items()}
    names = Names(
        inputs={n: leaf.path for n, leaf in parameters.items()},
        outputs={n: leaf.path for n, leaf in enumerate(outputs)},
        state_inputs=frozenset(n for n, leaf in parameters.items() if leaf.is_state),
        state_outputs=frozenset(n for n, leaf in enumerate(outputs) if leaf.is_state),
        mesh=dict(lowered.mesh.shape) if lowered.mesh else {},
        slice_axes=crossing(lowered.mesh, "slice_index") if lowered.mesh else (),
    )
    collectives = find_collectives(module, runs, names, user_source)
    memory = _memory(compiled, topology)
    cost = _cost.count(module, runs)
    findings = [*report.findings]
    if memory.limit and memory.peak > memory.limit:
        needs = f"needs {memory.peak / 1e9:.2f} of the {memory.limit / 1e9:.2f} GB"
        findings.append(too_large(lowered, needs, topology))
    findings += _rules.weights(collectives, report.compute_dtype)
    findings += _rules.gradients(collectives)
    findings += _rules.activations(collectives, report.compute_dtype)
    findings += _rules.replication([*parameters.values()])
    findings += _rules.donation(parameters, outputs, module.aliases)
    analysis = compiled.cost_analysis() or {}
    return dataclasses.replace(
        report,
        findings=tuple(findings),
        collectives=collectives,
        memory=memory,
        flops=cost.flops,
        hbm_bytes=cost.hbm_bytes,
        cost_analysis_bytes=int(analysis["bytes accessed"]) if analysis else None,
        uncounted=cost.uncounted,
        open_loops=_open_loops(module, runs),
        times=_times(cost, collectives, lowered.mesh, topology),
    )


def _open_loops(module: Module, runs: Runs) -> tuple[str, ...]:
    """Returns the lines of the loops whose trips the program does not tell."""
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
    return _programs.shorten(next((x for x in mine if not x.startswith(_PACKAGE)), ""))


def _inputs(lowered: Lowered, module: Module) -> tuple[list[Leaf], dict[int, int]]:
    """Returns the leaves of the arguments, and which of them each parameter of the program is."""
    paths = _args.input_paths(lowered.step, lowered.args)
    state = _args.state_arguments(lowered.args, lowered.lowered.out_info)
    flat = [
        (key_path, leaf, number in state)
        for number, arg in enumerate(lowered.args)
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(arg)
    ]
    numbers = _kept(paths, module)
    parameters = {i: module.entry.parameters[n] for n, i in numbers.items()}
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
                is_replicated=local is not None and local.dims == leaf.shape,
                is_state=is_state,
            )
        )
    return leaves, numbers


def _kept(paths: list[str], module: Module) -> dict[int, int]:
    """Returns which leaf each of the program's parameters is: those not used are left out."""
    parameters = module.entry.parameters
    if len(parameters) == len(paths):
        return {n: n for n in parameters}
    # JAX names them as Python would reach them: state['params'].w[0].
    tails = {"/".join(path.split("/")[1:]) or path: i for i, path in enumerate(paths)}
    whole = {path: i for i, path in enumerate(paths)}
    found: dict[int, int] = {}
    for number, instruction in parameters.items():
        parts = re.findall(r"\['(.*?)'\]|\[(\d+)\]|\.(\w+)|^(\w+)", instruction.op_name)
        named = [part for groups in parts for part in groups if part]
        leaf = whole.get("/".join(named), tails.get("/".join(named[1:])))
        if leaf is not None:
            found[number] = leaf
    return found


def _outputs(
    lowered: Lowered, module: Module, inputs: list[Leaf], numbers: dict[int, int]
) -> list[Leaf]:
    """Returns the leaves of the results, under the paths of the state that they replace."""
    root = module.entry.root
    flat = jax.tree_util.tree_leaves_with_path(lowered.lowered.out_info)
    state = {leaf.path: leaf for leaf in inputs if leaf.is_state}
    by_tail = {"/".join(path.split("/")[1:]): path for path in state}
    paths = leaf_paths(lowered.lowered.out_info)
    leaves: list[Leaf] = []
    for number, ((key_path, out), path) in enumerate(zip(flat, paths, strict=True)):
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
                is_replicated=local is not None and local.dims == out.shape,
                is_state=is_state,
            )
        )
    return leaves


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
    """Returns what the table of chips makes of the counts; overlap and latency are left out."""
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
