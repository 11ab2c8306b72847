"""Policy: every name of the table, equality, hashing, no retrace, and the policies of others."""

import copy
import importlib
import inspect
import itertools
import json
import pickle
import re
import threading
from types import SimpleNamespace
from typing import get_args

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from _helpers import Traced
from hypothesis import given
from hypothesis import strategies as st

import mpjax
import mpjax.nnx
import mpjax.train
from mpjax._base import foreign_attributes, foreign_keywords
from mpjax._base.typing import KnownPolicy
from mpjax._policies.policy import POLICY_NAMES
from mpjax.testing import assert_one_compilation

SPELLINGS = {
    "float16": ["f16", "fp16", "float16", jnp.float16, np.float16, np.dtype("float16")],
    "bfloat16": ["bf16", "bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")],
    "float32": ["f32", "fp32", "full", "single", "float32", np.float32, np.dtype(">f4")],
    "float64": ["f64", "fp64", "double", "float64", jnp.float64, np.dtype("float64"), float],
    "half": ["half"],
}
specs = st.sampled_from(sorted(SPELLINGS)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(SPELLINGS[name]))
)
triples = st.tuples(specs, specs, specs)

F32, BF16, F16 = (mpjax.Policy(d, d, d) for d in ("float32", "bfloat16", "float16"))
MIXED_BF16 = mpjax.Policy("float32", "bfloat16", "float32")
MIXED_F16 = mpjax.Policy("float32", "float16", "float32")


# -- law 2: names --------------------------------------------------------------------------------


# The names of Lightning, Keras, Apex and jmp, by the dtypes that they mean; half is f16 on a CPU.
MEANT = {
    "float32 float32 float32": (
        *("32-true", "32", 32, "float32", "O0", "f32", "full", "fp32", jnp.float32, "Float32"),
    ),
    "float64 float64 float64": ("64-true", "64", 64, "float64", "f64"),
    "float16 float16 float16": (
        *("16-true", "float16", "O3", "f16", np.float16, "p=f16"),
        *("half", "p=half", "p=half,c=half,o=half"),
    ),
    "bfloat16 bfloat16 bfloat16": ("bf16-true", "bfloat16", jnp.bfloat16),
    "float32 float16 float32": ("16-mixed", "16", 16, "mixed_float16", "O1", "16_MIXED", "o1"),
    "float32 bfloat16 float32": (
        *("bf16-mixed", " bf16-mixed ", "bf16_mixed", "BF16-Mixed", "mixed_bfloat16"),
        *("mixed-bfloat16", "params=float32,compute=bfloat16,output=float32"),
        *("p=f32,c=bf16,o=f32", "o=f32, c=bf16 , p=full", "p=full,compute=bf16,output=full"),
        "c=bf16,o=f32",
    ),
    "float16 float16 float32": ("O2",),
    # What is left out: parameters are f32, compute as they, output as compute.
    "float32 float16 float16": ("c=f16",),
    "float32 float32 float16": ("o=f16",),
    "bfloat16 bfloat16 float32": ("p=bf16,o=f32",),
}


@pytest.mark.parametrize(("dtypes", "names"), MEANT.items(), ids=MEANT)
def test_law_02_every_name_is_understood(dtypes, names):
    for name in names:
        got = mpjax.get_policy(name)
        found = got.param_dtype, got.compute_dtype, got.output_dtype
        assert " ".join(map(str, found)) == dtypes, name


@pytest.mark.parametrize("row", POLICY_NAMES, ids=lambda row: row.name)
def test_law_02_every_row_of_the_table_reads_back(row):
    assert mpjax.get_policy(row.name) == row.policy
    assert mpjax.get_policy(str(row.policy)) == row.policy


@pytest.mark.parametrize(
    "text", ["p=f16,c=bf16,o=f32", "c=f16", "p=half,o=full", "f16", "half", "full", "params=bf16"]
)
def test_law_02_jmp_reads_the_same(text):
    theirs, ours = jmp.get_policy(text), mpjax.get_policy(text)
    assert mpjax.get_policy(theirs) == mpjax.get_policy(str(ours).replace("half", "f16"))


@given(triples)
def test_law_02_text_parses_back(triple):
    policy = mpjax.Policy(*(spec for _, spec in triple))
    assert mpjax.get_policy(str(policy)) == policy
    assert mpjax.get_policy(policy) is policy
    assert mpjax.Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert mpjax.get_policy(policy.to_dict()) == policy
    assert eval(repr(policy), {"Policy": mpjax.Policy}) == policy


@given(triples, st.data())
def test_law_02_equal_policies_hash_equal_however_spelled(triple, data):
    other = tuple(data.draw(st.sampled_from(SPELLINGS[name])) for name, _ in triple)
    a, b = mpjax.Policy(*(spec for _, spec in triple)), mpjax.Policy(*other)
    assert a == b
    assert hash(a) == hash(b)
    assert len({a: 1, b: 2}) == 1


