"""mpjax.linen: dtypes by module path, what a model uses, and train states that skip as a whole."""

import copy
import functools
import io
import pickle
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _helpers import Traced, bits
from _linen_layers import array
from flax.core import meta
from flax.training.train_state import TrainState

import mpjax
import mpjax.linen
from mpjax.testing import assert_bitwise_equal, assert_one_compilation

pytestmark = [
    pytest.mark.standard_promotion("linen promotes its own masks and counts implicitly"),
    pytest.mark.no_leak_check("linen keeps tracers on its scopes until they are collected"),
]

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
X = array(4, 6)
KEY = jax.random.key(0)


class Encoder(nn.Module):
    """Submodules made in setup, one in a list, one of a dtype of its own."""

    def setup(self):
        self.inner = nn.Dense(5)
        self.rest = [nn.LayerNorm(), nn.Dense(5, dtype=jnp.float32)]

    def __call__(self, x):
        x = self.inner(x)
        for layer in self.rest:
            x = layer(x)
        return x


class Network(nn.Module):
    """Submodules of every origin: a field, setup, a compact method inside one."""

    head: nn.Module

    def setup(self):
        self.encoder = Encoder()

    def __call__(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        return self.encoder(x)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="out")(nn.relu(nn.Dense(4)(x)))


# Of what has a dtype in it; `rest_1` is of float32 as it is written.
PATHS = ("encoder/inner", "encoder/rest_0", "encoder/rest_1", "head/Dense_0", "head/out")


def network():
    return Network(head=Head())


def made(model):
    """Returns the model's variables for X; jitted, which is the fastest."""
    return jax.jit(model.init)(KEY, X)


def dtypes(model, *args, **kwargs):
    rows = mpjax.linen.tabulate(model, *args, **kwargs).rows
    return {row.path: row.dtype for row in rows if row.dtype != "-"}


# -- setting dtypes ----------------------------------------------------------------------------


