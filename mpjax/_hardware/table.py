"""The table of each accelerator's support of each dtype: one row a line.

Two things decide: the dtypes that the hardware multiplies, and XLA's conversion of the others.
Where the facts come from:

* NVIDIA: "Compute Capabilities" in the CUDA Programming Guide; the support matrix of Transformer
  Engine (bfloat16 from 8.0, float8 from 8.9); and what XLA compiles for each capability: below 8.0
  a bfloat16 product is converted to float32, below 8.9 a float8 one to float16. That bfloat16 is
  then no faster than float32, or slower, is openxla/xla issue 12429. float64 runs at 1/32 or 1/64
  of float32's rate but for the data-centre parts 6.0, 7.0, 8.0, 9.0 and 10.0.
* AMD: "AMD matrix cores" (GPUOpen lab notes) and hipBLASLt's data types: gfx942 has the fnuz
  variants of float8; JAX's float8_e4m3fn and float8_e5m2 start with gfx950.
* TPU: the compiler's estimates for a product of 4096 x 4096 matrices, compiled ahead of time for
  v2 to v7x with libtpu 0.0.50. float16 takes 1.0 to 1.3 times bfloat16's cycles, float64 8 to 90,
  int8 0.50 on v5e, 0.51 on v5p, 0.76 on v6e; that v4 has one rate for both is its data sheet's.
* int8: NVIDIA's matrix units from 7.5, few of them in 10.3; "AMD matrix cores" from gfx908; timed
  with JAX 0.12 on a CPU with AMX (`benchmarks/eight_bits.py`).
* CPU: timed with JAX 0.10 and 0.12 on a CPU with AVX512-BF16 (a bfloat16 product with a float32
  result takes half float32's time, a float16 one 1.4 times); jax-ml/jax pull request 7462 (float16
  products run in float32); openxla/xla issue 10556 (AMX, whose units a bfloat16 result misses).
"""

# ruff: noqa: E501 - one row a line, though it has more columns than a line has room for

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

Family: TypeAlias = Literal["cpu", "nvidia", "amd", "tpu", "unknown"]
Status: TypeAlias = Literal["native", "slow", "unsupported", "unknown"]
"""Runs in hardware · runs, but emulated or without gain · cannot run · no row in the table."""


class Cell(NamedTuple):
    """The support of one dtype on one accelerator, and the reason."""

    status: Status
    reason: str


DTYPES = (
    *("float32", "bfloat16", "float16", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "int8"),
)
"""The columns of the table."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One row of the table; a field for each of `DTYPES`."""

    family: Family
    key: str  # the name that `device=` takes
    name: str  # for readers
    float32: Cell
    bfloat16: Cell
    float16: Cell
    float64: Cell
    float8_e4m3fn: Cell
    float8_e5m2: Cell
    int8: Cell

    def cell(self, dtype: str) -> Cell:
        """Returns the support of the dtype of this name on this accelerator."""
        return getattr(self, dtype) if dtype in DTYPES else _NO_COLUMN

    @property
    def fast(self) -> tuple[str, ...]:
        """The dtypes that run in hardware, in the order of the table."""
        return tuple(dtype for dtype in DTYPES if self.cell(dtype).status == "native")

    @property
    def half(self) -> str:
        """The 16-bit dtype to compute in: float16 only where it alone is fast.

        bfloat16 has float32's range and needs no loss scaling, so it wins every tie.
        """
        only_float16 = "float16" in self.fast and "bfloat16" not in self.fast
        return "float16" if only_float16 else "bfloat16"

    @property
    def policy(self) -> str:
        """The name of the policy to start with: '32-true' where no 16-bit dtype is fast."""
        if self.half not in self.fast:
            return "32-true"
        return "16-mixed" if self.half == "float16" else "bf16-mixed"


_NO_COLUMN = Cell("unknown", "the support table has no column for it")
NO_ROW = Cell("unknown", "the support table has no row for this device")

# The cells that several rows share, by their status.
FULL = Cell("native", "full precision, at the rate that the hardware is built for")
HALF = Cell("native", "in hardware, at about half the rate of float32")
TF32 = Cell("native", "products may round operands to TF32; precision='highest' keeps every bit")
MXU = Cell("native", "products round operands to bfloat16; precision='highest' does not, at 6x")
UNIT = Cell("native", "matrix units take it and accumulate in float32")
AVX = Cell("native", "AVX512-BF16 takes it; keep results float32 (preferred_element_type)")
AMX = Cell("native", "AMX takes it; only with float32 results (preferred_element_type)")
E5M2 = Cell("native", "matrix units take it beside float8_e4m3fn; two float8_e5m2 run as float16")
F64S = Cell("slow", "1/32 or 1/64 of the rate of float32")
F64P = Cell("slow", "1/32 of the rate of float32, except on P100 (6.0), where it is 1/2")
F64E = Cell("slow", "emulated with pairs of float32: 8 to 90 times the cycles of bfloat16")
TO32 = Cell("slow", "no unit takes it; float32 products, which saves memory only")
TO16 = Cell("slow", "no unit takes it; float16 products, which saves memory only")
TOBF = Cell("slow", "the matrix unit takes bfloat16; no faster than that, and needs loss scaling")
TOB8 = Cell("slow", "the matrix unit takes bfloat16; no faster than that, saves memory only")
FNUZ = Cell("slow", "this chip has the fnuz variants of float8; this one runs as float16")
INT8 = Cell("native", "matrix units take it and accumulate in int32")
IAMX = Cell("native", "AMX takes it and accumulates in int32")
INT6 = Cell("native", "three quarters of the time of bfloat16, quantising not counted")
I832 = Cell("slow", "no matrix unit takes it; no faster than wider products")
IB16 = Cell("slow", "runs at the rate of bfloat16; saves memory only")
ICUT = Cell("slow", "this chip has few units for it: a fraction of the rate of bfloat16")
IOPN = Cell("unknown", "it compiles; neither timed nor published")
OPEN = Cell("unknown", "depends on the model: name one")

