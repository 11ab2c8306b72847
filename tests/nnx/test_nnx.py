"""mpjax.nnx: dtypes by module path, scaled gradients, and steps that are skipped as a whole."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _helpers import as_owned, bits
from _nnx_layers import ROWS, array, rngs
from flax import nnx

import mpjax
import mpjax.linen
import mpjax.nnx
from mpjax.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.standard_promotion("nnx promotes its own masks and counts implicitly"),
    pytest.mark.no_leak_check("nnx keeps the modules of a trace until they are collected"),
    pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning"),  # RoPE's own
]

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


class Block(nnx.Module):
    def __init__(self, *, dtype=jnp.float32, param_dtype=jnp.float32):
        self.dtype, self.param_dtype = dtype, param_dtype
        given = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs()}
        self.inner = nnx.Linear(6, 6, **given)  # passed down
        self.fixed = nnx.Linear(6, 6, dtype=jnp.float16, rngs=rngs())

    def __call__(self, x):
        return self.fixed(self.inner(x))


class Network(nnx.Module):
    """Modules of every kind: in a list, stateful, without a dtype, with one of its own."""

    def __init__(self):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs()), nnx.BatchNorm(6, rngs=rngs())])
        self.dropout = nnx.Dropout(0.5, rngs=rngs())
        self.block = Block()
        self.head = nnx.Linear(6, 2, rngs=rngs())

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.block(self.dropout(x)))


PATHS = ("block", "block/fixed", "block/inner", "head", "layers/0", "layers/1")


def dtypes(model):
    return {row.path: row.dtype for row in mpjax.nnx.tabulate(model).rows if row.dtype != "-"}


def values(*nodes):
    """Returns every variable's value, by path."""
    found = {}
    for index, node in enumerate(nodes):
        for path, x in nnx.iter_graph(node):
            if isinstance(x, nnx.Variable):
                found[f"{index}/{'/'.join(map(str, path))}"] = x.get_value()
    return found


# -- setting dtypes ----------------------------------------------------------------------------


def test_every_module_gets_the_policys_dtypes_and_parameters_are_cast():
    model = Network()
    mpjax.nnx.set_policy(model, "p=bf16,c=f16,o=f32")
    assert dtypes(model) == dict.fromkeys(PATHS, "f16")
    kinds = {type(x): x.get_value().dtype.name for _, x in nnx.iter_graph(model) if is_float(x)}
    assert kinds == {nnx.Param: "bfloat16", nnx.BatchStat: "float32"}


def is_float(x):
    return isinstance(x, nnx.Variable) and jnp.issubdtype(x.get_value().dtype, jnp.floating)


def test_rules_go_by_module_path():
    model = Network()
    rules = {"layers/1": "float32", "head": "p=f16,c=f32,o=f32", "block/inner": "16-mixed"}
    mpjax.nnx.set_policy(model, mpjax.PolicyMap("bf16-mixed", rules))
    others = {"block/fixed": "f16", "block/inner": "f16", "head": "f32", "layers/1": "f32"}
    assert dtypes(model) == dict.fromkeys(PATHS, "bf16") | others
    table = mpjax.nnx.tabulate(model)
    assert table["head"].reason == "rule 'head'"
    assert (table["head"].param_dtype, table["head"].parameters) == ("f16", 14)
    assert table["block/fixed"].reason == "set in the model"
    assert table["layers/0"].reason == "policy"
    assert table["dropout"].reason == "has no dtype"
    assert str(table).startswith("Network\nmodule ")


def test_a_rule_may_name_a_parameter():
    model = nnx.Linear(6, 6, rngs=rngs())
    mpjax.nnx.set_policy(model, mpjax.PolicyMap("bf16-true", {"bias": "float32"}))
    assert model.kernel.get_value().dtype == BF16
    assert model.bias.get_value().dtype == F32
    assert model.dtype == BF16