class Transformer(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        attend = nn.MultiHeadDotProductAttention(num_heads=2, dtype=self.dtype)
        x = x + attend(nn.LayerNorm(dtype=self.dtype)(x))
        x = nn.Dense(8, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.BatchNorm(use_running_average=True, dtype=self.dtype)(x)


def test_the_program_is_that_of_the_dtype_written_by_hand():
    x = array(2, 5, 8)
    variables = jax.jit(Transformer().init)(KEY, x)
    by_hand = Transformer(dtype=BF16)
    by_policy = mpjax.linen.with_policy(Transformer(), "p=f32,c=bf16,o=bf16")
    programs = [str(jax.make_jaxpr(m.apply)(variables, x)) for m in (by_hand, by_policy)]
    assert programs[0] == programs[1]


def test_rules_go_by_module_path():
    policies = mpjax.PolicyMap(
        "bf16-mixed", {"head/out": "float32", "encoder/rest_*": "p=f16,c=f16,o=f32"}
    )
    model = mpjax.linen.with_policy(network(), policies)
    table = mpjax.linen.tabulate(model, X)
    ruled = {"encoder/rest_0": "f16", "encoder/rest_1": "f32", "head/out": "f32"}
    assert dtypes(model, X) == dict.fromkeys(PATHS, "bf16") | ruled
    assert table["head/out"].reason == "rule 'head/out'"
    assert table["head/Dense_0"].reason == "policy"
    assert table["encoder/rest_1"].reason == "set in the model"
    assert table["encoder/rest_0"].param_dtype == "f16"
    assert table["encoder"].reason == "has no dtype"


def test_the_model_given_and_its_fields_stay_as_they_are():
    head = Head()
    plain = Network(head=head)
    model = mpjax.linen.with_policy(plain, "bf16-mixed")
    model.apply(made(model), X)
    assert model.head is head
    assert type(plain) is Network
    assert type(head) is Head
    assert set(dtypes(plain, X).values()) == {"inputs", "f32"}


def test_the_model_returns_the_default_policys_output_dtype():
    model = mpjax.linen.with_policy(network(), "p=f32,c=bf16,o=f16")
    variables = made(model)
    for method in (None, "encode", Network.encode, model.encode, lambda m, x: m.encoder(x)):
        assert model.apply(variables, X, method=method).dtype == F16
    out, state = model.apply(variables, X, mutable=["intermediates"])
    assert (out.dtype, state) == (F16, {})


class TwoInOne(nn.Module):
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, dtype=self.dtype, param_dtype=self.param_dtype, name="first")(x)
        return nn.Dense(4, dtype=jnp.float16, name="second")(x)


def test_a_dtype_passed_down_is_the_policys_and_one_written_out_is_the_models():
    policies = mpjax.PolicyMap("bf16-mixed", {"first": "p=f16,c=f32,o=f32"})
    model = mpjax.linen.with_policy(TwoInOne(), policies)
    table = mpjax.linen.tabulate(model, X)
    assert dtypes(model, X) == {"": "bf16", "first": "f32", "second": "f16"}
    assert table["first"].param_dtype == "f16"
    assert table["second"].reason == "set in the model"


def test_a_dtype_given_to_the_model_itself_stays_all_the_way_down():
    model = mpjax.linen.with_policy(TwoInOne(dtype=jnp.float16), "p=bf16,c=bf16,o=f32")
    with pytest.warns(mpjax.PolicyWarning, match="the policy changes nothing: '' .*of its own"):
        table = mpjax.linen.tabulate(model, X)
    assert {row.dtype for row in table.rows} == {"f16"}
    assert table["first"].param_dtype == "bf16"


def test_override_takes_the_place_of_what_the_model_sets():
    model = mpjax.linen.with_policy(TwoInOne(dtype=jnp.float16), "bf16-mixed", override=True)
    assert set(dtypes(model, X).values()) == {"bf16"}


def test_a_second_policy_replaces_the_first():
    model = mpjax.linen.with_policy(mpjax.linen.with_policy(Head(), "bf16-mixed"), "16-mixed")
    assert set(dtypes(model, X).values()) == {"f16"}
    assert str(mpjax.linen.tabulate(model, X)).startswith("Head under 16-mixed\n")


def test_a_module_inside_may_have_a_policy_of_its_own():
    own = mpjax.PolicyMap("p=f32,c=f16,o=f32", {"out": "float32"})  # paths within the head
    model = mpjax.linen.with_policy(
        Network(head=mpjax.linen.with_policy(Head(), own)), "bf16-mixed"
    )
    others = {"encoder/rest_1": "f32", "head/Dense_0": "f16", "head/out": "f32"}
    assert dtypes(model, X) == dict.fromkeys(PATHS, "bf16") | others


class Shared(nn.Module):
    first: nn.Module
    second: nn.Module

    def __call__(self, x):
        return self.second(self.first(x))


def test_a_shared_module_is_one_module_still():
    layer = nn.Dense(6)
    model = mpjax.linen.with_policy(Shared(layer, layer), "bf16-mixed")
    variables = made(model)
    assert set(variables["params"]) == {"first"}
    assert dtypes(model, X) == {"first": "bf16"}


class Reader(nn.Module):
    """Reads a dtype of a module in a field before it calls that module."""

    head: nn.Module

    def __call__(self, x):
        return x * (self.head.dtype == BF16)


def test_a_module_in_a_field_has_its_dtype_before_its_parent_reads_it():
    assert mpjax.linen.with_policy(Reader(nn.Dense(4)), "bf16-mixed").apply({}, X).all()


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x):
        narrow = mpjax.linen.with_policy(nn.Dense, "float32")
        return nn.Dense(3, name="wide")(x) + narrow(3, name="narrow")(x)


def test_a_class_with_a_policy_is_made_and_named_as_the_class():
    assert dtypes(mpjax.linen.with_policy(TwoHeads(), "bf16-mixed"), X) == {
        "wide": "bf16",
        "narrow": "f32",
    }
    assert mpjax.linen.with_policy(nn.Dense, "bf16-mixed").__name__ == "Dense"


def test_submodules_of_a_bound_model_are_under_its_policy():
    policies = mpjax.PolicyMap("bf16-mixed", {"head/out": "p=f32,c=f16,o=f32"})
    model = mpjax.linen.with_policy(network(), policies)
    variables = made(model)
    bound = model.bind(variables)
    assert bound.encoder.inner(X).dtype == BF16
    assert bound.head(bound.encoder.inner(X)).dtype == F16
    assert bound(X).dtype == F32
    head, head_variables = bound.head.unbind()
    assert head.apply(head_variables, array(2, 5)).dtype == F16


