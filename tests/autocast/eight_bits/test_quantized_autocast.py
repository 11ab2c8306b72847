"""autocast under a quantised policy: which products are in 8 bits, under which transformations."""

import functools
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _differential import equations
from _hinted import hints
from _samples import normal
from _small import distance as error
from flax import nnx

import mpjax
import mpjax.linen

FLOAT8 = "float8_from_mixed_bfloat16"
INT8 = "int8_from_mixed_bfloat16"
WIDTH, WORDS = 64, 96


def block(weights, h):
    n = jax.nn.standardize(h) * weights["scale"]
    q, k, v = (n @ weights[name] for name in ("query", "key", "value"))
    h = h + jax.nn.softmax(q @ k.T / 8) @ v @ weights["out"]
    return h + jax.nn.gelu(h @ weights["up"]) @ weights["down"]


def language_model(params, ids):
    h = params["embed"][ids]
    for i, weights in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{i}"):
            h = block(weights, h)
    with jax.named_scope("head"):
        logits = h @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1))


def block_weights(seed):
    keys = iter(range(seed, seed + 9))
    square = {
        name: normal(next(keys), WIDTH, WIDTH) / 8 for name in ("query", "key", "value", "out")
    }
    up, down = normal(next(keys), WIDTH, 128) / 8, normal(next(keys), 128, WIDTH) / 11
    return {"scale": jnp.ones(WIDTH), **square, "up": up, "down": down}


PARAMS = {
    "embed": normal(1, WORDS, WIDTH),
    "head": normal(2, WIDTH, WORDS) / 8,
    "blocks": [block_weights(10), block_weights(30)],
}
IDS = jnp.arange(32) * 7 % WORDS


def products(fun, policy, *args, **options):
    """Returns the dtype and the reason of each product, in order."""
    rows = mpjax.explain(fun, policy, **options)(*args).rows
    return [
        (r.dtype, r.reason) for r in rows if r.operation == "dot_general" for _ in range(r.count)
    ]


def dtypes(fun, policy, *args, **options):
    return [dtype for dtype, _ in products(fun, policy, *args, **options)]


def dots(fun, *args):
    """Returns the dtypes of operands and results of the products of a program."""
    eqns = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    made = [(*e.invars, *e.outvars) for e in eqns if e.primitive.name == "dot_general"]
    return [tuple(v.aval.dtype.name for v in variables) for variables in made]


def three(params, x):
    """Three layers: the first and the last stay in 16 bits."""
    x = jax.nn.relu(x @ params["first"])
    x = jax.nn.relu(x @ params["middle"])
    return jnp.mean((x @ params["last"]) ** 2)


THREE = {name: normal(i, WIDTH, WIDTH) / 8 for i, name in enumerate(("first", "middle", "last"))}
X = normal(7, 32, WIDTH)


# -- which products ------------------------------------------------------------------------------


def test_weights_products_are_in_8_bits_but_for_the_head_and_attention():
    with hints.without("attended"):  # in one kernel, its products are one operation
        found = products(language_model, FLOAT8, PARAMS, IDS)
    by_reason = {}
    for dtype, reason in found:
        by_reason.setdefault((dtype, reason.split(":")[0]), []).append(reason)
    assert {key: len(reasons) for key, reasons in by_reason.items()} == {
        ("f8_e4m3fn", "Float8CurrentScaling, one scale each"): 12,
        ("bf16", "not in 8 bits"): 5,
    }
    kept = sorted(reason for dtype, reason in found if dtype == "bf16")
    assert kept == [
        *["not in 8 bits: neither operand is a parameter"] * 4,
        "not in 8 bits: the last layer",
    ]
    assert ("f8_e4m3fn", "Float8CurrentScaling, one scale each: blocks/*/up") in found


def test_reason_names_the_scales_and_what_is_left():
    (said,) = {reason for dtype, reason in products(three, INT8, THREE, X) if dtype == "i8"}
    assert said == "Int8CurrentScaling, a scale a row, not wgrad: middle"


def test_first_and_last_layer_stay_16_bit_unless_a_rule_names_them():
    assert dtypes(three, FLOAT8, THREE, X) == ["bf16", "f8_e4m3fn", "bf16"]
    policies = mpjax.PolicyMap(FLOAT8, {"last": INT8, "middle": "bf16-mixed"})
    assert dtypes(three, policies, THREE, X) == ["bf16", "bf16", "i8"]