def test_the_program_is_that_of_the_dtype_written_by_hand():
    def program(dtype, policy):
        given = {"dtype": dtype, "rngs": nnx.Rngs(0)}
        attend = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, **given)
        layers = nnx.LayerNorm(8, **given), attend, nnx.BatchNorm(8, **given)
        model = nnx.Sequential(*layers, nnx.Linear(8, 3, **given))
        if policy is not None:
            mpjax.nnx.set_policy(model, policy)
        graph, state = nnx.split(model)
        run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
        return str(jax.make_jaxpr(run)(state, array(2, 5, 8)))

    assert program(BF16, None) == program(None, "bf16-mixed")


def test_a_dtype_that_the_model_sets_stays_unless_overridden():
    model = Block()
    mpjax.nnx.set_policy(model, "bf16-mixed")
    assert dtypes(model) == {"": "bf16", "fixed": "f16", "inner": "bf16"}
    mpjax.nnx.set_policy(model, "bf16-mixed", override=True)
    assert dtypes(model) == {"": "bf16", "fixed": "bf16", "inner": "bf16"}
    model = Block(dtype=jnp.float16, param_dtype=jnp.bfloat16)
    with pytest.warns(mpjax.PolicyWarning, match="the policy changes nothing: '' .*of its own"):
        mpjax.nnx.set_policy(model, "p=f16,c=f32,o=f32")
    assert set(dtypes(model).values()) == {"f16"}
    assert model.inner.kernel.get_value().dtype == BF16
    assert model.fixed.kernel.get_value().dtype == F16


def test_a_later_policy_replaces_the_earlier_one_and_no_more():
    model = Block()
    for policy, dtype in (("bf16-mixed", "bf16"), ("32-true", "f32"), ("16-mixed", "f16")):
        mpjax.nnx.set_policy(model, policy)
        assert dtypes(model) == {"": dtype, "fixed": "f16", "inner": dtype}
        model = nnx.clone(model)
    model.inner.dtype = jnp.bfloat16  # by hand: the model's own from now on
    mpjax.nnx.set_policy(model, "32-true")
    assert dtypes(model) == {"": "f32", "fixed": "f16", "inner": "bf16"}


def test_an_embedding_of_float32_is_under_the_policy():
    model = nnx.Embed(7, 4, rngs=rngs())
    mpjax.nnx.set_policy(model, "bf16-mixed")
    assert model(jnp.arange(3)).dtype == BF16
    assert model.embedding.get_value().dtype == F32


def test_a_model_of_shapes_takes_a_policy_too():
    model = nnx.eval_shape(Network)
    mpjax.nnx.set_policy(model, "bf16-true")
    assert model.head.kernel.get_value() == jax.ShapeDtypeStruct((6, 2), BF16)


def test_shared_and_stacked_modules_are_set_once():
    shared = nnx.Linear(6, 6, rngs=rngs())
    model = nnx.Sequential(shared, shared)
    mpjax.nnx.set_policy(model, "bf16-mixed")
    assert model.layers[0] is model.layers[1]
    assert list(dtypes(model).values()) == ["bf16"]

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(6, 6, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))
    mpjax.nnx.set_policy(stack, "bf16-true")
    assert stack.kernel.get_value().dtype == BF16

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def run(layer, x):
        return layer(x).astype(x.dtype)

    graph, state = nnx.split(stack)
    text = str(jax.make_jaxpr(lambda state, x: run(nnx.merge(graph, state), x))(state, ROWS))
    assert "bf16[4,6] = dot_general[" in text


