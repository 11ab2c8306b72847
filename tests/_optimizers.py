"""What tests of optimizers and their states share: runs of steps, and ways to store a state."""

import functools
import pickle

import flax.serialization
import jax
import optax
import orbax.checkpoint as ocp

from mpjax import optim

# Who owns the rounding of 16-bit parameters.
OWNERS = {
    "master": optim.with_master_weights,
    "split": lambda tx: optim.with_master_weights(tx, bits=24),
    "kahan": optim.with_kahan,
    "stochastic": optim.with_stochastic_rounding,
}


@functools.cache
def stepper(tx):
    """Returns a jitted step of an optimizer, compiled once for all tests that have it."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def train(tx, params, batches):
    """Returns parameters and state after a step with each batch of gradients."""
    state, step = jax.jit(tx.init)(params), stepper(tx)
    for grads in batches:
        params, state = step(params, state, grads)
    return params, state


def through_orbax(state, template, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "orbax", template)


def through_msgpack(state, template, folder):
    (folder / "msgpack").write_bytes(flax.serialization.to_bytes(state))
    return flax.serialization.from_bytes(template, (folder / "msgpack").read_bytes())


def through_pickle(state, template, folder):
    (folder / "pickle").write_bytes(pickle.dumps(state))
    return pickle.loads((folder / "pickle").read_bytes())


CHECKPOINTS = (through_orbax, through_msgpack, through_pickle)
