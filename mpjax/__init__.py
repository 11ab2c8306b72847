"""Mixed precision for JAX: autocast, policies, loss scales, and train steps that lose nothing.

Functions that need optax, and autocast, are imported at their first use. So `import mpjax` is
quick, and loads neither optax nor Flax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mpjax._base.dtypes import half_dtype
from mpjax._base.errors import NonFiniteError, PolicyWarning, SupportWarning
from mpjax._base.foreign_errors import no_attribute
from mpjax._base.moved import find_old_names
from mpjax._base.quantized_array import QuantizedArray, dequantize
from mpjax._base.tree import all_finite, select_tree
from mpjax._hardware.support import check_support
from mpjax._policies.default_policy import default_policy
from mpjax._policies.policy import Policy, get_policy
from mpjax._policies.policy_map import PolicyMap
from mpjax._policies.quantized_policy import QuantizedPolicy
from mpjax._policies.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Int8CurrentScaling,
    MXFP8BlockScaling,
)
from mpjax._scaling.grad import get_loss_scale
from mpjax._scaling.loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale

if TYPE_CHECKING:
    from mpjax import linen as linen
    from mpjax import nnx as nnx
    from mpjax import numerics as numerics
    from mpjax import optim as optim
    from mpjax import pods as pods
    from mpjax import testing as testing
    from mpjax import train as train
    from mpjax._autocast import (
        autocast,
        dot_product_attention,
        explain,
        full_precision,
        with_amax_history,
    )
    from mpjax._doctor.measure import measure
    from mpjax._training.gradients import grad, value_and_grad
    from mpjax._weights.quantize import quantize
    from mpjax.optim import current_loss_scale, raise_if_diverged, with_loss_scale
    from mpjax.train import TrainState, make_train_step

find_old_names()

__version__ = "0.1.0"

__all__ = [
    "DelayedScaling",
    "DynamicLossScale",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Int8CurrentScaling",
    "LossScale",
    "MXFP8BlockScaling",
    "NoOpLossScale",
    "NonFiniteError",
    "Policy",
    "PolicyMap",
    "PolicyWarning",
    "QuantizedArray",
    "QuantizedPolicy",
    "StaticLossScale",
    "SupportWarning",
    "TrainState",
    "all_finite",
    "autocast",
    "check_support",
    "current_loss_scale",
    "default_policy",
    "dequantize",
    "dot_product_attention",
    "explain",
    "full_precision",
    "get_loss_scale",
    "get_policy",
    "grad",
    "half_dtype",
    "make_train_step",
    "measure",
    "quantize",
    "raise_if_diverged",
    "select_tree",
    "value_and_grad",
    "with_amax_history",
    "with_loss_scale",
]

_IMPORTED_LATER = {
    "TrainState": "mpjax.train",
    "autocast": "mpjax._autocast",
    "current_loss_scale": "mpjax.optim",
    "dot_product_attention": "mpjax._autocast",
    "explain": "mpjax._autocast",
    "full_precision": "mpjax._autocast",
    "grad": "mpjax._training.gradients",
    "make_train_step": "mpjax.train",
    "measure": "mpjax._doctor.measure",
    "quantize": "mpjax._weights.quantize",
    "raise_if_diverged": "mpjax.optim",
    "value_and_grad": "mpjax._training.gradients",
    "with_amax_history": "mpjax._autocast",
    "with_loss_scale": "mpjax.optim",
}


_MODULES = ("linen", "nnx", "numerics", "optim", "pods", "testing", "train")


if not TYPE_CHECKING:  # with it, an editor would let every misspelt name pass

    def __getattr__(name: str) -> Any:
        if name in _IMPORTED_LATER:
            return getattr(importlib.import_module(_IMPORTED_LATER[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"mpjax.{name}")
        raise AttributeError(no_attribute(name, __dir__()))


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
