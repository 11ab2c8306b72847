"""The 872-million-parameter decoder, checked for a TPU slice or GPUs that need not be here.

python benchmarks/pods.py v5e:4x4 --rows 4
python benchmarks/pods.py v5e:16x16 --rows 1 --json
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from networks.decoder import Decoder

import mpjax.pods


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("topology", help="v5e:4x4, v5e-256, 8xh100, cpu:8 ...")
    parser.add_argument("--rows", type=int, default=4, help="sequences of 2048 tokens a device")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--policy", default="bf16-mixed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    report = check(args.topology, args.rows, args.layers, args.policy)
    print(report.to_json() if args.json else report)
    return report.exit_code


def check(name: str, rows: int, layers: int, policy: str) -> mpjax.pods.Report:
    topology = mpjax.pods.get_topology(name)
    mesh = topology.make_mesh({"fsdp": -1})
    decoder = Decoder(layers=layers, policy=policy)
    tx = optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((rows * topology.num_devices, decoder.time + 1), jnp.int32)
    args = mpjax.pods.with_sharding(
        (decoder.state_shapes(tx), tokens), (decoder.state_specs(tx), P("fsdp")), mesh
    )
    return mpjax.pods.check(decoder.train_step(tx, mesh), args, topology)


if __name__ == "__main__":
    sys.exit(main())
