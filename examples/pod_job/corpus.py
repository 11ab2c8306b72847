"""Bytes to learn from, mapped from disk: each process reads the rows that its devices hold."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from pod_job.config import Data
from pod_job.errors import message

Piece: TypeAlias = tuple[Path, slice]
_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files as two runs of bytes, to train on and held out; `open_corpus` makes it.

    Example:
      >>> corpus = Corpus(train=np.arange(9), held_out=np.arange(5), digest="")
      >>> corpus.windows(step=3, seed=0, rows=slice(0, 2), count=4, length=4).shape
      (2, 5)
    """

    train: np.ndarray
    held_out: np.ndarray
    digest: str  # of all bytes and of the split: equal on all hosts, else they disagree

    def windows(self, *, step: int, seed: int, rows: slice, count: int, length: int) -> np.ndarray:
        """Returns some of a step's `count` windows of `length` + 1 bytes, as int32.

        They depend on the step, the seed and the row alone: not on how many processes there are,
        nor on whether the run was interrupted.
        """
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(0, len(self.train) - length, count)[rows]
        return self.train[starts[:, None] + np.arange(length + 1)].astype(np.int32)

    def held_out_windows(self, count: int, length: int) -> np.ndarray:
        """Returns `count` windows spread evenly over the held-out bytes."""
        starts = np.linspace(0, len(self.held_out) - length - 1, count).astype(int)
        return self.held_out[starts[:, None] + np.arange(length + 1)].astype(np.int32)

    def batch(self, sharding: Any, *, step: int, seed: int, count: int, length: int) -> jax.Array:
        """Returns a step's batch on the devices; only this process's own rows are read."""
        read = functools.partial(self.windows, step=step, seed=seed, count=count, length=length)
        shape = (count, length + 1)

        def rows(index: Any) -> np.ndarray:
            return read(rows=index[0])

        return jax.make_array_from_callback(shape, sharding, rows)


def open_corpus(data: Data, length: int) -> Corpus:
    """Returns the corpus that a config names, laid out on disk once and mapped into memory.

    Args:
      data: folder or file, and the part of the files that is held out.
      length: of the windows: both splits must be longer.

    Raises:
      FileNotFoundError: the path does not exist, or no file in it matches.
      ValueError: there are too few bytes, or `data.cache` is a file.

    Dtypes:
      Bytes, as uint8.

    Transforms:
      None: it reads files.
    """
    paths = _paths(data)
    pieces = _split(paths, data.held_out)
    digest = hashlib.sha256(repr(data.held_out).encode())
    for path in paths:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        for chunk in _chunks(path, slice(None)):
            digest.update(chunk)
    folder, name = Path(data.cache), digest.hexdigest()[:16]
    if folder.is_file():
        raise ValueError(message(f"data.cache {data.cache!r}", "is a file.", "Type a folder."))
    parts = {split: _mapped(folder / f"{name}-{split}.bin", pieces[split]) for split in pieces}
    for split, values in parts.items():
        if len(values) <= length + 1:
            files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
            got = f"{len(values)} bytes in {split}, of {files}; a window takes more."
            fix = f"Windows have sequence_length + 1 = {length + 1} bytes: add files or shorten it."
            raise ValueError(message(f"data.path {data.path!r}", got, fix))
    return Corpus(**parts, digest=digest.hexdigest())


def _paths(data: Data) -> list[Path]:
    root = Path(sysconfig.get_path("stdlib") if data.path == "stdlib" else data.path)
    where = f"data.path {data.path!r}"
    if not root.exists():
        fix = "Type a folder or a file, or 'stdlib' for Python's own sources."
        raise FileNotFoundError(message(where, "there is no such file or folder.", fix))
    if root.is_file():
        return [root]
    paths = sorted(path for path in root.glob(data.pattern) if path.stat().st_size)
    if len(paths) < 2:
        count = {0: "no file matches", 1: "one file matches"}[len(paths)]
        got = f"{count} {data.pattern!r} and has something in it; two are needed."
        fix = "One is learnt from, one held out: change data.pattern, e.g. '**/*.txt'."
        raise FileNotFoundError(message(where, got, fix))
    return paths


def _split(paths: list[Path], part: float) -> dict[str, list[Piece]]:
    """Returns what is learnt from and what is held out; whole files, where there are several."""
    if len(paths) == 1:
        cut = int(paths[0].stat().st_size * (1 - part))
        return {"train": [(paths[0], slice(cut))], "held_out": [(paths[0], slice(cut, None))]}
    every = max(2, round(1 / part))
    chosen = set(paths[every // 2 :: every] or paths[-1:])
    whole = slice(None)
    return {
        "train": [(path, whole) for path in paths if path not in chosen],
        "held_out": [(path, whole) for path in paths if path in chosen],
    }


def _mapped(path: Path, pieces: list[Piece]) -> np.ndarray:
    """Returns the bytes of the pieces, mapped from one file that is written if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when whole: another process, or host of one file system, may be doing the same.
        partial = path.with_suffix(f".{uuid.uuid4().hex}")
        with partial.open("wb") as out:
            for file, part in pieces:
                out.writelines(_chunks(file, part))
        partial.replace(path)
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def _chunks(path: Path, part: slice) -> Iterator[bytes]:
    """Yields part of a file, which may be larger than the host's memory."""
    start, stop, _ = part.indices(path.stat().st_size)
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(min(_CHUNK, stop - file.tell())):
            yield chunk


def trigram_bits(train: np.ndarray, windows: np.ndarray) -> float:
    """Returns the bits a byte that a byte-trigram model needs: what a network has to beat.

    Counts of three bytes, backed off to two and to one by Witten and Bell's rule: a context that
    was followed by n bytes of t kinds gives t / (n + t) of its probability to the shorter one.

    Args:
      train: bytes to count.
      windows: bytes to predict, [windows, time]; of each, all but the first two.

    Dtypes:
      Computed in float64 on the host.

    Transforms:
      None: NumPy only.

    Example:
      >>> text = np.frombuffer(b"abcabcabcabcabc", np.uint8)
      >>> round(trigram_bits(text, text[None]), 2)
      0.04

    References:
      Witten, Bell, The zero-frequency problem, 1991
    """
    rows = np.asarray(windows).astype(np.int64)
    target = rows[:, 2:].ravel()
    probability = np.full(target.shape, 1 / 256)
    for order in range(3):
        table = _counts(train, order)
        # The contexts of the targets, from the third byte of each row on.
        asked = np.concatenate([_keys(row[2 - order : -1], order) for row in rows])
        total, kinds = table.sum(1)[asked], (table > 0).sum(1)[asked]
        seen = table[asked, target]
        backed = (seen + kinds * probability) / np.maximum(total + kinds, 1)
        probability = np.where(total > 0, backed, probability)
    return float(-np.mean(np.log2(probability)))


def _counts(text: np.ndarray, order: int) -> np.ndarray:
    """Returns how often each byte followed each context of `order` bytes, [contexts, 256]."""
    table = np.zeros(256 ** (order + 1), np.int64)
    for start in range(0, len(text) - order, _CHUNK):  # of a mapped file, one chunk is in memory
        keys = _keys(text[start : start + _CHUNK + order], order + 1)
        table += np.bincount(keys, minlength=table.size)
    return table.reshape(-1, 256)


def _keys(text: np.ndarray, count: int) -> np.ndarray:
    """Returns each run of `count` bytes as one number."""
    keys = np.zeros(len(text) - count + 1, np.int64)
    for back in range(count):
        keys = keys * 256 + text[back : back + len(keys)]
    return keys