@given(triples, triples)
def test_law_02_policies_are_equal_only_if_their_dtypes_are(one, two):
    a, b = (mpjax.Policy(*(spec for _, spec in triple)) for triple in (one, two))
    assert (a == b) == ([n for n, _ in one] == [n for n, _ in two])
    assert a != "p=f32,c=f32,o=f32"


@given(triples)
def test_law_02_copies_are_equal(triple):
    policy = mpjax.Policy(*(spec for _, spec in triple))
    copies = [copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
    assert all(c == policy and hash(c) == hash(policy) for c in copies)


def test_law_02_no_retrace_between_equal_policies():
    ways = [
        MIXED_BF16,
        mpjax.Policy(jnp.float32, np.dtype(jnp.bfloat16), "full"),
        mpjax.get_policy("mixed_bfloat16"),
        mpjax.get_policy(str(MIXED_BF16)),
        pickle.loads(pickle.dumps(MIXED_BF16)),
        copy.deepcopy(MIXED_BF16),
        mpjax.get_policy(jmp.get_policy("c=bf16,o=f32")),
    ]
    static = Traced(lambda x, policy: policy.cast_to_compute(x), static_argnums=1)
    keyword = Traced(lambda x, *, policy: policy.cast_to_compute(x), static_argnames="policy")
    tree = Traced(lambda both: both["policy"].cast_to_compute(both["x"]))
    for policy in ways:
        for out in (
            static(jnp.ones(2), policy),
            keyword(jnp.ones(2), policy=policy),
            tree({"x": jnp.ones(2), "policy": policy}),
        ):
            assert out.dtype == jnp.bfloat16
    assert (static.traces, keyword.traces, tree.traces) == (1, 1, 1)
    tree({"x": jnp.ones(2), "policy": MIXED_F16})
    assert tree.traces == 2


def test_law_02_policy_in_a_closure_and_in_a_scan():
    def step(carry, _):
        return carry, MIXED_BF16.cast_to_compute(carry)

    with assert_one_compilation(lambda x: jax.lax.scan(step, x, None, length=2)[1]) as traced:
        assert traced(jnp.ones(2)).dtype == traced(jnp.zeros(2)).dtype == jnp.bfloat16


def test_half_is_settled_when_it_is_used(monkeypatch):
    policy = mpjax.get_policy("half")
    assert str(policy) == "p=half,c=half,o=half"
    assert policy.compute_dtype == jnp.float16
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert policy.compute_dtype == jnp.bfloat16
    assert mpjax.half_dtype() == jnp.bfloat16
    # float16 and half are told apart: which is which is not known before there is a backend.
    assert policy != F16


def test_with_output_dtype():
    assert MIXED_BF16.with_output_dtype("bf16") == mpjax.get_policy("c=bf16")
    assert MIXED_BF16.with_output_dtype(jnp.float32) == MIXED_BF16
    half = mpjax.get_policy("half").with_output_dtype("f32")
    assert str(half) == "p=half,c=half,o=f32"


@pytest.mark.parametrize("method", ["param", "compute", "output"])
def test_each_method_casts_to_its_own_dtype(method):
    policy = mpjax.Policy("float32", "bfloat16", "float16")
    got = getattr(policy, f"cast_to_{method}")({"w": jnp.ones(2, jnp.float16)})["w"]
    assert got.dtype == getattr(policy, f"{method}_dtype")


# -- other libraries' policies -------------------------------------------------------------------


DTYPES = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize("triple", list(itertools.product(DTYPES, repeat=3)), ids="-".join)
def test_jmp_policies_go_both_ways(triple):
    theirs = jmp.Policy(*(getattr(jnp, name) for name in triple))
    ours = mpjax.get_policy(theirs)
    assert ours == mpjax.Policy(*triple)
    back = ours.to_jmp()
    assert (back.param_dtype, back.compute_dtype, back.output_dtype) == (
        theirs.param_dtype,
        theirs.compute_dtype,
        theirs.output_dtype,
    )
    assert str(back) == str(theirs)
    assert jmp.get_policy(str(ours)) == theirs


def test_half_goes_to_jmp_as_the_backends():
    assert mpjax.get_policy("half").to_jmp().compute_dtype == jmp.half_dtype()


def test_haiku_takes_our_policy():
    class Net(hk.Module):
        def __call__(self, x):
            return hk.Linear(3)(x)

    model = hk.transform(lambda x: Net()(x))
    hk.mixed_precision.set_policy(Net, MIXED_BF16)
    inner = MIXED_BF16.with_output_dtype("bfloat16")
    hk.mixed_precision.set_policy(hk.Linear, inner)
    try:
        params = model.init(jax.random.key(0), jnp.ones((1, 2)))
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        jaxpr = str(jax.make_jaxpr(lambda p, x: model.apply(p, None, x))(params, jnp.ones((1, 2))))
        assert "bf16[1,3] = dot_general" in jaxpr
        assert model.apply(params, None, jnp.ones((1, 2))).dtype == jnp.float32
        assert hk.mixed_precision.get_policy(hk.Linear) == inner
    finally:
        hk.mixed_precision.clear_policy(Net)
        hk.mixed_precision.clear_policy(hk.Linear)


@pytest.mark.parametrize(
    ("name", "want"),
    [("mixed_float16", MIXED_F16), ("mixed_bfloat16", MIXED_BF16), ("bfloat16", BF16)],
)
def test_keras_policies_and_configs(name, want):
    policy = SimpleNamespace(name=name, variable_dtype="float32", compute_dtype="float16")
    assert mpjax.get_policy(policy) == want
    config = {
        "module": "keras",
        "class_name": "DTypePolicy",
        "config": {"name": name},
        "registered_name": None,
    }
    assert mpjax.get_policy(config) == want
    assert mpjax.get_policy({"name": name}) == want
    assert mpjax.get_policy(json.loads(json.dumps(config))) == want


# -- default_policy ------------------------------------------------------------------------------


def test_defaults_nest_and_end():
    with mpjax.default_policy("bf16-mixed"):
        assert mpjax.get_policy() == MIXED_BF16
        with mpjax.default_policy("16-mixed"):
            assert mpjax.get_policy() == MIXED_F16
        assert mpjax.get_policy() == MIXED_BF16
    assert mpjax.get_policy() == F32


def end_by_an_error():
    with mpjax.default_policy("bf16-mixed"):
        raise KeyError("inside")


def test_default_ends_with_an_error_too():
    with pytest.raises(KeyError, match="inside"):
        end_by_an_error()
    assert mpjax.get_policy() == F32


def test_default_is_a_decorator_too():
    @mpjax.default_policy("bf16-mixed")
    def inside():
        return mpjax.get_policy()

    assert inside() == inside() == MIXED_BF16
    assert mpjax.get_policy() == F32


def test_default_belongs_to_the_cache_of_jit():
    traced = Traced(lambda x: mpjax.get_policy().cast_to_compute(x))
    dtypes = [traced(jnp.ones(2)).dtype]
    for name in ("bf16-mixed", "16-mixed", "mixed_bfloat16", "bf16-mixed"):
        with mpjax.default_policy(name):
            dtypes.append(traced(jnp.ones(2)).dtype)
    dtypes.append(traced(jnp.ones(2)).dtype)
    assert " ".join(map(str, dtypes)) == "float32 bfloat16 float16 bfloat16 bfloat16 float32"
    assert traced.traces == 3  # one a policy, however it was spelled


def test_default_is_not_seen_by_other_threads():
    inside, leave = threading.Event(), threading.Event()
    seen = {}

    def other():
        with mpjax.default_policy("16-mixed"):
            inside.set()
            leave.wait(10)
            seen["other"] = mpjax.get_policy()

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    seen["while it lasts elsewhere"] = mpjax.get_policy()
    with mpjax.default_policy("bf16-mixed"):
        leave.set()
        thread.join()
        seen["here"] = mpjax.get_policy()
    assert seen == {"while it lasts elsewhere": F32, "other": MIXED_F16, "here": MIXED_BF16}


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["64-true", "p=f64,c=f32,o=f32", "c=f64,o=f32"])
def test_float64_of_a_policy_made_before_is_cast_to_with_x64_on(name):
    policy = mpjax.get_policy(name)
    method = "cast_to_param" if "p=f64" in name else "cast_to_compute"
    with jax.enable_x64(True):
        assert getattr(policy, method)(jnp.ones(2, jnp.float32)).dtype == jnp.float64


