"""Imports modules by their old places, which pickles of earlier versions name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MOVED = {
    "mpjax._loss_scale": "mpjax._scaling.loss_scale",
    "mpjax._optim_state": "mpjax._scaling.optim_state",
    "mpjax._policy": "mpjax._policies.policy",
    "mpjax._policy_map": "mpjax._policies.policy_map",
    "mpjax._quantized_array": "mpjax._base.quantized_array",
    "mpjax._quantized_policy": "mpjax._policies.quantized_policy",
    "mpjax._recipes": "mpjax._policies.recipes",
}


class _OldNameFinder(MetaPathFinder, Loader):
    """Imports a module by its old name: the same module object, not a second copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_MOVED[module.__name__])


def find_old_names() -> None:
    """Lets Python import the old names, once."""
    if not any(isinstance(finder, _OldNameFinder) for finder in sys.meta_path):
        sys.meta_path.append(_OldNameFinder())