def test_rule_may_name_the_module_of_a_product_or_its_weight():
    by_module = mpjax.PolicyMap("bf16-mixed", {"block_1": FLOAT8, "head": INT8})
    found = dtypes(language_model, by_module, PARAMS, IDS)
    assert sorted(found) == [*["bf16"] * 8, *["f8_e4m3fn"] * 8, "i8"] or found.count("i8") == 1
    by_weight = mpjax.PolicyMap("bf16-mixed", {"blocks/*/up": FLOAT8})
    found = products(language_model, by_weight, PARAMS, IDS)
    assert [reason.split(": ")[1] for dtype, reason in found if dtype == "f8_e4m3fn"] == [
        "blocks/*/up"
    ] * 2


def test_table_that_rows_are_taken_from_stays_16_bit_where_it_is_a_head_too():
    def tied(params, ids):
        h = params["embed"][ids]
        h = jax.nn.relu(h @ params["embed"].T) @ params["back"]
        return jnp.sum(h @ params["last"])

    params = {"embed": PARAMS["embed"], "back": normal(3, WORDS, WIDTH), "last": THREE["last"]}
    found = products(tied, FLOAT8, params, IDS)
    assert [dtype for dtype, _ in found] == ["bf16", "f8_e4m3fn", "bf16"]
    assert found[0][1] == "not in 8 bits: embed is a table that rows are taken from"


@pytest.mark.filterwarnings("ignore:autocast. .* quantises no product")
@pytest.mark.parametrize(
    ("sizes", "why"),
    [((64, 72), "small or odd: 64 x 72"), ((32, 64), "small or odd: 32 x 64"), ((64, 64), "")],
)
def test_small_and_odd_products_stay_16_bit(sizes, why):
    params = {
        "first": normal(0, 8, sizes[0]),
        "middle": normal(1, *sizes),
        "last": normal(2, sizes[1], 8),
    }
    (_, (dtype, reason), _) = products(three, FLOAT8, params, normal(3, 32, 8))
    assert (dtype == "f8_e4m3fn") == (not why)
    assert why in reason


@pytest.mark.filterwarnings("ignore:autocast. .* quantises no product")
def test_blocks_that_do_not_divide_leave_a_product_16_bit():
    params = {"first": normal(0, 8, 80), "middle": normal(1, 80, 64), "last": normal(2, 64, 8)}
    (_, (dtype, reason), _) = products(three, "q=MXFP8BlockScaling", params, normal(3, 32, 8))
    assert (dtype, reason) == (
        "bf16",
        "not in 8 bits: it adds up 80, which blocks of 32 do not divide",
    )


ODD = {"first": normal(0, 64, 80), "middle": normal(1, 80, 64), "last": THREE["last"]}


@pytest.mark.parametrize("rule", ["middle", "m*", "re:mid.*"])
@pytest.mark.parametrize("take", [mpjax.autocast, mpjax.explain])
def test_blocks_that_do_not_divide_what_a_rule_names_are_refused(rule, take):
    policies = mpjax.PolicyMap("bf16-mixed", {rule: "q=MXFP8BlockScaling"})
    said = rf"rule '{rule}'.*product of middle.*\n.*adds up 80, which blocks of 32 do not divide"
    with pytest.raises(ValueError, match=said.replace("m*'", r"m\*'").replace("d.*'", r"d\.\*'")):
        take(three, policies)(ODD, X)


@pytest.mark.parametrize("rule", ["*", "re:.*"])
def test_rule_for_everything_names_no_layer_and_leaves_what_blocks_do_not_divide(rule):
    policies = mpjax.PolicyMap("bf16-mixed", {rule: "q=MXFP8BlockScaling"})
    assert dtypes(three, policies, ODD, X) == ["f8_e4m3fn", "bf16", "f8_e4m3fn"]


