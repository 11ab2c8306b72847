"""The networks of the benchmarks, each from one definition: plain float32 and cast by hand.

`NETWORKS["mlp"]("full")` is a `Network`; sizes are "tiny" (seconds on a CPU, for values), "small"
(for timings on a CPU), "medium" (few layers of a realistic width, to compile many times) and
"full" (realistic, for counts; nothing needs to fit into memory). What `gpu.py` times has "large"
too, where "full" is small for a GPU. Decisions are taken by the figures of `TUNING`; those of
`JUDGES` tell whether they hold elsewhere.
"""

from collections.abc import Callable

from ._bert import bert
from ._conformer import conformer
from ._critic import critic
from ._ddpm import ddpm
from ._densenet import densenet
from ._dit import dit
from ._efficientnet import efficientnet
from ._gated import gated
from ._gemma import gemma
from ._graph import careful_graph, graph
from ._gru import gru
from ._llama import llama
from ._lstm import lstm
from ._mamba import mamba
from ._messages import messages
from ._mlp import mlp
from ._network import Loss, Network, cross_entropy, full
from ._pixelcnn import pixelcnn
from ._resnet import resnet50
from ._transformer import scanned_transformer, short_transformer, transformer
from ._unet import unet
from ._unet3d import unet3d
from ._vgg import vgg
from ._vit import vit
from ._wavenet import wavenet

TUNING: dict[str, Callable[[str], Network]] = {
    "mlp": mlp,
    "unet": unet,
    "resnet50": resnet50,
    "transformer": transformer,
    "scanned_transformer": scanned_transformer,
    "short_transformer": short_transformer,
    "lstm": lstm,
    "bert": bert,
    "llama": llama,
    "efficientnet": efficientnet,
    "graph": graph,
    "careful_graph": careful_graph,
    "conformer": conformer,
    "critic": critic,
    "pixelcnn": pixelcnn,
}
JUDGES: dict[str, Callable[[str], Network]] = {
    "gemma": gemma,
    "wavenet": wavenet,
    "unet3d": unet3d,
    "vit": vit,
    "mamba": mamba,
    "gru": gru,
    "gated": gated,
    "vgg": vgg,
    "densenet": densenet,
    "ddpm": ddpm,
    "dit": dit,
    "messages": messages,
}
NETWORKS = TUNING | JUDGES
SIZES = ("tiny", "small", "medium", "full")

__all__ = [
    "JUDGES",
    "NETWORKS",
    "SIZES",
    "TUNING",
    "Loss",
    "Network",
    "cross_entropy",
    "full",
]
