"""Processes of one job: how they find each other, and whether they are about to do the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import traceback
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from pod_job.errors import message

_held: list[TextIO] = []


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = 100,
) -> None:
    """Joins this process to its job, as `jax.distributed.initialize`; wrong ids are errors.

    Args:
      coordinator: 'host:port' of process 0; None on Cloud TPU, GKE, Slurm and Open MPI, where JAX
        reads all three from the environment.
      num_processes, process_id: how many there are, and which one this is.
      heartbeat_seconds: after how long without a sign of life a process counts as dead.

    Raises:
      ValueError: `process_id` is not one of 0 to `num_processes` - 1, or some of the three are
        missing.
      RuntimeError: another process on this machine has the same id.

    Dtypes:
      None are concerned.

    Transforms:
      None. Call it before anything that starts JAX's backend.

    Example:
      >>> initialize("10.0.0.1:1234", num_processes=2, process_id=2)
      Traceback (most recent call last):
      ...
      ValueError: initialize(process_id): 2 is not below num_processes=2.
        Ids count from 0, one a process: 0 to 1.
    """
    given = (coordinator, num_processes, process_id)
    if any(x is not None for x in given) and any(x is None for x in given):
        got = "coordinator, num_processes and process_id go together; some are missing."
        fix = "Give all three, or none where Slurm, GKE or Cloud TPU knows them."
        raise ValueError(message("initialize", got, fix))
    if process_id is not None and num_processes is not None and not 0 <= process_id < num_processes:
        limit = "below 0" if process_id < 0 else f"not below num_processes={num_processes}"
        got = f"{process_id} is {limit}."
        fix = f"Ids count from 0, one a process: 0 to {num_processes - 1}."
        raise ValueError(message("initialize(process_id)", got, fix))
    if coordinator is not None:
        _claim(f"{coordinator} {process_id}", f"initialize(process_id={process_id})")
    jax.distributed.initialize(
        coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat_seconds
    )


def _claim(name: str, where: str) -> None:
    """Holds a lock of this machine until the process ends, so that no second one has its id.

    JAX would abort all processes of the job, without an exception, and say that one "tried to
    connect with a different incarnation". That is still what one sees of two machines.
    """
    import fcntl  # not on Windows, where no pod runs

    key = hashlib.sha256(name.encode()).hexdigest()[:16]
    file = (Path(tempfile.gettempdir()) / f"mpjax-{key}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        got = "another process of this job has the same id."
        fix = "Each process has its own: --process-id 0, 1, 2, ... (with Slurm: --distributed)."
        raise RuntimeError(message(where, got, fix)) from None
    _held.append(file)


def gather_values(value: Any) -> list[Any]:
    """Returns every process's value, in order of process; anything that JSON can hold.

    Example:
      >>> gather_values({"host": 0})
      [{'host': 0}]
    """
    text = json.dumps(value, sort_keys=True).encode()
    if jax.process_count() == 1:
        return [json.loads(text)]
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(text)))).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    pairs = zip(rows, lengths, strict=True)
    return [json.loads(row[: int(length)].tobytes()) for row, length in pairs]


@contextlib.contextmanager
def together(folder: epath.PathLike) -> Generator[None]:
    """Ends all processes within seconds when one of them fails, each with that one's message.

    The others may be in a collective or a barrier, which would wait for minutes; so each looks,
    beside its work, for a file in which one has written why it ended.

    Args:
      folder: one that all processes see, such as that of the checkpoints.
    """
    run = gather_values(uuid.uuid4().hex)[0]  # what an earlier run left is not this one's
    path = epath.Path(folder) / f"failed-{run}.txt"
    ended = threading.Event()
    threading.Thread(target=_look_for, args=(path, ended), daemon=True).start()
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1 or isinstance(error, SystemExit):
            raise
        if path.is_file():  # what failed here is what one that ended has left
            _end(path.read_text())
        text = str(error) if isinstance(error, ValueError | OSError) else traceback.format_exc()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{jax.process_index()}")
        partial.write_text(f"process {jax.process_index()} ended: {text}")
        partial.replace(path)
        _end(text)
    finally:
        ended.set()


def _look_for(path: epath.Path, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        if path.is_file():
            _end(path.read_text())


def _end(text: str) -> None:
    """Ends this process without the handlers that would wait for the others."""
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(2)


def agree(values: Mapping[str, Any], what: str = "processes") -> None:
    """Raises if not all processes hold equal values; call it before the first step.

    Args:
      values: what must be equal: the config, the corpus's digest, versions, the program's hash.
      what: what the error says is being compared.

    Raises:
      ValueError: on every process, with each differing key and who holds what.

    Dtypes:
      Values are compared as JSON.

    Transforms:
      None: all processes must call it, in the same order.

    Example:
      >>> agree({"steps": 100})
    """
    raise_differences(gather_values(dict(values)), what)


def raise_differences(rows: list[Any], what: str) -> None:
    """Raises if the rows, one a process, are not all equal."""
    keys = sorted({key for row in rows for key in row})
    lines: list[str] = []
    for key in keys:
        holders: dict[str, list[int]] = {}
        for process, row in enumerate(rows):
            holders.setdefault(repr(row.get(key)), []).append(process)
        if len(holders) > 1:
            said = "; ".join(f"{value} on {_processes(ids)}" for value, ids in holders.items())
            lines.append(f"{key!r}: {said}.")
    if lines:
        count = "1 value differs" if len(lines) == 1 else f"{len(lines)} values differ"
        got = f"{count} between processes."
        fix = "Start every process from the same files, versions and command."
        raise ValueError(message(what, got, *lines, fix))


def _processes(ids: list[int]) -> str:
    if len(ids) == 1:
        return f"process {ids[0]}"
    named = ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")
    return f"{len(ids)} processes ({named})"
