"""The peak of the device's memory in one step, counted by the device: `python -m gpu_cards.peak`.

In a process of its own, as the device's peak never falls.
"""

import json
import pathlib
import sys

import jax


def main() -> None:
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    from networks import NETWORKS  # with mpjax of this checkout

    from . import device, step
    from .programs import Values

    platform, name, size = sys.argv[1:]
    here = device.start(platform)
    network = NETWORKS[name](size)
    values = Values(network)
    ready = step.timed(network, values, step.AUTOCAST)
    ready.open()
    before = (here.memory_stats() or {}).get("bytes_in_use")
    ready.run(1)
    jax.block_until_ready(ready.args)
    counted = (here.memory_stats() or {}).get("peak_bytes_in_use")
    print(json.dumps({"counted": counted, "before": before, "computed": ready.facts["peak_bytes"]}))


if __name__ == "__main__":
    main()
