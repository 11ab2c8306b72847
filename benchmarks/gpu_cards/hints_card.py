"""Card 4: what autocast's hints save by the clock: all against none, then one at a time."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from measure.variants import VARIANTS as WAYS
from networks import NETWORKS, Network

from mpjax._autocast.speed import hints

from . import clock, kernels
from .jobs import Job, Row
from .plans import Plan
from .programs import Values, compiled, lowered

ALL, NONE, WITHOUT = "all hints", "no hints", "without "
HERE = ("all", "gpu")  # of which platforms a hint is tried


def claims(hint: hints.Hint) -> tuple[str, list[str]]:
    """Returns the way of running that a hint is for, and the networks where it claims most.

    Of "in float8 vit .97, transformer .98; temporaries vit .84": float8, and vit and transformer.
    """
    way = "autocast"
    for recipe in ("float8", "int8"):
        if f"in {recipe}" in hint.gain:
            way = recipe
    named = re.findall(r"([a-z]\w*) \.\d", hint.gain)
    networks = list(dict.fromkeys(name for name in named if name in NETWORKS))
    return way, networks[:2]


def jobs(plan: Plan, code: str) -> list[Job]:
    """Returns jobs for one hint at a time, on the networks that claim it, then for all at once."""
    whole = [
        _job(plan, name, NETWORKS[name](size), "autocast", {NONE: tuple(hints.HINTS)}, code)
        for name, size in plan.hints.items()
    ]
    single: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    for hint in hints.HINTS.values():
        is_asked = plan.single_hints is None or hint.name in plan.single_hints
        if not is_asked or not set(HERE) & set(hint.platforms.split(", ")):
            continue
        way, networks = claims(hint)
        for name in networks:
            single.setdefault((name, way), {})[WITHOUT + hint.name] = (hint.name,)
    alone = [
        _job(plan, f"{name} {way}", NETWORKS[name](plan.hint_size), way, without, code)
        for (name, way), without in single.items()
    ]
    return alone + whole  # the small programs first: they say which hint pays


def _job(
    plan: Plan,
    title: str,
    network: Network,
    way: str,
    without: dict[str, tuple[str, ...]],
    code: str,
) -> Job:
    values = Values(network)
    programs = Programs(network, way)
    left_out: dict[str, tuple[str, ...]] = {ALL: (), **without}
    prepare: dict[str, Callable[[], Any]] = {
        variant: functools.partial(_timed, programs, values, names)
        for variant, names in left_out.items()
    }

    def measure(prepared: dict[str, Any]) -> dict[str, Row]:
        alike = [name for name, found in prepared.items() if found is None]
        others = {name: p for name, p in prepared.items() if name not in alike}
        rows = clock.in_turns(others, plan.patience)
        kernels.add_busy(rows, others)
        return rows | {name: {"same_program": True} for name in alike}

    seconds = plan.first_s + 5.0 * len(without)
    return Job(4, title, network.size, tuple(left_out), prepare, measure, code, seconds)


class Programs:
    """The text of a network's gradients with all hints, to see where leaving one out is nothing."""

    def __init__(self, network: Network, way: str) -> None:
        self.network, self.way = network, way

    @functools.cached_property
    def whole(self) -> Any:
        """Returns it with all hints, lowered."""
        return self.lowered(())

    def lowered(self, without: tuple[str, ...]) -> Any:
        """Returns the gradients, lowered without some hints."""
        step = jax.jit(jax.value_and_grad(WAYS[self.way](self.network, "bf16")))
        specs = (self.network.params, self.network.batch)
        return lowered(step, *specs, without=without, forget=True)


def _timed(programs: Programs, values: Values, without: tuple[str, ...]) -> Any:
    """Returns loss and gradients, compiled; None where the program is the one with all hints."""
    if not without:
        lower = lambda: programs.whole  # noqa: E731 - what the two branches share
    else:
        made = programs.lowered(without)
        if made.as_text() == programs.whole.as_text():
            return None
        lower = lambda: made  # noqa: E731
    program, facts = compiled(lower)
    values.prepare()
    return clock.JaxStep(program, lambda: (values.params(), values.batch()), facts)
