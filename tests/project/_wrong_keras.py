"""Wrong uses of policies and of maps of policies that Keras made."""

from types import SimpleNamespace

from _wrong_shared import POLICY, T, V, told

import mpjax


class KerasMap(dict):
    """Has what a DTypePolicyMap of Keras has, which gives its default for any other key."""

    name, variable_dtype = "map_mixed_float16", "float32"
    default_policy = SimpleNamespace(name="mixed_float16")

    def __missing__(self, key):
        return self.default_policy

    def get(self, key, default=None):
        return self[key]


def keras_policy(**config):
    return {"module": "keras", "class_name": "DTypePolicy", "config": config}


KERAS_CONFIG = {
    "default_policy": "mixed_float16",
    "policy_map": {
        "encoder/.*": keras_policy(name="float32"),
        "head": keras_policy(mode="int8", source_name="float32"),
    },
}
KERAS_MAPS = (
    KerasMap(
        {
            "encoder/.*": SimpleNamespace(name="float32"),
            "head": SimpleNamespace(name="int8_from_float32"),
        }
    ),
    KERAS_CONFIG,
    {"module": "keras", "class_name": "DTypePolicyMap", "config": KERAS_CONFIG},
)
KERAS_TYPED = (
    "'mixed_float16', {'head': 'int8_from_float32', 're:encoder/.*': 'float32'}): "
    "a plain path covers all below it | the first"
)

# fmt: off
ROWS = {
    "policies of Keras": [
        *told(mpjax.get_policy, V,
            "get_policy: a Keras DTypePolicyMap is many policies | Allowed: | Type PolicyMap({}",
            ({"class_name": "DTypePolicyMap", "config": {"default_policy": None, "policy_map": {}}},
                "'mixed_bfloat16', {'re:encoder/.*': 'float32'}), with your own paths."),
            *((spec, KERAS_TYPED) for spec in KERAS_MAPS)),
        *told(lambda given: mpjax.PolicyMap(*given), T,
            "PolicyMap: a Keras DTypePolicyMap has other | Allowed: | Type PolicyMap({}",
            *((given, KERAS_TYPED) for spec in KERAS_MAPS for given in ((spec,), (POLICY, spec)))),
        (lambda: mpjax.get_policy(
            {"class_name": "GPTQDTypePolicy", "config": {"mode": "gptq/4/-1"}}), V,
            "a Keras GPTQDTypePolicy is no policy of floating"),
    ],
}
# fmt: on