@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-true", "p=bf16,c=f32,o=f32"])
@pytest.mark.parametrize("kind", ["SimpleCell", "LSTMCell", "GRUCell", "OptimizedLSTMCell"])
def test_cells_hand_on_a_carry_of_one_dtype(kind, policy):
    model = nnx.RNN(getattr(nnx, kind)(8, 3, rngs=rngs()), rngs=rngs())
    for _ in range(2):  # the second time changes nothing more
        mpjax.nnx.set_policy(model, policy)
        wide = BF16 if policy == "bf16-true" else F32
        graph, state = nnx.split(model)
        run = lambda state, x, graph=graph: nnx.merge(graph, state)(x)  # noqa: E731
        assert jax.eval_shape(run, state, array(2, 5, 8)).dtype == wide


# -- bad input ---------------------------------------------------------------------------------


def test_a_rule_that_matches_no_module_is_a_warning():
    said = "'heat', matches none of the .* paths.\n  Nearest: 'head'"
    with pytest.warns(mpjax.PolicyWarning, match=said):
        mpjax.nnx.set_policy(Network(), mpjax.PolicyMap("bf16-mixed", {"heat": "float32"}))


class Custom(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones((6, 2)))

    def __call__(self, x):
        return x @ self.weight


def test_a_custom_module_without_a_dtype_is_a_warning_where_it_would_matter():
    said = r"'layers/1' \(Custom\) holds parameters and has no dtype"
    model = nnx.Sequential(nnx.Linear(6, 6, rngs=rngs()), Custom())
    with pytest.warns(mpjax.PolicyWarning, match=said):
        mpjax.nnx.set_policy(model, "bf16-mixed")
    mpjax.nnx.set_policy(model, mpjax.PolicyMap("bf16-mixed", {"layers/1": "float32"}))
    mpjax.nnx.set_policy(model, "bf16-true")  # its parameters are cast: it computes as they are
    assert model.layers[1].weight.get_value().dtype == BF16


def test_float64_without_64_bit_types_is_refused_before_anything_is_set():
    model = nnx.Linear(2, 2, rngs=rngs())
    with pytest.raises(ValueError, match="set_policy: float64 was asked for"):
        mpjax.nnx.set_policy(model, "64-true")
    assert model.dtype is None


# -- gradients ---------------------------------------------------------------------------------


def mean_square(model, x):
    return jnp.mean(model(x) ** 2)


def stateful():
    layers = (nnx.Linear(6, 6, rngs=rngs()), nnx.BatchNorm(6, rngs=rngs()))
    return nnx.Sequential(*layers, nnx.Dropout(0.5, rngs=rngs()), nnx.Linear(6, 2, rngs=rngs()))


@pytest.mark.parametrize("unscale", [True, False])
def test_gradients_are_those_of_nnx_scaled_and_unscaled_by_powers_of_two(unscale):
    model, other = stateful(), stateful()
    want_loss, want = nnx.jit(nnx.value_and_grad(mean_square))(other, ROWS)
    scale = mpjax.StaticLossScale(2.0**8)
    scale = scale if unscale else as_owned(scale)
    differentiate = mpjax.nnx.value_and_grad(mean_square, loss_scale=scale, unscale=unscale)
    loss, grads = nnx.jit(differentiate)(model, ROWS)
    assert bits(loss) == bits(want_loss)
    factor = 1.0 if unscale else 2.0**8
    assert_bitwise_equal(grads, jax.tree.map(lambda g: g * factor, want))
    # Statistics and counts have moved as under nnx.value_and_grad.
    assert_bitwise_equal(values(model), values(other))
    moved = {name for name, x in values(stateful()).items() if bits(x) != bits(values(model)[name])}
    assert moved == {"0/layers/1/mean", "0/layers/1/var", "0/layers/2/rngs/count"}