def test_equal_models_under_equal_policies_are_equal_and_traced_once():
    def small():
        return mpjax.linen.with_policy(network(), mpjax.PolicyMap("16-mixed", {"head": "f32"}))

    assert small() == small()
    assert hash(small()) == hash(small())
    assert small() != mpjax.linen.with_policy(network(), "16-mixed")
    assert small() != network()
    variables = made(small())
    apply = lambda model, x: model.apply(variables, x)  # noqa: E731
    with assert_one_compilation(apply, static_argnums=0) as traced:
        traced(small(), X)
        traced(small(), X)


def test_a_model_is_an_instance_of_its_class_and_can_be_copied_and_pickled():
    model = mpjax.linen.with_policy(Head(), "bf16-mixed")
    assert isinstance(model, Head)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model.clone()):
        assert other == model
        assert set(dtypes(other, X).values()) == {"bf16"}


class Hashed(Head):
    def __hash__(self):
        return 7

    def __eq__(self, other):
        return isinstance(other, Hashed)


def test_a_model_that_hashes_its_own_way_goes_on_doing_so():
    assert hash(mpjax.linen.with_policy(Hashed(), "bf16-mixed")) == 7
    assert mpjax.linen.with_policy(Hashed(), "bf16-mixed") == Hashed()


def test_operations_are_named_as_in_the_model_without_a_policy():
    def scopes(model):
        rows = mpjax.explain(model.apply, "bf16-mixed")(made(network()), X).rows
        return {row.module for row in rows}

    assert scopes(mpjax.linen.with_policy(network(), "float32")) == scopes(network())


# -- transformations ---------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(x.shape[-1], name="dense")(nn.LayerNorm(name="norm")(x)), None


class Stack(nn.Module):
    lift: Any

    @nn.compact
    def __call__(self, x):
        return self.lift(Block)(name="blocks")(x)[0]