def test_weight_may_be_moved_normalised_and_cast_on_its_way():
    def fun(params, x):
        middle = params["middle"].reshape(WIDTH, 4, 16).transpose(2, 0, 1)
        middle = middle / jnp.linalg.norm(middle) * 3
        x = jnp.einsum("btd,kdh->bthk", (x @ params["first"])[None], middle)
        return jnp.sum(x.reshape(32, WIDTH) @ params["last"])

    assert dtypes(fun, FLOAT8, THREE, X).count("f8_e4m3fn") == 1


def test_parameters_are_the_first_argument_or_those_that_are_named():
    swapped = lambda x, *, weights: three(weights, x)  # noqa: E731
    named = {"params": "weights"}
    call = lambda policy, **options: mpjax.explain(swapped, policy, **options)(X, weights=THREE)  # noqa: E731
    assert [r.dtype for r in call(FLOAT8, **named).rows if r.operation == "dot_general"] == [
        "bf16",
        "f8_e4m3fn",
        "bf16",
    ]
    assert dtypes(lambda x, p: three(p, x), FLOAT8, X, THREE, params=1)[1] == "f8_e4m3fn"
    with pytest.warns(
        mpjax.PolicyWarning, match=r"quantises no product(.*\n)*.*neither operand is a parameter"
    ):
        mpjax.autocast(lambda x, p: three(p, x), FLOAT8)(X, THREE)


@pytest.mark.parametrize(
    ("params", "error", "said"),
    [
        (2, ValueError, "there is no argument 2: the call has 2"),
        ("weights", ValueError, r"no argument 'weights'.\n  The call has: 'params', 'x'"),
        (1.5, TypeError, "the position or the name of an argument"),
        ((0, None), TypeError, "got None"),
    ],
)
def test_parameters_that_are_no_argument_are_refused(params, error, said):
    with pytest.raises(error, match=said):
        mpjax.autocast(three, FLOAT8, params=params)(THREE, X)


@pytest.mark.parametrize("mode", ["int8", "float8"])
@pytest.mark.parametrize("base", ["bfloat16", "float16"])
def test_policy_that_quantises_nothing_is_a_warning_with_the_products_there_are(mode, base):
    policy = f"{mode}_from_mixed_{base}"
    said = r"quantises no product of this function.\n.*first layer(.|\n)*Type PolicyMap\('"
    said += "bf16-mixed" if base == "bfloat16" else "16-mixed"
    with pytest.warns(mpjax.PolicyWarning, match=rf"{said}', {{'mlp\*': '{policy}'}}\)"):
        mpjax.autocast(lambda w, x: jnp.sum(x @ w), policy)(THREE["first"], X)


def test_explain_says_which_rule_leaves_a_product_in_16_bits():
    def reasons(policy):
        rows = mpjax.explain(three, policy)(THREE, X).rows
        return [r.reason for r in rows if r.operation == "dot_general"]

    left = mpjax.PolicyMap("bf16-mixed", {"middle": "bf16-mixed", "*": FLOAT8})
    assert "not in 8 bits: rule 'middle'" in reasons(left)
    others = mpjax.PolicyMap("bf16-mixed", {"middle": FLOAT8})
    assert "not in 8 bits: no rule asks for it" in reasons(others)


def test_products_that_stay_for_one_reason_on_one_line_are_one_row_of_that_warning():
    def looped(params, x):
        for w in params:
            x = x @ w
        return jnp.sum(x)

    small = [jnp.ones((16, 16))] * 12
    with pytest.warns(mpjax.PolicyWarning, match=r"small or odd: 16 x 16 \(×10\)\n") as found:
        mpjax.autocast(looped, FLOAT8)(small, jnp.ones((4, 16)))
    assert str(found[0].message).count("not in 8 bits") == 3  # first, last and these


def test_region_in_full_precision_is_left_alone():
    def fun(params, x):
        x = x @ params["first"]
        with mpjax.full_precision():
            x = x @ params["middle"]
        return jnp.sum(x @ params["last"])

    with pytest.warns(mpjax.PolicyWarning, match="quantises no product"):
        found = dots(mpjax.autocast(fun, FLOAT8), THREE, X)
    assert ("float32",) * 3 in found