def test_argnums_diff_state_and_aux_are_passed_on():
    model, other = Block(), Block()

    def loss_fn(x, first, second):
        return jnp.sum(first(x) * second(x)), {"seen": x.shape, "model": second}

    wrt = (nnx.DiffState(1, nnx.All(nnx.Param, nnx.PathContains("inner"))), 2)
    differentiate = mpjax.nnx.value_and_grad(loss_fn, argnums=wrt, has_aux=True, loss_scale=4.0)
    (value, aux), (first, second) = differentiate(ROWS, model, other)
    assert value.shape == ()
    assert aux["seen"] == ROWS.shape
    assert isinstance(aux["model"], Block)
    assert set(first) == {"inner"}
    assert set(second) == {"inner", "fixed"}
    grads, aux = mpjax.nnx.grad(loss_fn, argnums=0, has_aux=True, loss_scale=4.0)(
        ROWS, model, other
    )
    assert (grads.shape, aux["seen"]) == (ROWS.shape, ROWS.shape)
    want = nnx.grad(loss_fn, argnums=wrt, has_aux=True)(ROWS, model, other)[0]
    for a, b in zip(jax.tree.leaves((first, second)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-9, atol=1e-3)  # one layer is float16


# -- skipped steps -----------------------------------------------------------------------------


class Ema(nnx.Module):
    """A moving average of a model's parameters, of variables that are parameters too."""

    def __init__(self, model):
        self.average = nnx.clone(model)

    def update(self, model, x):
        params = nnx.state(self.average, nnx.Param)
        blend = lambda a, b: 0.9 * a + 0.1 * b + 0 * x.sum()  # noqa: E731
        nnx.update(self.average, jax.tree.map(blend, params, nnx.state(model, nnx.Param)))


@nnx.jit
def train(model, optimizer, ema, x):
    scale = mpjax.current_loss_scale(optimizer)
    differentiate = mpjax.nnx.value_and_grad(mean_square, loss_scale=scale)
    with mpjax.nnx.undo_skipped(optimizer, model, ema):
        loss, grads = differentiate(model, x)
        optimizer.update(model, grads)
        ema.update(model, x)
    return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["16-mixed", "bf16-mixed"])
def test_a_skipped_step_leaves_everything_as_it_was(policy):
    model = Network()
    mpjax.nnx.set_policy(model, policy)
    ema = Ema(model)
    tx = mpjax.with_loss_scale(optax.adam(1e-2), mpjax.DynamicLossScale(2.0**8))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    start = values(model, ema, optimizer)
    assert np.isfinite(train(model, optimizer, ema, ROWS))
    before = values(model, ema, optimizer)
    changed = {name for name in before if bits(before[name]) != bits(start[name])}
    for part in ("layers/1/mean", "dropout/rngs/count", "head/kernel"):
        assert f"0/{part}" in changed
    assert {"1/average/head/kernel", "2/step"} <= changed

    loss = train(model, optimizer, ema, ROWS.at[0, 0].set(jnp.inf))
    assert not np.isfinite(loss)
    after = values(model, ema, optimizer)
    changed = {name for name in before if bits(after[name]) != bits(before[name])}
    scalars = ("loss_scale", "grads_finite", "skipped_steps", "consecutive_skips", "leaf_finite")
    assert {name.split("/")[2] for name in changed} <= {*scalars, "adjustment"}
    assert float(mpjax.current_loss_scale(optimizer).loss_scale) == 2.0**7
    assert {name: x.dtype for name, x in after.items()} == {n: x.dtype for n, x in start.items()}
    assert np.isfinite(train(model, optimizer, ema, ROWS))
    assert int(optimizer.step.get_value()) == 2


def guarded_step(model, optimizer, x):
    scale = mpjax.current_loss_scale(optimizer)
    differentiate = mpjax.nnx.value_and_grad(mean_square, loss_scale=scale)
    with mpjax.nnx.undo_skipped(optimizer, model):
        loss, grads = differentiate(model, x)
        optimizer.update(model, grads)
    return loss


def guarded(model):
    tx = mpjax.with_loss_scale(optax.sgd(0.1, momentum=0.9), mpjax.DynamicLossScale(2.0**8))
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


BATCHES = jnp.stack([ROWS, ROWS.at[0, 0].set(jnp.inf), ROWS * 0.5])  # the second is skipped