LIFTS = {
    "scan": functools.partial(
        nn.scan, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    ),
    "remat": nn.remat,
    "jit": nn.jit,
    "vmap": functools.partial(
        nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
    ),
    "remat with a policy": functools.partial(
        nn.remat, policy=jax.checkpoint_policies.dots_saveable
    ),
    "remat_scan": lambda block: functools.partial(
        nn.scan(nn.remat(block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LIFTS)
def test_lifted_transforms_are_gone_through(name):
    policies = mpjax.PolicyMap("bf16-mixed", {"blocks/norm": "float32"})
    plain = Stack(LIFTS[name])
    model = mpjax.linen.with_policy(plain, policies)
    assert dtypes(model, X) == {"blocks/norm": "f32", "blocks/dense": "bf16"}
    variables = made(model)
    assert_bitwise_equal(variables, made(plain))

    def loss(variables, model):
        return (model.apply(variables, X) ** 2).mean()

    low, full = jax.jit(lambda v: [jax.grad(loss)(v, m) for m in (model, plain)])(variables)
    for a, b in zip(jax.tree.leaves(low), jax.tree.leaves(full), strict=True):
        assert a.dtype == F32
        assert not np.array_equal(a, b)
        # Three blocks of a product each: rounded operands, and their rounded sum, back and forth.
        np.testing.assert_allclose(a, b, rtol=0, atol=16 * 2**-8 * np.abs(b).max())


JITTED = nn.jit(Block)  # once: Flax keeps what it has traced with the class


def test_nn_jit_is_not_answered_from_another_policys_cache():
    for policy, dtype in (("bf16-mixed", BF16), ("16-mixed", F16), ("float32", F32)):
        model = mpjax.linen.with_policy(Stack(lambda _: JITTED), policy)
        variables = made(model)
        for _ in range(2):
            _, state = model.apply(variables, X, capture_intermediates=True)
            (out,) = state["intermediates"]["blocks"]["dense"]["__call__"]
            assert out.dtype == dtype


@pytest.mark.parametrize("lift", [nn.remat, nn.jit])
def test_a_class_with_a_policy_can_be_lifted(lift):
    lifted = lift(mpjax.linen.with_policy(Block, "bf16-mixed"))()
    assert dtypes(lifted, X) == {"norm": "bf16", "dense": "bf16"}
    variables = made(lifted)
    assert "bf16" in str(jax.make_jaxpr(lifted.apply)(variables, X))
    assert lifted.apply(variables, X)[0].dtype == F32


def test_partitioned_parameters_keep_their_boxes():
    init = nn.with_partitioning(nn.initializers.ones, ("a", "b"))
    model = mpjax.linen.with_policy(nn.Dense(2, kernel_init=init), "p=bf16,c=bf16,o=f32")
    kernel = made(model)["params"]["kernel"]
    assert isinstance(kernel, meta.Partitioned)
    assert kernel.value.dtype == BF16
    assert mpjax.linen.tabulate(model, X)[""].parameters == 14


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-true", "p=bf16,c=f32,o=f32"])
@pytest.mark.parametrize("kind", ["SimpleCell", "LSTMCell", "GRUCell", "MGUCell"])
def test_cells_hand_on_the_carry_that_they_were_given(kind, policy):
    init = nn.initializers.lecun_normal()  # JAX has no QR decomposition in 16 bits
    cell = getattr(nn, kind)(3, recurrent_kernel_init=init)
    model = mpjax.linen.with_policy(nn.RNN(cell), policy)
    seen = set()

    def look(next_fun, args, kwargs, context):
        out = next_fun(*args, **kwargs)
        if isinstance(context.module, nn.RNNCellBase) and context.method_name == "__call__":
            seen.update(x.dtype for x in jax.tree.leaves((args[0], out[0])))
        return out

    with nn.intercept_methods(look):
        jax.eval_shape(model.init, KEY, array(2, 5, 8))
    assert seen == {mpjax.get_policy(policy).param_dtype}  # in which Flax's cells start


# -- reading back ------------------------------------------------------------------------------


def test_the_table_counts_what_each_module_holds_itself():
    table = mpjax.linen.tabulate(network(), jax.ShapeDtypeStruct((4, 6), F32))
    counts = {row.path: row.parameters for row in table.rows if row.parameters}
    assert counts == dict(zip(PATHS, (35, 10, 30, 24, 15), strict=True))
    assert [row.reason for row in table.rows] == ["as written"] * len(table.rows)
    assert table.to_dict()["rows"][0]["class_name"] == "Network"


def test_the_table_passes_flags_and_keys_on():
    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            return nn.Dropout(0.5, deterministic=not train)(nn.Dense(2)(x))

    model = mpjax.linen.with_policy(Dropping(), "bf16-mixed")
    assert dtypes(model, X, train=True) == {"Dense_0": "bf16"}
    assert dtypes(model, X, train=True, rngs={"params": KEY, "dropout": KEY}) == {"Dense_0": "bf16"}


def test_the_table_prints_in_rich_too():
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(mpjax.linen.tabulate(mpjax.linen.with_policy(Head(), "bf16-mixed"), X))
    text = console.export_text()
    assert "Head under bf16-mixed" in text
    assert "Dense_0" in text


def test_an_unknown_path_of_the_table_names_those_that_there_are():
    with pytest.raises(KeyError, match="no module at 'heat'") as error:
        mpjax.linen.tabulate(Head(), X)["heat"]
    assert "'Dense_0', 'out'" in str(error.value)


# -- bad input ---------------------------------------------------------------------------------


def initialised(model, policy):
    jax.eval_shape(mpjax.linen.with_policy(model, policy).init, KEY, X)


DROPS = nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=True)])


IDLE = [
    (
        *(DROPS, {"layers_1": "float32"}),
        r"rule 1 of 1, 'layers_1', changes nothing: 'layers_1' \(Dropout\) has no dtype",
    ),
    (
        *(TwoInOne(), {"second": "float32"}),
        r"1 of 1, 'second', changes nothing: 'second' \(Dense\) has a dtype of its own(.|\n)*pass "
        "override=True",
    ),
]


@pytest.mark.parametrize(("model", "rules", "said"), IDLE)
def test_a_rule_that_does_nothing_is_a_warning(model, rules, said):
    with pytest.warns(mpjax.PolicyWarning, match=said):
        initialised(model, mpjax.PolicyMap("bf16-mixed", rules))


class Custom(nn.Module):
    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones, (6, 2))
        return x @ weight


