"""brax's PPO: policy and value networks under its own loss, on random transitions."""

from typing import Any

import jax
import jax.numpy as jnp
from brax.training import types
from brax.training.agents.ppo import losses, networks
from networks import Network

from ._written import unswitched

OBSERVED, ACTIONS = 87, 8  # of brax's ant


def ppo(size: str) -> Network:
    batch, time, width = (8, 10, 64) if size == "tiny" else (1024, 20, 512)
    agent = networks.make_ppo_networks(
        OBSERVED,
        ACTIONS,
        policy_hidden_layer_sizes=(width,) * 3,
        value_hidden_layer_sizes=(width,) * 3,
    )

    def init(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        return {"policy": agent.policy_network.init(k1), "value": agent.value_network.init(k2)}

    def loss(params: Any, batch: Any) -> jax.Array:
        # Its entropy is of samples, which in float64 would be others: it is left out.
        both = losses.PPONetworkParams(**params)
        return losses.compute_ppo_loss(
            both, None, types.Transition(**batch), jax.random.key(0), agent, entropy_cost=0.0
        )[0]

    def sample(key: jax.Array) -> Any:
        k = jax.random.split(key, 7)
        shape = (batch, time)
        return {
            "observation": jax.random.normal(k[0], (*shape, OBSERVED)),
            "next_observation": jax.random.normal(k[1], (*shape, OBSERVED)),
            "action": jax.random.uniform(k[2], (*shape, ACTIONS), minval=-1, maxval=1),
            "reward": jax.random.normal(k[3], shape),
            "discount": jnp.ones(shape),
            "extras": {
                "state_extras": {"truncation": jnp.zeros(shape)},
                "policy_extras": {
                    "raw_action": jax.random.normal(k[4], (*shape, ACTIONS)),
                    "log_prob": -8 + jax.random.normal(k[5], shape),
                    "distribution_params": jax.random.normal(k[6], (*shape, 2 * ACTIONS)),
                },
            },
        }

    return unswitched("ppo", size, loss, init, sample)
