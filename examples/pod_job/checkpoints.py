"""Checkpoints that are proven whole before a run resumes from one: Orbax, and digests beside it."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from etils import epath

from pod_job.errors import message
from pod_job.processes import gather_values

T = TypeVar("T")
_CHUNK = 1 << 22


class Checkpoints:
    """Saves a training state while the next steps run, and restores the newest whole one.

    Orbax writes the arrays, each process its own shards, and renames a checkpoint when it is
    complete. What happens later, a disk that loses a block or a copy that was cut short, it does
    not see. So the processes write the digests of the files beside them, sharing the work, and
    look at them before they restore: one that does not match is moved to `refused/`, by name,
    and the one before it is taken. One without digests is taken, and said to be unproven. All
    processes decide together.

    Attributes:
      folder: where checkpoints are kept, one folder a step; all processes must see it. A path, or
        what `etils.epath` opens, such as 'gs://bucket/run'.
      keep: how many of them.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Checkpoints(folder) as checkpoints:
      ...         checkpoints.save(1, {"w": jnp.ones(2)})
      ...     with Checkpoints(folder) as checkpoints:
      ...         step, state, said = checkpoints.restore({"w": jnp.zeros(2)})
      >>> step, float(state["w"][0]), said
      (1, 1.0, [])
    """

    def __init__(self, folder: epath.PathLike, *, keep: int = 3):
        import orbax.checkpoint as ocp

        path = epath.Path(folder)
        is_local = "://" not in os.fspath(path)  # only these have a working directory
        self.folder: epath.Path = path.resolve() if is_local else path
        where = f"checkpoint folder {folder}"
        try:
            if self.folder.is_file():
                raise FileExistsError(errno.EEXIST, "is a file")
            self.folder.mkdir(parents=True, exist_ok=True)
        except ImportError as error:  # of a bucket's client
            fix = "For gs:// paths: pip install gcsfs."
            raise ValueError(message(where, f"cannot be opened ({error}).", fix)) from error
        except FileExistsError as error:
            raise ValueError(message(where, "is a file.", "Type a folder's name.")) from error
        except OSError as error:
            got = f"it cannot be made ({error.strerror})."
            fix = "Type one that every process may write to: --set checkpoint.folder=..."
            raise ValueError(message(where, got, fix)) from error
        self.keep: int = keep
        started = [path for path in self.folder.glob("*") if path.name.isdigit()]
        partial = [*self.folder.glob("*.orbax-checkpoint-tmp*")]
        self._unsealed: int | None = None
        self._args: Any = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        complete = self._manager.all_steps()
        # In a bucket nothing is renamed: what was not completed lies under its final name.
        partial += [path for path in started if int(path.name) not in complete]
        self._cut_off: list[epath.Path] = sorted(partial)

    def claim(self, job: Mapping[str, Any]) -> None:
        """Says whose checkpoints these are, or raises if they are another job's.

        Args:
          job: what decides the state and its course, by name, such as {'model.width': 64}.

        Raises:
          ValueError: the folder's checkpoints come from a job with other values.
        """
        path = self.folder / "job.json"
        if path.is_file() and self._manager.all_steps():  # else nothing of that job is left
            before, now = _json(path), json.loads(json.dumps(dict(job)))
            names = sorted(k for k in before.keys() | now if before.get(k) != now.get(k))
            if names:
                lines = [f"{k!r} is {before.get(k)!r} there, {now.get(k)!r} here." for k in names]
                fix = "Use another folder, or the same values."
                got = "its checkpoints are another job's."
                raise ValueError(message(f"checkpoint folder {self.folder}", got, *lines, fix))
        gather_values(None)  # all have read before one writes
        if jax.process_index() == 0:
            _write(path, dict(job))

    def save(self, step: int, state: Any) -> None:
        """Starts to save a state; the copy is taken now, the writing goes on behind the steps."""
        self._manager.wait_until_finished()
        self.seal()
        self._manager.save(step, args=self._args.StandardSave(state), force=True)
        self._unsealed = step

    def seal(self) -> None:
        """Writes the digests of the last checkpoint if it is complete; call it at each step."""
        step, root = self._unsealed, self.folder / str(self._unsealed)
        if step is None or self._manager.is_saving_in_progress() or not root.is_dir():
            return
        self._unsealed = None
        process, count = jax.process_index(), jax.process_count()
        digests = {f.relative_to(root).as_posix(): _digest(f) for f in _files(root)[process::count]}
        seal = {"process": process, "count": count, "digests": digests}
        _write(root / f"seal-{process}.json", seal)

    def restore(self, template: T) -> tuple[int, T | None, list[str]]:
        """Returns the newest checkpoint that is whole, as far as one can tell.

        Orbax has completed each that it lists. One that no digests were written of, because the run
        was killed just then, is taken, and said to be unproven; one that does not match its digests
        is not.

        Args:
          template: a state, or its `jax.ShapeDtypeStruct`s with shardings.

        Returns:
          Its step and state, 0 and None where there is none; and a line for each that was refused,
          was never completed, or was taken unproven.

        Raises:
          ValueError: a completed checkpoint is broken, and none before it is whole. Whether to
            start anew is left to the job's owner.

        Dtypes:
          Those of the template; what was saved has the same.

        Transforms:
          None: all processes must call it.
        """
        said = [f"refused {path}: it was being written when a run ended." for path in self._cut_off]
        broken: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            where = f"checkpoint {self.folder / str(step)}"
            faults, unsealed = self._look_at(step)
            if not faults:
                break
            broken.append(step)
            said.append(f"refused {where}: {'; '.join(faults)}.")
        else:
            if broken:
                fix = "To start anew, use another folder; these stay where they are."
                raise ValueError(message("restore", "no checkpoint is whole.", *said, fix))
            return 0, None, said
        for number in broken:
            self._put_aside(number)
        if unsealed:
            who = "process " + ", ".join(map(str, unsealed))
            said.append(f"{where} is taken unproven: the run ended before {who} sealed it.")
        state: Any = self._manager.restore(step, args=self._args.StandardRestore(template))
        return step, state, said

    def _look_at(self, step: int) -> tuple[list[str], list[int]]:
        """Returns what is wrong with a checkpoint, and which processes wrote no digests of it.

        Each process reads its share of the files.
        """
        root = self.folder / str(step)
        process, count = jax.process_index(), jax.process_count()
        seals: list[dict[str, Any]] = []
        found: list[str] = []
        for path in sorted(root.glob("seal-*.json")):
            try:
                seals.append(_json(path))
            except ValueError:
                found.append(f"{path.name} is corrupted")
        if found:
            return found, []
        expected = seals[0]["count"] if seals else count
        missing = sorted(set(range(expected)) - {seal["process"] for seal in seals})
        digests: dict[str, str] = {}
        for seal in seals:
            digests |= seal["digests"]
        for name in sorted(digests)[process::count]:
            if not (root / name).is_file():
                found.append(f"{name} is missing")
            elif (got := _digest(root / name)) != digests[name]:
                found.append(f"{name} is corrupted ({got}, saved as {digests[name]})")
        every = gather_values(found)
        return list(dict.fromkeys(fault for faults in every for fault in faults)), missing

    def _put_aside(self, step: int) -> None:
        """Moves a broken checkpoint out of the way, where it can be looked at."""
        if jax.process_index() == 0:
            aside = self.folder / "refused"
            aside.mkdir(exist_ok=True)
            # Nothing can be moved into an empty folder of a bucket: it does not exist.
            (aside / "README.txt").write_text("Checkpoints that do not match their digests.\n")
            count = len(list(aside.glob(f"{step}-*")))
            (self.folder / str(step)).rename(aside / f"{step}-{count}")
        gather_values(step)  # nobody goes on before it is gone
        self._manager.reload()

    def close(self) -> None:
        """Waits for the last checkpoint, and writes its digests."""
        self._manager.wait_until_finished()
        self.seal()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(path: epath.Path, values: Mapping[str, Any]) -> None:
    """Writes JSON so that a process killed in between leaves the file as it was."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1))
    partial.replace(path)


def _json(path: epath.Path) -> dict[str, Any]:
    """Returns what `_write` wrote; an error that names the file, if it has changed since."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        fix = "Take it away, or use another folder."
        raise ValueError(message(str(path), f"is not JSON ({error}).", fix)) from error


def _files(root: epath.Path) -> list[epath.Path]:
    """Returns a checkpoint's files in an order on which all processes agree, seals left out."""
    found: list[epath.Path] = []
    for path in root.iterdir():  # epath has no rglob: of a bucket it would be many requests
        if path.is_dir():
            found += _files(path)
        elif not path.name.startswith("seal-"):
            found.append(path)
    return sorted(found)


def _digest(path: epath.Path) -> str:
    """Returns size and CRC-32 of a file: against accidents, at the speed of the disk."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return f"{size} bytes, crc {crc:08x}"
