"""The seven networks of the benchmarks, each from one definition: plain float32 and cast by hand.

`NETWORKS["mlp"]("full")` is a `Network`; sizes are "tiny" (seconds on a CPU, for values), "small"
(for timings on a CPU) and "full" (realistic, for counts; nothing needs to fit into memory).
"""

from collections.abc import Callable

from ._bert import bert
from ._lstm import lstm
from ._mlp import mlp
from ._network import Loss, Network, cross_entropy, full
from ._resnet import resnet50
from ._transformer import scanned_transformer, transformer
from ._unet import unet

NETWORKS: dict[str, Callable[[str], Network]] = {
    "mlp": mlp,
    "unet": unet,
    "resnet50": resnet50,
    "transformer": transformer,
    "scanned_transformer": scanned_transformer,
    "lstm": lstm,
    "bert": bert,
}
SIZES = ("tiny", "small", "full")

__all__ = ["NETWORKS", "SIZES", "Loss", "Network", "cross_entropy", "full"]
