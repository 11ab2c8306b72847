"""The loop that a newcomer's three scripts share: batches, a log, checkpoints, going on."""

import csv
import functools
import hashlib
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

STEPS, SAVE_EVERY, BATCH = 60, 20, 64
SPOILT = 35  # a batch with an inf, which float16 training has to step over
NAMES = ("loss", "grad_norm", "loss_scale", "skipped_steps")


load = functools.cache(load_digits)


def batch(index: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step, which depends on nothing but its number."""
    data = load()
    chosen = np.random.default_rng(index).integers(len(data.target), size=BATCH)
    images = (data.images[chosen] / 16).astype(np.float32)[..., None]
    if index == SPOILT:
        images[0, 0, 0] = np.inf
    return {"x": images, "y": data.target[chosen].astype(np.int32)}


def bits(state: Any) -> str:
    """Returns a digest of every bit of a state."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        digest.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return digest.hexdigest()[:16]


def drop_after(path: pathlib.Path, step: int) -> None:
    """Takes what is past a checkpoint out of a log: the steps after it are done again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(x for x in lines if x.endswith("\n") and int(x.split(",")[0]) <= step))


def train(step: Any, state: Any) -> Any:
    """Trains to the end from where the folder's last checkpoint is: argument 1; `slow` waits."""
    folder, is_slow = pathlib.Path(sys.argv[1]).absolute(), "slow" in sys.argv
    folder.mkdir(parents=True, exist_ok=True)
    begun = max((int(p.name) for p in folder.glob("[0-9]*") if p.name.isdecimal()), default=0)
    drop_after(folder / "log.csv", begun)
    with ocp.StandardCheckpointer() as checkpointer, open(folder / "log.csv", "a") as file:
        if begun:
            state = checkpointer.restore(folder / str(begun), state)
        print("begins at", begun, flush=True)
        log = csv.writer(file)
        for index in range(begun, STEPS):
            state, metrics = step(state, batch(index))
            log.writerow([index + 1, *(float(metrics[name]) for name in NAMES)])
            if (index + 1) % SAVE_EVERY == 0:
                file.flush()  # first: a run that is killed here repeats what it logged
                checkpointer.save(folder / str(index + 1), state)
                checkpointer.wait_until_finished()
            time.sleep(0.1 * is_slow)
    print("ends with", bits(state), "skipped", int(metrics["skipped_steps"]))
    return state