def test_of_an_ensemble_each_member_skips_alone():
    make = nnx.vmap(lambda key: nnx.BatchNorm(6, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
    models = make(jax.random.split(jax.random.key(0), 3))
    optimizers = nnx.vmap(guarded, in_axes=0, out_axes=0)(models)
    nnx.jit(nnx.vmap(guarded_step, in_axes=0, out_axes=0))(models, optimizers, BATCHES)
    assert optimizers.step.get_value().tolist() == [1, 0, 1]
    assert mpjax.nnx.tabulate(models).rows[0].parameters == 36
    assert jnp.isfinite(models.mean.get_value()).all()
    assert (models.mean.get_value() != 0).any(axis=1).tolist() == [True, False, True]


def test_a_variable_that_changes_its_dtype_is_refused():
    model = nnx.BatchNorm(2, rngs=rngs())
    optimizer = nnx.Optimizer(model, mpjax.with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
    refused = pytest.raises(ValueError, match=r"bf16\[2\] and f32\[2\]")
    with refused, mpjax.nnx.undo_skipped(optimizer, model):
        model.mean.set_value(model.mean.get_value().astype(BF16))


def test_an_error_inside_is_passed_on():
    model = nnx.BatchNorm(2, rngs=rngs())
    optimizer = nnx.Optimizer(model, mpjax.with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
    with pytest.raises(KeyError, match="mine"), mpjax.nnx.undo_skipped(optimizer, model):
        raise KeyError("mine")


# -- checkpoints -------------------------------------------------------------------------------


def optimizer_of(model, loss_scale=None, steps=0):
    """Returns an optimizer that has taken some steps; without a wrapper for a scale of None."""
    tx = optax.adam(1e-2)
    tx = tx if loss_scale is None else mpjax.with_loss_scale(tx, loss_scale)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(steps):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    return optimizer


def moments(optimizer):
    state = nnx.as_pure(optimizer.opt_state)
    return getattr(state, "inner_state", state)


def test_an_optimizer_adopts_a_checkpoint_without_a_loss_scale_and_gives_it_back():
    model = nnx.Linear(6, 2, rngs=rngs())
    old, new = optimizer_of(model, steps=3), optimizer_of(model, mpjax.DynamicLossScale(2.0**9))
    mpjax.nnx.adopt_state(new, old)
    assert_bitwise_equal(moments(new), moments(old))
    assert int(new.step.get_value()) == 3
    assert mpjax.current_loss_scale(new).loss_scale == 2.0**9
    before = values(old)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 2.0**9), nnx.state(model, nnx.Param))
    update = lambda model, optimizer: optimizer.update(model, grads)  # noqa: E731
    nnx.jit(update, donate_argnums=1)(model, new)
    assert int(moments(new)[0].count) == 4
    assert_bitwise_equal(values(old), before)  # though the arrays of the new one were donated
    back = optimizer_of(model)
    mpjax.nnx.adopt_state(back, new)
    assert_bitwise_equal(moments(back), moments(new))


def test_an_optimizer_adopts_moments_in_its_own_dtype_and_a_scale_of_its_kind():
    low, full = nnx.Linear(6, 2, rngs=rngs()), nnx.Linear(6, 2, rngs=rngs())
    mpjax.nnx.set_policy(low, "bf16-true")
    old = optimizer_of(low, mpjax.DynamicLossScale(2.0), steps=1)
    new = optimizer_of(full, mpjax.DynamicLossScale(2.0**9))
    mpjax.nnx.adopt_state(new, old)
    assert mpjax.current_loss_scale(new).loss_scale == 2.0
    assert {x.dtype for x in jax.tree.leaves(moments(new)[0].mu)} == {jnp.dtype(F32)}


def test_the_state_of_another_optimizer_or_of_none_is_refused():
    model = nnx.Linear(6, 2, rngs=rngs())
    new = optimizer_of(model, mpjax.DynamicLossScale())
    sgd = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"adopt_state: the trees differ.*\n.*the same optimizer"):
        mpjax.nnx.adopt_state(new, sgd)
    other = optimizer_of(nnx.Linear(6, 3, rngs=rngs()))
    with pytest.raises(ValueError, match=r"adopt_state: .*f32\[3\]; the new .* keeps f32\[2\]"):
        mpjax.nnx.adopt_state(new, other)
    with pytest.raises(TypeError, match=r"got a LossScaleState\.\n.*\n  Restore the checkpoint"):
        mpjax.nnx.adopt_state(new, new.opt_state)
    with pytest.raises(ValueError, match=r"adopt_state: .*\n  .*mpjax\.nnx\.adopt_state\);\n"):
        mpjax.optim.adopt_state(new.tx, sgd.opt_state, nnx.state(model, nnx.Param))


# -- float8 ------------------------------------------------------------------------------------


class Float8(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))
        return nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)


