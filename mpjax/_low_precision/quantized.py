"""`with_quantized_state`: an optimizer's moments in 8 bits, by rules and block sizes."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from mpjax._base.described import described
from mpjax._base.dtypes import FLOAT32
from mpjax._base.errors import message, warn
from mpjax._base.exported import exported
from mpjax._base.keywords import names_keywords
from mpjax._base.tree import leaf_paths
from mpjax._base.typing import Array, PyTree
from mpjax._low_precision.codes import FLOAT8, SecondMoment, block_count, encode, is_coded
from mpjax._low_precision.keywords import QUANTIZED_STATE
from mpjax._low_precision.moments import Moment, shapes
from mpjax._low_precision.state_dtypes import narrowed, require_moments
from mpjax._low_precision.stored import StoredMoments
from mpjax._policies.policy_map import PolicyMap
from mpjax._scaling.transformation import is_transformation

KINDS = ("int8", "float8")
_PLAIN = {"bfloat16": jnp.dtype(jnp.bfloat16), "float32": FLOAT32}  # by a rule: without scales
LEAST_SIZE = 4096
_SPARED = ("*embed*", "*norm*")  # whatever the case of their letters


@exported
class QuantizedState(NamedTuple):
    """State of `with_quantized_state`: how many steps were rounded, and the state inside."""

    steps: Array  # i32[], the steps that were taken
    inner_state: Any  # with FirstMoment and SecondMoment in place of moments

    runs_inner = True


@names_keywords(QUANTIZED_STATE)
def with_quantized_state(
    inner: optax.GradientTransformation,
    kind: str = "int8",
    *,
    block_size: int | None = 256,
    rules: Mapping[str, str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with its moments stored in 8 bits, and computed in float32.

    Each row of a moment is cut along its last axis into blocks, each with a float32 scale: 1.016
    bytes a number. Nothing is flattened, so a sharded moment stays on its devices; a block should
    not be longer than a shard's row.

    Codes are finest near the block's largest and reach down to 10⁻⁸ of it, in a second moment to
    10⁻¹⁴, so that neither loses what is small beside its neighbours; a second moment that is not 0
    does not become 0, which would make a step of 1/eps. Codes are chosen by chance, so that the
    mean of the decoded values is exact, as in `with_state_dtypes`.

    The more the gradients of a block differ, the coarser are the codes of the small ones: with
    columns alike, the largest single update in int8 is 1.1 times Adam's, and 3 times with one
    column 10⁶ times larger than the rest; in float8, which has three bits of precision, twice
    Adam's with either. `moment_spread` measures how far apart a block's gradients are, and
    `raise_if_diverged` warns from 1000 times on. A rule "bfloat16" for such a parameter holds
    updates to 1.05 times Adam's at any spread.

    These moments stay in float32, unless a rule says otherwise: those with fewer than 4096 numbers,
    and those with 'embed' or 'norm' in their path. Under any rule those of a scalar and of an empty
    array stay so, and the mean and mean square of a centred RMSProp, whose difference must stay
    positive.

    Args:
      inner: any optax transformation.
      kind: "int8", or "float8" (e4m3, of a root of the moment).
      block_size: the most that share a scale. Where it does not divide the last axis, blocks are
        made shorter: 1000 in blocks of 256 are four of 250. None gives each row one scale: half of
        float32's traffic on TPUs too, which write blocks within a row out; more of what is small
        beside its row's largest is rounded, and devices that share a row exchange that largest.
      rules: pattern → "int8", "float8", "bfloat16" or "float32", for the moments of parameters
        whose path matches, the first match wins; patterns as in `PolicyMap`.

    Returns:
      A transformation whose state is a `QuantizedState`; extra arguments go to `inner`.

    Raises:
      ValueError: `kind`, `block_size` or a rule is none; in `init`, `inner` has no moment; in
        `update`, the state is of another form.

    Warns:
      PolicyWarning: a rule matches no path, or a block size leaves a last block that is shorter.

    Dtypes:
      int8 and uint8, or float8_e4m3fn; float32 or bfloat16 where a rule says so, and float32 where
      a moment is left alone.

    Transforms:
      jit, scan, vmap, shard_map, pmap.

    Example:
      >>> tx = mpjax.optim.with_quantized_state(optax.adam(1e-3))
      >>> state = tx.init({"w": jnp.ones((64, 128)), "norm": jnp.ones(128)})
      >>> state.inner_state[0].mu["w"].codes.dtype, state.inner_state[0].mu["norm"].dtype
      (dtype('int8'), dtype('float32'))

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021,
      https://arxiv.org/abs/2110.02861
    """
    if is_transformation(kind) and not is_transformation(inner):
        got = f"got {described(inner)} as the optimizer, and an optimizer as the kind."
        fix = "Swap them: mpjax.optim.with_quantized_state(tx, 'int8')."
        raise TypeError(message("with_quantized_state", got, fix))
    if kind not in KINDS:
        got = f"unknown kind {kind!r}."
        raise ValueError(message("with_quantized_state", got, "Accepted: 'int8', 'float8'."))
    is_size = isinstance(block_size, int) and not isinstance(block_size, bool) and block_size >= 2
    if not (is_size or block_size is None):
        got = f"must be a whole number of at least 2, or None; got {block_size!r}."
        fix = "Type 256; each block costs 4 bytes for its scale."
        raise ValueError(message("with_quantized_state(block_size)", got, fix))
    return _Quantized(inner, kind, block_size, dict(rules or {})).transformation()