def test_a_custom_module_without_a_dtype_is_a_warning_where_it_would_matter():
    said = r"'layers_1' \(Custom\) holds parameters and has no dtype"
    model = nn.Sequential([nn.Dense(6), Custom()])
    with pytest.warns(mpjax.PolicyWarning, match=said):
        initialised(model, "bf16-mixed")
    with pytest.warns(mpjax.PolicyWarning, match=said):
        initialised(nn.Sequential([nn.Dense(6), nn.remat(Custom)()]), "bf16-mixed")
    initialised(model, "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        initialised(model, mpjax.PolicyMap("bf16-mixed", {"layers_1": "float32"}))
    assert ["changes nothing" in str(w.message) for w in caught] == []


def test_what_one_method_initialises_says_nothing_of_the_rest():
    model = mpjax.linen.with_policy(
        network(), mpjax.PolicyMap("bf16-mixed", {"head/out": "float32"})
    )
    jax.eval_shape(functools.partial(model.init, method="encode"), KEY, X)


def test_a_bound_module_is_refused():
    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            return mpjax.linen.with_policy(nn.Dense(2), "float32")(x)

    with pytest.raises(ValueError, match=r"the Dense is bound.*\n.*with_policy\(nn.Dense, policy"):
        Inside().init(KEY, X)


# -- train states ------------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return nn.Dense(1)(x)


class NormedState(TrainState):
    batch_stats: Any
    ema: Any


def normed_step(policy):
    """Returns a train state with statistics and an EMA, and its jitted step."""
    model = mpjax.linen.with_policy(Normed(), policy)
    variables = made(model)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    state = NormedState.create(
        apply_fn=model.apply,
        tx=mpjax.with_loss_scale(tx, mpjax.DynamicLossScale(2.0**12)),
        ema=jax.tree.map(jnp.copy, variables["params"]),
        **variables,
    )

    def step(state, x):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
            return jnp.mean(out**2), new["batch_stats"]

        scale = mpjax.current_loss_scale(state.opt_state)
        differentiate = mpjax.value_and_grad(loss_fn, has_aux=True, loss_scale=scale)
        (_, stats), grads = differentiate(state.params)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p + 0 * x.sum(), state.ema, state.params)
        return mpjax.linen.apply_gradients(state, grads=grads, batch_stats=stats, ema=ema)

    return state, Traced(step)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed"])
def test_a_skipped_step_leaves_all_of_a_train_state_as_it_was(policy):
    state, step = normed_step(policy)
    state = step(state, X)
    skipped = step(state, X.at[0, 0].set(jnp.inf))
    for name in ("step", "params", "batch_stats", "ema"):
        assert_bitwise_equal(getattr(skipped, name), getattr(state, name))
    assert_bitwise_equal(skipped.opt_state.inner_state, state.opt_state.inner_state)
    assert float(skipped.opt_state.loss_scale) == 2.0**11
    after = step(skipped, X)
    assert int(after.step) == 2
    assert step.traces == 1
    for name in ("params", "batch_stats", "ema"):
        pairs = zip(
            *map(jax.tree.leaves, (getattr(after, name), getattr(state, name))), strict=True
        )
        assert any(bits(a) != bits(b) for a, b in pairs)


@pytest.mark.parametrize(("ours", "counted"), [(True, 0), (False, 1)], ids=["ours", "flax's"])
def test_a_train_states_own_method_counts_a_skipped_step_and_ours_does_not(ours, counted):
    """As `docs/migrate/flax.md` says, though the optimizer skips it: hence a method of ours."""
    tx = mpjax.with_loss_scale(optax.adam(0.1), mpjax.DynamicLossScale())
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    grads = {"w": jnp.array([jnp.inf, 1.0])}
    if ours:
        new = mpjax.linen.apply_gradients(state, grads=grads)
    else:
        new = state.apply_gradients(grads=grads)
    assert (int(new.step), int(new.opt_state.inner_state[0].count)) == (counted, 0)
    assert_bitwise_equal(new.params, state.params)