@pytest.mark.parametrize("name", ["bf16-mixed", "mixed_bfloat16", "O1", "int8_from_mixed_bfloat16"])
def test_a_policy_remembers_the_name_that_it_was_made_by(name):
    policy = mpjax.get_policy(name)
    assert policy.name == name
    other = type(policy).from_dict(policy.to_dict())
    assert policy == other
    assert hash(policy) == hash(other)
    assert other.name == str(policy)
    for made in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert (made, made.name) == (policy, name)
    step = mpjax.make_train_step(lambda p, x: jnp.sum(p * x), optax.sgd(0.1), name)
    assert f"under {name!r} ({policy})" in repr(step)


@pytest.mark.parametrize(
    "made",
    [
        mpjax.get_policy("bf16-mixed"),
        mpjax.get_policy("mixed_float16"),
        mpjax.get_policy("int8_from_mixed_float16"),
        mpjax.PolicyMap("16-mixed", {"norm*": "float32", "mlp*": "int8_from_mixed_float16"}),
    ],
)
def test_a_prompt_shows_the_name_that_a_policy_was_made_by(made):
    for policy in getattr(made, "policies", (made,)):
        assert repr(policy.name) in repr(made)
    read = eval(repr(made), vars(mpjax))
    assert read == made
    assert repr(read) == repr(made)


