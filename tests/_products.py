"""The one door of tests to how products are bound: by whom, in which form, and in 8 bits."""

from mpjax._autocast import product
from mpjax._autocast.product import ArrayRole, backends, operands, primitives, scaled

__all__ = ["ArrayRole", "backends", "operands", "primitives", "product", "scaled"]
