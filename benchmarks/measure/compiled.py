"""Counts of a compiled program: bytes accessed, flops, temporaries, casts, and its compile time.

Bytes and flops come from XLA's own cost analysis of the optimised module. It counts the body of
a loop once; here it is counted as often as it runs, by analysing each body as a module of its
own and multiplying. It counts no library call (cuDNN's convolutions on a GPU): those are added.
Of stacks that a loop takes a slice of, what it counts and nothing reads is taken off (`slices`).
"""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax
from jaxlib import _jax

from mpjax.pods._hlo import Computation, Module, parse_module, read_module
from mpjax.pods._loops import trip_count

from . import hbm, library_calls, prefetches, slices
from .targets import TPUS, Target

# JAX gives cost_analysis() on CPU and TPU only; its counter works on any target's module. It is
# private: JAX 0.12 has the parser in a module of its own, and a later one may have neither.
try:
    from jaxlib import _hlo as _parser
except ImportError:
    _parser = _jax
hlo_module_from_text = getattr(_parser, "hlo_module_from_text", None)
hlo_module_cost_analysis = getattr(_jax, "hlo_module_cost_analysis", None)

Cost = dict[str, float]
_CALLS = ("call", "async-start")  # what runs another computation's operations as its own


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one program costs on one target; None is "not available"."""

    bytes_accessed: float | None
    operands_accessed: float | None  # of these bytes, all but a TPU's prefetches
    hbm_traffic: float | None  # of a TPU's program without loops
    flops: float | None
    temporaries: int
    converts: int  # floating casts in the optimised text, fused ones included
    trace_s: float  # processor seconds of this process, as are the next two: other work on the
    lower_s: float  # machine shows little in them, and compiler threads add up
    compile_s: float
    elapsed_s: float  # seconds by the clock, for all three

    @property
    def total_s(self) -> float:
        """Processor seconds for all three."""
        return self.trace_s + self.lower_s + self.compile_s


def compile_for(fun: Callable[..., Any], target: Target, *args: Any) -> Compiled:
    """Returns the counts of `jax.jit(fun)` for arguments like these (arrays or specs)."""
    specs = target.specs(args)
    jax.clear_caches()  # or the second of two models would find its softmax traced
    clock, start = time.perf_counter(), time.process_time()
    traced = jax.jit(fun).trace(*specs)
    after_trace = time.process_time()
    lowered = traced.lower()
    after_lower = time.process_time()
    executable = lowered.compile()
    after_compile, elapsed = time.process_time(), time.perf_counter() - clock
    text = executable.as_text()
    cost = module_cost(text)
    operations = module_cost(prefetches.without(text))
    return Compiled(
        bytes_accessed=cost and cost["bytes accessed"],
        operands_accessed=operations and operations["bytes accessed"],
        hbm_traffic=hbm.traffic(read_module(executable)) if target.name in TPUS else None,
        flops=cost and cost["flops"],
        temporaries=executable.memory_analysis().temp_size_in_bytes,
        converts=len(re.findall(r"= (?:bf16|f16|f32)\[[^ ]* convert\(", text)),
        trace_s=after_trace - start,
        lower_s=after_lower - after_trace,
        compile_s=after_compile - after_lower,
        elapsed_s=elapsed,
    )


def module_cost(text: str) -> Cost | None:
    """Returns the cost of a whole module, loops multiplied; None where JAX has no counter."""
    if hlo_module_from_text is None or hlo_module_cost_analysis is None:
        return None
    text = _synchronous(text)
    module = parse_module(hlo_module_from_text(text).as_serialized_hlo_module_proto())
    total = _plus(_keep(_analysis(text)), _library(module, module.entry))
    return _plus(total, _loops(text, module, module.entry))


def _analysis(text: str) -> Cost:
    return hlo_module_cost_analysis(jax.devices("cpu")[0].client, hlo_module_from_text(text))


def _synchronous(text: str) -> str:
    """Returns the text with each fusion that runs beside others as one that does not.

    XLA's analysis counts the whole buffers of `fusion-start` and `fusion-done`, of which a loop
    that stacks its results writes one row; those of a `fusion` it counts as they are used.
    """
    done = re.findall(r" = (\S+) fusion-done\(%([\w.\-]+)\)", text)
    results = {name: result for result, name in done}

    def start(match: re.Match[str]) -> str:
        return f"%{match[1]} = {results[match[1]]} fusion("

    text = re.sub(r"%([\w.\-]+) = \(\(.*\) fusion-start\(", start, text)
    return re.sub(r" fusion-done\((%[\w.\-]+)\)", r" bitcast(\1)", text)


def _library(module: Module, computation: Computation) -> Cost:
    """Returns what library calls cost in a computation and in what it calls, loops once."""
    found = library_calls.cost(computation)
    for made in computation.instructions.values():
        if made.opcode == "while" or (made.opcode in _CALLS and made.called):
            found = _plus(found, _library(module, module.computations[made.called[0]]))
    return found


def _loops(text: str, module: Module, computation: Computation) -> Cost:
    """Returns what the loops reached from a computation cost beyond their first turn."""
    extra = {"bytes accessed": 0.0, "flops": 0.0}
    for made in computation.instructions.values():
        if made.opcode == "while":
            body, trips = module.computations[made.body], trip_count(module, computation, made)
            if trips is None:
                raise ValueError(f"cost: how often does {made.name!r} run? Its program says not.")
            once = _plus(_body_cost(text, body.name), _library(module, body))
            inside = _loops(text, module, body)
            extra = _plus(extra, _plus(_times(once, trips - 1), _times(inside, trips)))
            extra["bytes accessed"] -= slices.counted_in_vain(module, body) * trips
        elif made.opcode in _CALLS and made.called:
            extra = _plus(extra, _loops(text, module, module.computations[made.called[0]]))
    return extra


def _body_cost(text: str, body: str) -> Cost:
    """Returns the cost of one computation, made the entry of a module without the old header."""
    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("HloModule"))
    lines[header] = "HloModule body"
    text = "\n".join(line.removeprefix("ENTRY ") for line in lines)
    text = re.sub(rf"^(%?{re.escape(body)} \()", r"ENTRY \1", text, flags=re.MULTILINE)
    return _keep(_analysis(text))


def _keep(cost: Cost) -> Cost:
    return {name: cost.get(name, 0.0) for name in ("bytes accessed", "flops")}


def _plus(a: Cost, b: Cost) -> Cost:
    return {name: a[name] + b[name] for name in a}


def _times(a: Cost, factor: int) -> Cost:
    return {name: value * factor for name, value in a.items()}
