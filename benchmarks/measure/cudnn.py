"""Lets JAX take cuDNN's attention for a GPU that is not here.

JAX asks the installed cuDNN for its version while it traces, and refuses without one; the program
that it makes does not depend on the answer.
"""

from jax._src.cudnn import fused_attention_stablehlo as attention  # there is no public way to ask

_VERSION = 91400


def assume() -> None:
    """Answers for a cuDNN that takes what JAX can ask of it, where none is installed."""
    try:
        attention.check_cudnn_version()
    except RuntimeError:
        attention.check_cudnn_version = lambda: _VERSION