# fmt: off
_ROWS: dict[Family, tuple[tuple[str, str, Cell, Cell, Cell, Cell, Cell, Cell, Cell], ...]] = {
    "cpu": (
        # key               name                             f32   bf16  f16   f64   e4m3  e5m2  int8
        ("cpu-plain",       "CPU without bfloat16 units",    FULL, TO32, TO32, HALF, TO32, TO32, I832),
        ("cpu-avx512-bf16", "CPU with AVX512-BF16",          FULL, AVX,  TO32, HALF, TO32, TO32, IOPN),
        ("cpu-amx",         "CPU with AMX",                  FULL, AMX,  TO32, HALF, TO32, TO32, IAMX),
    ),
    "nvidia": (
        ("gpu",             "GPU of 8.0 or newer",           TF32, UNIT, UNIT, OPEN, OPEN, OPEN, INT8),
        ("sm_52",           "before Volta (P100, GTX 1080)", FULL, TO32, TO32, F64P, TO32, TO32, I832),
        ("sm_70",           "Volta (V100)",                  FULL, TO32, UNIT, HALF, TO16, TO16, I832),
        ("sm_75",           "Turing (T4, RTX 20)",           FULL, TO32, UNIT, F64S, TO16, TO16, INT8),
        ("sm_80",           "Ampere (A100, A30)",            TF32, UNIT, UNIT, HALF, TO16, TO16, INT8),
        ("sm_86",           "Ampere (A10, A40, RTX 30)",     TF32, UNIT, UNIT, F64S, TO16, TO16, INT8),
        ("sm_89",           "Ada (L4, L40S, RTX 40)",        TF32, UNIT, UNIT, F64S, UNIT, E5M2, INT8),
        ("sm_90",           "Hopper (H100, H200, GH200)",    TF32, UNIT, UNIT, HALF, UNIT, UNIT, INT8),
        ("sm_100",          "Blackwell (B200, GB200)",       TF32, UNIT, UNIT, HALF, UNIT, UNIT, INT8),
        ("sm_103",          "Blackwell Ultra (B300, GB300)", TF32, UNIT, UNIT, F64S, UNIT, UNIT, ICUT),
        ("sm_120",          "Blackwell (RTX 50, RTX PRO)",   TF32, UNIT, UNIT, F64S, UNIT, UNIT, INT8),
    ),
    "amd": (
        ("gfx908",          "CDNA (MI100)",                  FULL, UNIT, UNIT, HALF, TO16, TO16, INT8),
        ("gfx90a",          "CDNA 2 (MI210, MI250)",         FULL, UNIT, UNIT, FULL, TO16, TO16, INT8),
        ("gfx942",          "CDNA 3 (MI300, MI325)",         FULL, UNIT, UNIT, FULL, FNUZ, FNUZ, INT8),
        ("gfx950",          "CDNA 4 (MI350, MI355)",         FULL, UNIT, UNIT, HALF, UNIT, UNIT, INT8),
    ),
    "tpu": (
        ("tpu",             "TPU of any generation",         MXU,  UNIT, TOBF, F64E, OPEN, OPEN, OPEN),
        ("v2",              "TPU v2",                        MXU,  UNIT, TOBF, F64E, TOB8, TOB8, IB16),
        ("v3",              "TPU v3",                        MXU,  UNIT, TOBF, F64E, TOB8, TOB8, IB16),
        ("v4",              "TPU v4",                        MXU,  UNIT, TOBF, F64E, TOB8, TOB8, IB16),
        ("v5e",             "TPU v5e",                       MXU,  UNIT, TOBF, F64E, TOB8, UNIT, INT8),
        ("v5p",             "TPU v5p",                       MXU,  UNIT, TOBF, F64E, TOB8, UNIT, INT8),
        ("v6e",             "TPU v6e (Trillium)",            MXU,  UNIT, TOBF, F64E, TOB8, UNIT, INT6),
        ("v7x",             "TPU v7x (Ironwood)",            MXU,  UNIT, TOBF, F64E, UNIT, UNIT, IOPN),
    ),
}
# fmt: on

BLOCK_UNITS = {"sm_100": 32, "sm_103": 32, "sm_120": None, "gfx950": None}
"""Accelerators whose units take a scale for each block of 8-bit values: how many share one, as XLA
uses them in cuDNN; None where it was not seen to."""

_VENDORS = {"nvidia": "NVIDIA ", "amd": "AMD "}
SUPPORT = {
    key: Accelerator(family, key, _VENDORS.get(family, "") + name, *cells)
    for family, rows in _ROWS.items()
    for key, name, *cells in rows
}
"""The table, by the name that `device=` takes."""
