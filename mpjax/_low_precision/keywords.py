"""Keywords of other libraries' optimizers in few bits → those of the wrappers here."""

_INNER: dict[str, str] = {"opt": "inner", "tx": "inner", "optimizer": "inner"}
MASTER: dict[str, str] = {**_INNER, "dtype": "bits=32", "master_dtype": "bits=32"}
ROUNDED: dict[str, str] = {**_INNER, "key": "seed", "rng": "seed"}
QUANTIZED_STATE: dict[str, str] = {
    **_INNER,
    "bits": "kind='int8'",
    "optim_bits": "kind='int8'",
    "dtype": "kind='int8'",
    "mode": "kind",
    "blocksize": "block_size",
    "min_8bit_size": "rules",
    "exclude": "rules",
}
STATE_DTYPES: dict[str, str] = {
    **_INNER,
    "dtype": "mu_dtype and nu_dtype",
    "state_dtype": "mu_dtype and nu_dtype",
    "accumulator_dtype": "mu_dtype",
    "m_dtype": "mu_dtype",
    "v_dtype": "nu_dtype",
}
