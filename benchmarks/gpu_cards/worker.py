"""The process that measures: prepares jobs in threads, and measures one while nothing else runs."""

import concurrent.futures
import datetime
import json
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from measure import machine
from measure.store import Store

from . import device, jobs, tables, torch_card
from .plans import PLANS, Plan

DONE, BROKEN = 0, 3
"""Exit codes: measured what there was time for · the device has to be started anew."""
IN_HAND = "in_hand.json"  # what is being measured, for the process that started this one
BETWEEN = 2.0  # seconds kept for writing

_MPJAX = ("mpjax", "benchmarks/networks")
_CARDS: dict[int, tuple[str, tuple[str, ...]]] = {  # a card's module, and what its rows depend on
    0: ("ceilings", ()),
    1: ("right", _MPJAX),
    2: ("step", _MPJAX),
    3: ("torch_card", ("benchmarks/peers/torch_models.py", "benchmarks/networks")),
    4: ("hints_card", _MPJAX),
    5: ("eight_bits_card", _MPJAX),
    6: ("optimizers_card", ("mpjax", "benchmarks/low_precision_steps.py")),
    7: ("overheads_card", _MPJAX),
}


class Gate:
    """Lets threads prepare while it is open; closing it waits for those that are at it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open, self._inside = True, 0

    def through(self, fun: Callable[[], Any]) -> Any:
        """Runs the function while the gate is open; returns its result or its exception."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)
            self._inside += 1
        try:
            return jobs.attempted(fun)
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def open(self) -> None:
        """Lets them in."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self, seconds: float) -> bool:
        """Lets no more in, and waits; returns whether all are out in time."""
        with self._changed:
            self._is_open = False
            return self._changed.wait_for(lambda: self._inside == 0, max(seconds, 0))


class Worker:
    """Measures what has no row yet, until the time is over."""

    def __init__(self, store: Store, folder: pathlib.Path, target: str, deadline: float) -> None:
        self.store, self.folder, self.target, self.deadline = store, folder, target, deadline
        self.gate = Gate()
        # XLA compiles a program on all cores, and remembers which kernels were fastest: the second
        # variant of a network takes a fraction. On an H200 with 16 cores five at a time took 70 s
        # each, the sixth 9 s and 3 s. And a measurement waits for all that were begun.
        self.threads = 2
        self.pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        self.left: list[str] = []

    def run(self, todo: list[jobs.Job]) -> int:
        """Measures the jobs in their order; returns the exit code."""
        try:
            return self._run(todo)
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.gate.open()  # or those that wait in front of it would wait for ever

    def _run(self, todo: list[jobs.Job]) -> int:
        waiting = [job for job in todo if not self._is_settled(job)]
        # Time on a GPU is short: of a card, what no run has measured yet comes first.
        waiting.sort(key=lambda job: (job.card, self._is_known(job)))
        started: dict[int, dict[str, concurrent.futures.Future[Any]]] = {}
        for index, job in enumerate(waiting):
            if self._seconds() < job.seconds:
                self._leave_out(waiting[index:])
                break
            in_hand = self._take_in_hand(job)
            self._start_ahead(waiting, index, started)
            prepared = self._prepared(started.pop(index))
            if prepared is None:  # no time is left
                self._leave_out(waiting[index:])
                break
            self._measure(job, prepared)
            in_hand.unlink()
            if not _device_works():
                return BROKEN
        return DONE

    def _start_ahead(self, waiting: list[jobs.Job], index: int, started: dict[int, Any]) -> None:
        """Hands this job to the threads, and of the next ones as many as keep them busy."""
        busy = sum(len(started[i]) * waiting[i].load for i in started)
        for ahead in range(index, len(waiting)):
            if ahead > index and busy >= self.threads:
                break
            if ahead not in started:
                prepare = waiting[ahead].prepare
                started[ahead] = {
                    name: self.pool.submit(self.gate.through, fun) for name, fun in prepare.items()
                }
                busy += len(prepare) * waiting[ahead].load

    def _prepared(self, futures: dict[str, Any]) -> dict[str, Any] | None:
        """Waits until a job is prepared and no thread is at work; None when the time is over."""
        if not all(future.done() for future in futures.values()):
            self.gate.open()
        done = concurrent.futures.wait(futures.values(), timeout=max(self._seconds(), 0))
        if done.not_done or not self.gate.close(self._seconds()):
            return None
        return {name: future.result() for name, future in futures.items()}

    def _take_in_hand(self, job: jobs.Job) -> pathlib.Path:
        """Says which job is waited for, in case this process breaks."""
        names = {"card": job.card, "network": job.network, "size": job.size, "code": job.code}
        path = self.folder / IN_HAND
        path.write_text(json.dumps({**names, "target": self.target, "variants": job.variants}))
        return path

    def _measure(self, job: jobs.Job, prepared: dict[str, Any]) -> None:
        began = time.monotonic()
        found = jobs.attempted(lambda: job.measure(prepared))
        if isinstance(found, Exception):
            found = dict.fromkeys(job.variants, found)
        took = time.monotonic() - began
        for variant, row in found.items():
            row = jobs.failed(row) if isinstance(row, Exception) else row
            self.put(job, variant, {**row, "took_s": round(took, 1)})
        self.write()
        print(f"card {job.card}, {job.network}: {took:.1f} s", flush=True)

    def put(self, job: jobs.Job, variant: str, row: jobs.Row) -> None:
        """Writes a row down."""
        key = (f"card {job.card}", self.target, "", job.size, job.network, variant)
        self.store.put(*key, **row, code=job.code, jax=jax.__version__)

    def write(self) -> None:
        """Writes the tables."""
        (self.folder / "gpu.md").write_text(tables.document(self.store))

    def _is_settled(self, job: jobs.Job) -> bool:
        keys = [
            (f"card {job.card}", self.target, "", job.size, job.network, v) for v in job.variants
        ]
        rows = [self.store.rows.get(key) for key in keys]
        return all(jobs.is_settled(row, job.code, len(self.store.runs)) for row in rows)

    def _is_known(self, job: jobs.Job) -> bool:
        """Returns whether the network was measured, on any GPU and with whatever code."""
        rows = self.store.part(f"card {job.card}")
        return any((row["size"], row["network"]) == (job.size, job.network) for row in rows)

    def _leave_out(self, rest: list[jobs.Job]) -> None:
        by_card: dict[int, list[str]] = {}
        for job in rest:
            by_card.setdefault(job.card, []).append(job.network)
        for card, names in by_card.items():
            line = f"card {card}: {', '.join(names)}: {max(self._seconds(), 0):.0f} s were left"
            self.left.append(f"{line}, one takes about {rest[0].seconds:.0f} s")

    def _seconds(self) -> float:
        return self.deadline - BETWEEN - time.monotonic()


def _device_works() -> bool:
    """Returns whether the device still computes: some errors end it for this process."""
    return jobs.attempted(lambda: int(jax.numpy.ones(8).sum())) == 8


def code_of(card: int) -> str:
    """Returns a hash of what a card's rows depend on: JAX, its own code, and what it measures."""
    module, parts = _CARDS[card]
    own = [f"benchmarks/gpu_cards/{name}.py" for name in (module, "clock", "programs")]
    if card in (5, 7):
        own.append("benchmarks/gpu_cards/step.py")
    return f"{jax.__version__} {machine.tree_hash(*own, *parts)}"