KEYWORDS = {
    mpjax.make_train_step: foreign_keywords.STEP,
    mpjax.nnx.make_train_step: foreign_keywords.NNX_STEP,
    mpjax.with_loss_scale: foreign_keywords.WRAPPER,
    mpjax.value_and_grad: foreign_keywords.GRADIENTS,
    mpjax.grad: foreign_keywords.GRADIENTS,
    mpjax.DynamicLossScale: foreign_keywords.LOSS_SCALE,
    mpjax.Policy: foreign_keywords.POLICY_KEYWORDS,
    mpjax.PolicyMap: foreign_keywords.MAP_KEYWORDS,
    mpjax.autocast: foreign_keywords.AUTOCAST,
    mpjax.explain: foreign_keywords.EXPLAIN,
    mpjax.numerics.diagnose: foreign_keywords.DIAGNOSIS,
    mpjax.StaticLossScale: foreign_keywords.STATIC,
    mpjax.Float8CurrentScaling: foreign_keywords.RECIPE,
    **{getattr(mpjax, name): names for name, names in foreign_keywords.RECIPE_OF.items()},
    mpjax.dot_product_attention: foreign_keywords.ATTENTION,
    mpjax.quantize: foreign_keywords.QUANTIZE,
}


@pytest.mark.parametrize("fun", KEYWORDS, ids=lambda fun: fun.__qualname__)
def test_a_keyword_of_another_library_is_answered_with_one_that_is_here(fun):
    known = inspect.signature(fun).parameters
    for key, meant in KEYWORDS[fun].items():
        name, _, value = key.partition("=")
        with pytest.raises(TypeError, match=f"unknown keyword {name}=") as error:
            fun(**{name: value or None})
        if meant.isidentifier():
            assert f"Type {meant}= instead of {name}=." in str(error.value)
        for word in re.findall(r"Type (\w+)=(?: and (\w+)=)?", str(error.value)):
            assert {*filter(None, word)} <= {*known}, (name, meant)
        for module, word in re.findall(r"mpjax((?:\.[a-z]+)*)\.(\w+)", str(error.value)):
            assert hasattr(importlib.import_module(f"mpjax{module}"), word)


OBJECTS = [
    (mpjax.get_policy("bf16-mixed"), foreign_attributes.POLICY_ATTRIBUTES),
    (mpjax.PolicyMap("bf16-mixed"), foreign_attributes.MAP_ATTRIBUTES),
    (mpjax.DynamicLossScale(), foreign_attributes.SCALE_ATTRIBUTES),
    (mpjax.StaticLossScale(), foreign_attributes.SCALE_ATTRIBUTES),
    (mpjax.train.TrainState(0, {}, (), None), foreign_attributes.STATE_ATTRIBUTES),
]


@pytest.mark.parametrize(("made", "names"), OBJECTS, ids=lambda x: type(x).__name__)
def test_an_attribute_of_another_library_is_answered_with_one_that_is_here(made, names):
    for name in names:
        assert not hasattr(made, name)
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'") as error:
            getattr(made, name)
        text = str(error.value)
        assert f"Here it is {names[name]}." in text
        elsewhere = mpjax.DynamicLossScale() if "of a mpjax.Dynamic" in text else made
        elsewhere = mpjax.get_policy("int8_from_float32") if "of a mpjax.Q" in text else elsewhere
        for word in re.findall(r"(?:is|and) \.(\w+)", text):
            assert hasattr(elsewhere, word), text
        for module, word in re.findall(r"mpjax((?:\.[a-z]+)*)\.(\w+)", text):
            assert hasattr(importlib.import_module(f"mpjax{module}"), word)


@pytest.mark.parametrize("name", foreign_attributes.ATTRIBUTES)
def test_a_name_of_another_library_is_answered_with_one_that_is_here(name):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'") as error:
        getattr(mpjax, name)
    assert f"Here it is {foreign_attributes.ATTRIBUTES[name]}." in str(error.value)
    for module, word in re.findall(r"mpjax((?:\.[a-z]+)*)\.(\w+)", str(error.value)):
        assert hasattr(importlib.import_module(f"mpjax{module}"), word)


def test_an_editor_completes_names_that_exist_and_all_of_the_usual_ones():
    known = get_args(KnownPolicy)
    for name in known:
        assert mpjax.get_policy(name) is not None
    listed = {row.name for row in POLICY_NAMES if not row.name.isdigit()}
    assert listed - {*known} <= {"f16", "f32", "f64"}