def test_a_state_that_keeps_bits_of_weights_is_adopted_with_the_models_own():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    split = mpjax.optim.with_master_weights(optax.adam(1e-3), bits=24)
    old = nnx.Optimizer(model, split, wrt=nnx.Param)
    # Made before the weights are there, as where a checkpoint is restored.
    late = nnx.Linear(2, 3, rngs=nnx.Rngs(1), param_dtype=jnp.bfloat16)
    new = nnx.Optimizer(late, mpjax.optim.with_master_weights(optax.adam(1e-3)), wrt=nnx.Param)
    old.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    nnx.update(late, nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match=r"was not given the model\.\n  Type adopt_state\(optim"):
        mpjax.nnx.adopt_state(new, old)
    mpjax.nnx.adopt_state(new, old, late)
    params, was = (nnx.as_pure(x) for x in (nnx.state(model, nnx.Param), old.opt_state))
    want = jax.tree.leaves(mpjax.optim.full_params(params, was))
    assert_bitwise_equal(jax.tree.leaves(nnx.as_pure(new.opt_state).master_params), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_float8_scales_of_a_bridged_model_are_what_their_gradient_says(scale):
    x = array(16, 16)
    linen = mpjax.linen.with_policy(Float8(), "bf16-mixed")
    model = nnx.bridge.ToNNX(linen, rngs=nnx.Rngs(0)).lazy_init(x)
    overwritten = nnx.variable_type_from_name("_overwrite_with_gradient")
    both = nnx.DiffState(0, (nnx.Param, overwritten))
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.adam(1e-2))
    tx = mpjax.with_loss_scale(tx, mpjax.DynamicLossScale(scale, growth_interval=1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        chosen = mpjax.current_loss_scale(optimizer)
        differentiate = mpjax.nnx.grad(mean_square, argnums=both, loss_scale=chosen)
        with mpjax.nnx.undo_skipped(optimizer, model):
            grads = differentiate(model, x)
            optimizer.update(model, grads)
            nnx.update(model, nnx.state(grads, overwritten))

    for _ in range(2):
        used = float(mpjax.current_loss_scale(optimizer).loss_scale)
        scaled = nnx.grad(lambda model, x, s=used: mean_square(model, x) * s, argnums=both)
        want = nnx.state(nnx.jit(scaled)(model, x), overwritten)
        unscaled = nnx.jit(mpjax.nnx.grad(mean_square, argnums=both, loss_scale=used))(model, x)
        assert_bitwise_equal(nnx.as_pure(nnx.state(unscaled, overwritten)), nnx.as_pure(want))
        step(model, optimizer, x)
        assert_bitwise_equal(nnx.as_pure(nnx.state(model, overwritten)), nnx.as_pure(want))
    before = values(model)
    step(model, optimizer, x.at[0, 0].set(jnp.nan))
    assert_bitwise_equal(values(model), before)