def jobs_of(cards: list[int], plan: Plan, python: str, platform: str) -> list[jobs.Job]:
    """Returns the jobs of some cards."""
    import importlib

    found: list[jobs.Job] = []
    for card in cards:
        module = importlib.import_module(f"gpu_cards.{_CARDS[card][0]}")
        more = (python, platform) if module is torch_card else ()
        found += module.jobs(plan, code_of(card), *more)
    return found


def main(options: Any) -> int:
    """Runs the cards that `options` names; returns an exit code."""
    here = device.start(options.device)
    folder: pathlib.Path = options.out
    store = Store.read(folder / "gpu.json")
    about = device.about(here)
    if not store.runs or store.runs[-1]["id"] != options.worker:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
        store.begin(id=options.worker, command=options.command, date=date, left=[], **about)
        store.write()
    deadline = time.monotonic() + options.seconds
    worker = Worker(store, folder, about["device"], deadline)
    todo = jobs_of(options.cards, PLANS[options.size], options.torch, here.platform)
    code = worker.run(todo)
    if code == DONE:
        (folder / IN_HAND).unlink(missing_ok=True)
    store.runs[-1]["left"] += worker.left
    store.write()
    worker.write()
    for line in worker.left:
        print(f"left out: {line}", flush=True)
    return code