class _Quantized(StoredMoments):
    name = "with_quantized_state"
    state_type = QuantizedState

    def __init__(
        self,
        inner: optax.GradientTransformation,
        kind: str,
        block_size: int | None,
        rules: dict[str, str],
    ) -> None:
        super().__init__(inner)
        for pattern, chosen in rules.items():
            if chosen not in (*KINDS, *_PLAIN):
                got = f"the rule {pattern!r} says {chosen!r}."
                allowed = "Accepted: 'int8', 'float8', 'bfloat16', 'float32'."
                raise ValueError(message("with_quantized_state(rules)", got, allowed))
        self._kind = kind
        self._block_size = block_size
        self._kinds = tuple(rules.values())
        self._patterns = PolicyMap("float32", dict.fromkeys(rules, "float32"))  # checks them

    def encode(self, moment: Moment, x: Array, random: Array, before: Any) -> Any:
        kind = self._kind_of(moment, x.shape, is_stored=is_coded(before))
        if kind in _PLAIN:
            return narrowed(x, _PLAIN[kind], random, is_second=moment.is_second)
        return encode(x, kind, self._block_size, random, is_second=moment.is_second)

    def is_own(self, moment: Moment, x: Any, shape: tuple[int, ...]) -> bool:
        kind = self._kind_of(moment, shape, is_stored=is_coded(x))
        if kind in _PLAIN:
            return not is_coded(x) and (kind == "float32" or x.dtype == _PLAIN[kind])
        return (
            is_coded(x)
            and (x.codes.dtype == FLOAT8) == (kind == "float8")
            and isinstance(x, SecondMoment) == moment.is_second
            and x.scales.shape[-1] == block_count(shape[-1], self._block_size)
        )

    def check_params(self, params: PyTree, moments: list[Moment]) -> None:
        require_moments(self.name, params, moments)
        self._patterns.warn_unused(leaf_paths(params), "with_quantized_state(rules)")
        known = shapes(params)
        for moment in moments:
            shape = known.get(moment.param, ())
            if self._block_size is None or self._kind_of(moment, shape) in _PLAIN:
                continue
            blocks = block_count(shape[-1], self._block_size)
            length = -(-shape[-1] // blocks)
            if blocks * length != shape[-1]:
                got = f"{self._block_size} does not divide the last axis of {moment.param!r}, "
                got += f"{shape[-1]}: it is cut into {blocks} blocks of {length}, the last of "
                got += f"{shape[-1] - (blocks - 1) * length}."
                fix = "It works, and is slower; choose a size that divides it."
                text = message("with_quantized_state(block_size)", got, fix)
                warn(text)
                return

    def _kind_of(self, moment: Moment, shape: tuple[int, ...], *, is_stored: bool = False) -> str:
        """Returns how a moment is stored.

        Args:
          moment: its place.
          shape: its own; inside `shard_map` and `vmap` that of a part.
          is_stored: whether it is in 8 bits already: then the whole was large enough.
        """
        if not shape or not math.prod(shape):
            return "float32"
        rule = self._patterns.deciding(moment.param)
        if rule is not None:
            return self._kinds[rule]
        path = moment.param.lower()
        is_spared = any(fnmatch.fnmatchcase(path, pattern) for pattern in _SPARED)
        is_small = math.prod(shape) < LEAST_SIZE and not is_stored
        return "float32" if is_spared or is_small else self._kind