def test_several_optimizers_in_one_guard_what_they_share_unless_all_took_the_step():
    tx = optax.partition(
        {
            name: mpjax.with_loss_scale(optax.sgd(0.5), mpjax.StaticLossScale(2.0))
            for name in ("a", "b")
        },
        {"a": "a", "b": "b"},
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = {"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)}
    new = mpjax.linen.apply_gradients(state, grads=grads)
    assert int(new.step) == 0
    assert_bitwise_equal(new.params, {"a": jnp.full(2, 0.75), "b": jnp.ones(2)})


def test_statistics_that_change_their_dtype_are_refused():
    state, _ = normed_step("float32")
    low = jax.tree.map(lambda s: s.astype(BF16), state.batch_stats)
    with pytest.raises(ValueError, match=r"'BatchNorm_0/mean'.*bf16\[4\] and f32\[4\]"):
        mpjax.linen.apply_gradients(state, grads=state.params, batch_stats=low)


# -- float8 ------------------------------------------------------------------------------------

OVERWRITTEN = "_overwrite_with_gradient"
FP8 = {name: getattr(nn, name) for name in ("Fp8DotGeneralOp", "Fp8DirectDotGeneralOp")}


class Float8(nn.Module):
    """Two products of 8-bit operands, whose scales are learnt as Flax does: from a gradient."""

    op: Any

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, dot_general_cls=self.op)(x))
        return nn.Dense(16, dot_general_cls=self.op)(x)


def float8_loss(model):
    def loss(variables, x):
        return jnp.mean(model.apply(variables, x).astype(F32) ** 2)

    return loss


def next_scales(loss, variables, x, scale):
    """Returns what Flax's layers say their scales and histories are after this step."""
    return jax.jit(jax.grad(lambda v: loss(v, x) * scale))(variables)[OVERWRITTEN]


# In float16 Flax divides by scales that are float16 too: a small loss scale makes them vanish.
FLOAT8_RUNS = [("bf16-mixed", 1.0), ("16-mixed", 2.0**10)]
float8_test = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")


def made_float8(op, x):
    return jax.jit(Float8(FP8[op]).init)(KEY, x)


def float8_run(way, op, policy, scale, x):
    """Returns a state, its step, and the loss under the policy."""
    model = Float8(FP8[op])
    loss = float8_loss(model)
    fast = mpjax.autocast(loss, policy)
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2))
    chosen = mpjax.DynamicLossScale(scale, growth_interval=1)
    if way == "train step":
        run = mpjax.make_train_step(loss, tx, policy, loss_scale=chosen if scale != 1 else None)
        return run.init(made_float8(op, x)), lambda state, x: run(state, x)[0], fast
    tx = mpjax.with_loss_scale(tx, chosen)

    @jax.jit
    def step(state, x):
        scale = mpjax.current_loss_scale(state)
        grads = mpjax.grad(fast, loss_scale=scale)(state.params, x)
        return mpjax.linen.apply_gradients(state, grads=grads)

    return TrainState.create(apply_fn=model.apply, params=made_float8(op, x), tx=tx), step, fast


@pytest.mark.sampled(2)
@float8_test
@pytest.mark.parametrize(("policy", "scale"), FLOAT8_RUNS)
@pytest.mark.parametrize("op", FP8)
@pytest.mark.parametrize("way", ["train step", "train state"])
def test_float8_scales_are_what_their_gradient_says(way, op, policy, scale):
    x = array(16, 16)
    state, step, loss = float8_run(way, op, policy, scale, x)
    for _ in range(3):
        used = float(mpjax.current_loss_scale(state.opt_state).loss_scale)
        want = next_scales(loss, state.params, x, used)
        state = step(state, x)
        assert bool(state.opt_state.grads_finite)
        assert_bitwise_equal(state.params[OVERWRITTEN], want)
    before = jax.tree.map(jnp.copy, state.params)
    skipped = step(state, x.at[0, 0].set(jnp.nan))
    assert not bool(skipped.opt_state.grads_finite)
    assert_bitwise_equal(skipped.params, before)


@float8_test
@pytest.mark.parametrize("op", FP8)
def test_float8_scales_are_float32_under_every_policy(op):
    x = array(16, 16)
    model = mpjax.linen.with_policy(Float8(FP8[op]), "bf16-true")
    variables = jax.jit(model.init)(KEY, x)
    grads = jax.jit(jax.grad(float8_loss(model)))(variables, x)
    for tree in (variables, grads):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree["params"])} == {"bfloat16"}
        assert {leaf.dtype.name for leaf in jax.tree.leaves(tree[OVERWRITTEN])} == {"float32"}
    plain = jax.jit(jax.grad(float8_loss(Float8(FP8[op]))))
    full = plain(mpjax.Policy().cast_to_param(variables), x)
    for a, b in zip(*(jax.tree.leaves(g[OVERWRITTEN]) for g in (grads, full)), strict=True):
        # Largest values of operands; a cotangent that went through 8 bits is known to 2⁻³.
        np.testing.assert_allclose(a, b, rtol=2**-3)