@pytest.mark.filterwarnings("ignore:autocast. .* quantises no product")
def test_everything_is_a_rule_for_an_argument_that_is_a_parameter_itself():
    def fun(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w.T)

    w = jnp.ones((64, 64))
    everywhere = mpjax.PolicyMap("bf16-mixed", {"*": "float8_from_mixed_bfloat16"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "f8_e4m3fn" in str(jax.make_jaxpr(mpjax.autocast(fun, everywhere))(w, w))
    named = mpjax.PolicyMap("bf16-mixed", {"w": "float8_from_mixed_bfloat16"})
    with pytest.warns(mpjax.PolicyWarning, match="names no modules"):
        mpjax.autocast(fun, named)(w, w)


def test_float32_base_keeps_everything_else_in_float32():
    found = dots(mpjax.autocast(three, "int8_from_float32"), THREE, X)
    assert found == [("float32",) * 3, ("int8", "int8", "int32"), ("float32",) * 3]


def test_bfloat16_base_quantises_products_of_bfloat16():
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (THREE, X))
    fun = mpjax.autocast(three, "float8_from_bfloat16")
    assert ("float8_e4m3fn", "float8_e4m3fn", "float32") in dots(fun, params, x)
    grads = jax.grad(fun)(params, x)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
    assert fun(params, x).dtype == jnp.bfloat16


# -- transformations -----------------------------------------------------------------------------


@functools.cache
def exact_gradients():
    return jax.jit(jax.grad(language_model))(PARAMS, IDS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("policy", "bound"), [(FLOAT8, 0.12), (INT8, 0.04)])
def test_both_orders_of_grad_work_and_agree_with_float32(policy, bound):
    inner = jax.jit(jax.grad(mpjax.autocast(language_model, policy)))(PARAMS, IDS)
    outer = jax.jit(mpjax.autocast(jax.grad(language_model), policy))(PARAMS, IDS)
    assert 0.005 < error(inner, exact_gradients()) < bound
    assert 0.005 < error(outer, exact_gradients()) < bound
    assert {g.dtype for g in jax.tree.leaves(inner)} == {jnp.dtype("float32")}


def test_derivative_inside_multiplies_gradients_as_the_recipe_says():
    found = dots(jax.jit(mpjax.autocast(jax.grad(three), FLOAT8)), THREE, X)
    assert ("float8_e5m2", "float8_e4m3fn", "float32") in found
    assert found.count(("float8_e4m3fn", "float8_e4m3fn", "float32")) == 1


def stacked(params, h):
    def body(h, weights):
        return block(weights, h), None

    h, _ = jax.lax.scan(body, jnp.tanh(h @ params["first"]), params["blocks"])
    return jnp.mean((h @ params["last"]) ** 2)


STACKED = {**THREE, "blocks": jax.tree.map(lambda *a: jnp.stack(a), *PARAMS["blocks"])}


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["scan", "remat", "jit"]
)
def test_layers_in_a_loop_are_quantised_inside_it(wrap):
    fun = wrap(stacked)
    found = dots(mpjax.autocast(fun, FLOAT8), STACKED, X)
    assert found.count(("float8_e4m3fn", "float8_e4m3fn", "float32")) == 6


def test_gradients_of_a_checkpointed_loop_agree_with_float32():
    fun = jax.jit(jax.checkpoint(stacked))
    grads = jax.jit(jax.grad(mpjax.autocast(fun, FLOAT8)))(STACKED, X)
    assert error(grads, jax.jit(jax.grad(stacked))(STACKED, X)) < 0.12


def test_branch_and_custom_rule():
    @jax.custom_jvp
    def mine(x, w):
        return x @ w

    mine.defjvp(lambda primals, tangents: (mine(*primals), tangents[0] @ primals[1]))

    def fun(params, x):
        x = x @ params["first"]
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ params["middle"], lambda x: x, x)
        return jnp.sum(mine(x, params["middle"]) @ params["last"])

    found = dots(mpjax.autocast(fun, FLOAT8), THREE, X)
    assert found.count(("float8_e4m3fn", "float8_e4m3fn", "float32")) == 1
    assert jnp.isfinite(jax.grad(mpjax.autocast(fun, FLOAT8))(THREE, X)["first"]).all()


def test_vmap_of_models_keeps_their_scales_apart():
    many = jax.tree.map(lambda a: jnp.stack([a, a * 100, a.at[0, 0].set(jnp.nan)]), THREE)
    fun = jax.jit(mpjax.autocast(three, FLOAT8))
    found = jax.vmap(fun, (0, None))(many, X)
    alone = [fun(jax.tree.map(lambda a, i=i: a[i], many), X) for i in range(2)]
    np.testing.assert_allclose(found[:2], alone, rtol=1e-3)  # the order of bf16's sums
    assert np.isnan(found[2])


@pytest.mark.no_leak_check(
    "JAX's own: jit of shard_map fails under it where an operand is constant"
)
def test_devices_of_a_shard_map_agree_on_the_scale_of_what_they_share():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    sizes = jnp.repeat(jnp.arange(1.0, 9.0), 32)  # another largest value on each
    x = normal(5, 256, WIDTH) * sizes[:, None]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    def sharded(params, x):
        return jax.lax.pmean(mpjax.autocast(three, FLOAT8)(params, x), "data")

    grads = jax.jit(jax.grad(sharded))(THREE, x)
    for leaf in jax.tree.leaves(grads):
        first, *rest = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all((shard == first).all() for shard in rest)
    assert error(grads, jax.grad(three)(THREE, x)) < 0.12


# -- models and training -------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.standard_promotion("adam divides an int32 count into a float")
@pytest.mark.parametrize("policy", [FLOAT8, INT8, "float8_from_mixed_float16", "int8_from_float32"])
def test_train_step_learns_and_skips_what_is_not_finite(policy):
    target = jnp.tanh(X @ normal(20, WIDTH, WIDTH) / 8)

    def loss_fn(params, batch):
        h = jax.nn.relu(batch["x"] @ params["first"])
        h = jax.nn.relu(h @ params["middle"])
        return jnp.mean((h @ params["last"] - batch["y"]) ** 2)

    step = mpjax.make_train_step(loss_fn, optax.adam(3e-3), policy)
    state = step.init(THREE)
    batch = {"x": X, "y": target}
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 3
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, {"x": X.at[3, 4].set(jnp.nan), "y": target})
    assert not metrics["grads_finite"]
    jax.tree.map(np.testing.assert_array_equal, before, state.params)


def test_equinox_module_is_quantised_wherever_it_stands():
    model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(0))

    def second(x, model):
        return jnp.sum(jax.vmap(model)(x))

    assert dtypes(second, FLOAT8, X, model) == ["bf16", "f8_e4m3fn", "bf16"]
    found = dots(lambda x: mpjax.autocast(jax.vmap(model), "float32")(x), X)
    assert len(found) == 3
    rows = mpjax.explain(model, FLOAT8)(X[0]).rows
    assert [r.dtype for r in rows if r.operation == "dot_general"] == ["bf16", "f8_e4m3fn", "bf16"]


def test_nnx_module_is_quantised_and_keeps_its_paths():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    net = Net(nnx.Rngs(0))
    found = products(lambda model, x: jnp.sum(model(x)), FLOAT8, net, X)
    assert [dtype for dtype, _ in found] == ["bf16", "f8_e4m3fn", "bf16"]
    assert found[1][1].endswith(": layers/*/kernel")


def test_modules_say_that_they_multiply_in_the_base_dtype():
    with pytest.warns(mpjax.PolicyWarning, match="products in 8 bits are autocast's"):
        mpjax.linen.with_policy(nn.Dense(8), FLOAT8)


# -- exported ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_program_is_exported_for_every_platform_with_a_batch_that_is_left_open(name):
    def loss(params, x):
        for weights in params.values():
            x = jax.nn.relu(x @ weights)
        return jnp.mean(x**2)

    policy = mpjax.PolicyMap("bf16-mixed", {"*": f"{name}_from_mixed_bfloat16"})
    grad = jax.jit(jax.grad(mpjax.autocast(loss, policy)))
    (batch,) = jax.export.symbolic_shape("batch")
    rows = jax.ShapeDtypeStruct((batch, 16, WIDTH), jnp.float32)
    exported = jax.export.export(grad, platforms=["cpu", "cuda", "tpu"])(THREE, rows)
    x = normal(3, 8, 16, WIDTH)
    found, expected = exported.call(THREE, x), grad(THREE, x)
    for key in THREE:
        np.testing.assert_allclose(found[key], expected[key], rtol=0.05, atol=1e-3)
