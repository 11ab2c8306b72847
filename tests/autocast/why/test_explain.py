"""The table that explains autocast's decisions."""

import io
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.networks import NETWORKS
from benchmarks.networks._transformer import TransformerLM
from mpjax import PolicyMap, autocast, explain, full_precision

ARRAY = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def attention(params, x):
    with jax.named_scope("attn"):
        q, k = x @ params["q"], x @ params["k"]
        weights = jax.nn.softmax(q @ k.T)
    with jax.named_scope("head"):
        return jax.jit(lambda y: jnp.tanh(y @ params["o"]))(weights @ x)


@pytest.fixture
def table():
    params = {name: jnp.ones((4, 4)) for name in "qko"}
    return explain(attention, "bf16-mixed")(params, jnp.ones((3, 4)))


def row(fun, operation, *args, policy="bf16-mixed", **options):
    """The one row of an operation."""
    rows = explain(fun, policy, **options)(*(args or (ARRAY, ARRAY))).rows
    (found,) = [r for r in rows if r.operation == operation]
    return found


def test_rows_say_what_runs_in_which_dtype_and_why_by_module(table):
    found = {(r.module, r.operation): (r.count, r.dtype) for r in table.rows}
    assert found["attn", "dot_general"] == (3, "bf16")
    assert found["attn", "exp"] == (1, "f32")
    assert found["head", "dot_general"] == (2, "bf16")
    reasons = {r.operation: r.reason for r in table.rows}
    assert reasons["exp"].startswith("range")
    assert "float32 accumulation" in reasons["dot_general"]
    assert all("test_explain.py" in r.where for r in table.rows)
    modules = [r.module for r in table.rows]
    assert modules == sorted(modules, key=modules.index)


def test_casts_are_counted_with_their_bytes(table):
    casts = {(c.source, c.target): c for c in table.casts}
    assert casts["f32", "bf16"].count >= 4  # x, q, k and o once each
    assert casts["f32", "bf16"].bytes >= 2 * (3 * 4 + 3 * 16)


# -- why is this float32? ------------------------------------------------------------------------


@jax.jit
def twice_multiplied(w, x):
    return jnp.tanh(x @ w @ w)


@jax.jit
def ordered(y):
    return y.argmax(), jnp.sort(y)


@jax.jit
def act(x):
    return 2 * jnp.tanh(x)


def accumulated(w, x):
    return jax.lax.scan(lambda sum_, row: (sum_ + jnp.max(row @ w), None), jnp.zeros(()), x)[0]


def until_three(w, x):
    start = (jnp.zeros(()), x)
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), start)


def in_a_region(w, x):
    with full_precision():
        return jnp.tanh(x @ w)


def in_a_head(w, x):
    with jax.named_scope("head"):
        return jnp.tanh(x @ w) @ w


def activated(w, x):
    return jnp.tanh(x @ w) @ w


HEAD = PolicyMap("bf16-mixed", {"head*": "float32"})
FULL = {"rules": {"tanh": "full"}}
BY_RULE = 'rules={"tanh": "full"}: computed in float32'
REGION, BY_PATH = "as written: full_precision()", "its policy in the PolicyMap"
INPUTS = "parameters and inputs only: nothing low went in"
# A function, one of its operations, and what its row says: dtype, cause, and how the reason begins.
WHY = [
    (lambda w, x: 1 + jnp.sum(x @ w, 1, keepdims=True), "add", {}, "f32", "reduce_sum", "a sum"),
    (
        lambda w, x: 2 * twice_multiplied(w, x),
        *("mul", {}, "f32", "tanh", "an output: rounding it would gain nothing"),
    ),
    (lambda w, x: ordered(jnp.cumsum(x @ w, 0))[1] / 2, "div", {}, "f32", "cumsum", ""),
    (accumulated, "add", {}, "f32", "scan", "a recurrent state: it reaches itself"),
    (until_three, "add", {}, "f32", "while", ""),
    (until_three, "dot_general", {}, "bf16", "", ""),
    (
        lambda w, x: jnp.tanh(jnp.maximum(x @ w, -1e9)) @ w,
        *("max", {"policy": "16-mixed"}, "f32", "", "its constant -1e+09 is no f16 number"),
    ),
    (
        lambda w, x: jnp.tanh(jnp.flip((x @ w) ** 2) / 100) @ w,
        *("integer_pow", {"policy": "16-mixed"}, "f32", "", "scaled later, as it is too large"),
    ),
    (
        lambda w, x: 2 * (x @ w),
        *("mul", {}, "f32", "dot_general", "a product's float32 sums, which no product reads"),
    ),
    (
        lambda w, x: jnp.log(1.5 + x @ w) @ w,
        *("add", {}, "f32", "dot_general", "its distance to a constant is read by log"),
    ),
    (
        lambda w, x: jnp.cumsum(1.5 + x @ w, 0) @ w,
        *("add", {}, "f32", "dot_general", "read by cumsum"),
    ),
    (
        lambda w, x: jnp.log(1.5 + jnp.tile(x, (64, 2)) @ jnp.tile(w, (2, 1))),
        "dot_general",
        {},
        "bf16",
        "",
        "matrix product",
    ),
    (
        lambda w, x: jnp.cumsum(x > 0, 0).astype(jnp.float32) @ w,
        *("dot_general", {}, "f32", "", "a constant whose values are not known"),
    ),
    (
        lambda w, x: jnp.exp(w) + x @ w,
        *("exp", {"rules": {"exp": "follow"}}, "f32", "", 'rules={"exp": "follow"}'),
    ),
    (
        lambda w, x: jax.nn.softmax(x @ w) @ w,
        *("exp", {"rules": {"exp": "follow"}}, "f32", "", "fused: float32 between low values"),
    ),
    (in_a_region, "tanh", {}, "f32", "", REGION),
    (in_a_region, "dot_general", {}, "f32", "", REGION),
    (in_a_head, "tanh", {"policy": HEAD}, "f32", "", BY_PATH),
    (in_a_head, "dot_general", {"policy": HEAD}, "f32", "", BY_PATH),
    (activated, "tanh", {}, "bf16", "", "computed in float32, rounded once where it is stored"),
    (lambda w, x: ((x @ w) * (w @ w)) @ w, "mul", {}, "bf16", "", "on low values: one rounding"),
    (activated, "tanh", FULL, "bf16", "", BY_RULE),
    (lambda w, x: act(x @ w) @ w, "act", FULL, "bf16", "", BY_RULE),
    (
        lambda w, x: jnp.tanh(x @ w + x) @ w,
        *("add", {"rules": "widest"}, "f32", "", 'rules="widest": a float32 operand wins'),
    ),
    (lambda w, x: (x * w) @ w, "mul", {}, "f32", "", INPUTS),
    # An update is no decision of its own.
    (lambda w, x: w.at[0].set(x[0]) @ x, "scatter", {}, "f32", "", INPUTS),
    (lambda w, x: jax.nn.relu(x @ w) @ w, "relu", {}, "bf16", "", "on low values: exact"),
    (lambda w, x: jnp.maximum(x @ w, w @ x) @ w, "max", {}, "bf16", "", "on low values: exact"),
    (
        lambda w, x: jax.nn.silu(x @ w) @ w,
        *("silu", {}, "bf16", "", "computed in float32, rounded once"),
    ),
]


@pytest.mark.parametrize(("fun", "operation", "options", "dtype", "cause", "said"), WHY)
def test_a_row_says_why(fun, operation, options, dtype, cause, said):
    found = row(fun, operation, **options)
    assert (found.dtype, found.cause) == (dtype, cause)
    assert found.reason.startswith(said)


def test_a_cause_is_found_in_another_module():
    def fun(w, x):
        with jax.named_scope("norm"):
            y = jnp.sum(x @ w, axis=1)
        with jax.named_scope("scale"):
            return y * 2

    found = row(fun, "mul")
    assert (found.cause, found.cause_module) == ("reduce_sum", "norm")
    assert "after reduce_sum of norm" in str(explain(fun, "bf16-mixed")(ARRAY, ARRAY))


@pytest.mark.parametrize(
    "inside",
    [jax.jit, jax.checkpoint, lambda f: lambda y: jax.lax.cond(y[0] > 0, f, f, y)],
    ids=["jit", "remat", "cond"],
)
def test_a_cause_passes_into_calls_and_out_of_them(inside):
    def body(y):
        return jnp.sin(y[:, None] * jnp.ones((4, 4)) @ jnp.ones((4, 4))).sum(0) + y

    found = row(lambda w, x: inside(body)(jnp.cumsum(x @ w, 0)[0]) / 2, "div")
    assert found.dtype == "f32"
    assert found.cause in ("cumsum", "reduce_sum")


def test_an_inner_autocast_is_shown_with_its_own_dtypes():
    inner = autocast(lambda w, x: jnp.tanh(x @ w) @ w, "bf16-mixed")
    assert row(inner, "dot_general", policy="16-mixed").dtype == "bf16"
    assert "an inner autocast" in str(explain(inner, "16-mixed")(ARRAY, ARRAY))


AROUND_A_PRODUCT = {
    "jit": lambda fun: jax.jit(fun),
    "checkpoint": lambda fun: jax.checkpoint(fun),
    "scan": lambda fun: lambda x, w: jax.lax.scan(lambda h, _: (fun(h, w), None), x, None, 2)[0],
    "cond": lambda fun: lambda x, w: jax.lax.cond(x[0, 0] > 0, fun, lambda x, w: x, x, w),
    "jit in a scan": lambda fun: (
        lambda x, w: jax.lax.scan(lambda h, _: (jax.jit(fun)(h, w), None), x, None, 2)[0]
    ),
}


@pytest.mark.parametrize("around", AROUND_A_PRODUCT)
@pytest.mark.parametrize(
    ("decorate", "policy", "dtype", "said"),
    [
        (lambda fun: fun, "32-true", "f32", "float32 was asked for here"),
        (full_precision(), "bf16-mixed", "f32", "as written"),
        (autocast("16-mixed"), "bf16-mixed", "f16", "as written"),
    ],
    ids=["32-true", "full_precision", "autocast"],
)
def test_products_inside_a_call_that_stays_as_it_is_have_rows(
    around, decorate, policy, dtype, said
):
    def inside(x, w):
        with jax.named_scope("inner"):
            return jnp.tanh(x @ w)

    fun = AROUND_A_PRODUCT[around](decorate(inside))
    table = explain(lambda x, w: fun(x, w).sum(), policy)(ARRAY, ARRAY)
    (product,) = [row for row in table.rows if row.operation == "dot_general"]
    assert (product.dtype, product.module) == (dtype, "inner")
    assert product.reason.startswith(said)
    assert f"products: 1 {dtype}" in str(table)
    assert "holds a sum" not in str(table)


def test_what_its_author_has_cast_is_shown_as_written():
    def fun(x, w):
        return (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)

    table = explain(fun, "bf16-mixed")(jnp.ones((2, 4)), jnp.ones((4, 3)))
    assert [(row.operation, row.dtype) for row in table.rows] == [("dot_general", "f16")]
    assert table.rows[0].reason.startswith("as written")
    assert "products: 1 f16" in str(table)


def test_a_value_between_two_low_ones_is_float32_and_not_stored():
    def fun(w, x):
        return jnp.tanh(3 * (x @ w)) @ w

    assert row(fun, "mul").dtype == "f32"
    assert "not stored" in row(fun, "mul").reason
    assert row(fun, "tanh").dtype == "bf16"
    assert "1 fused" in str(explain(fun, "bf16-mixed")(ARRAY, ARRAY))


# -- one screen ----------------------------------------------------------------------------------


def transformer_table(layers):
    model = TransformerLM(vocab=64, width=32, heads=2, layers=layers, dtype=jnp.float32)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return explain(model.apply, "bf16-mixed")(variables, tokens)


def test_a_transformer_fits_a_screen_whatever_its_depth():
    shallow, deep = (str(transformer_table(layers)).splitlines() for layers in (4, 12))
    assert len(deep) == len(shallow) <= 50
    assert max(map(len, deep)) <= 120


def test_a_long_reason_takes_two_lines_of_its_column():
    def fun(w, x):
        with jax.named_scope("a_scope_whose_name_is_longer_than_a_column_can_be"):
            y = jnp.sum(x @ w, axis=1)
        with jax.named_scope("scale"):
            return y * 2

    text = str(explain(fun, "bf16-mixed")(ARRAY, ARRAY))
    assert max(map(len, text.splitlines())) <= 120
    (column,) = {line.index("why") for line in text.splitlines() if line.endswith("where")}
    reasons = "".join(line[column : column + 62].rstrip() for line in text.splitlines())
    assert "after reduce_sum of" in reasons
    assert "a_scope_whose_name_is_longer_than_a_column_can_be" in reasons
    assert row(fun, "mul").reason.startswith("a sum")


def test_numbered_layers_share_lines_and_counts_and_rows_keep_them_apart():
    table = transformer_table(4)
    text = str(table).splitlines()
    line = text[text.index("TransformerLM/block_*/{up, down}  (8 modules)") + 1]
    assert line.split()[:2] == ["dot_general", "×8"]
    products = sum(r.count for r in table.rows if r.operation == "dot_general")
    assert f"products: {products} bf16" in str(table)
    paths = {r.module for r in table.rows}
    assert {f"TransformerLM/block_{i}/{name}" for i in range(4) for name in ("up", "down")} <= paths


SLOW = {"resnet50": [pytest.mark.slow]}  # half a minute of tracing


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW.get(name, [])) for name in sorted(NETWORKS)]
)
def test_every_benchmarked_network_is_explained(name):
    network = NETWORKS[name]("tiny")
    table = explain(network.loss, "16-mixed")(network.params, network.batch)
    products = ("dot_general", "conv_general_dilated")
    assert {r.dtype for r in table.rows if r.operation in products} == {"f16"}
    assert max(map(len, str(table).splitlines())) <= 140
    assert all(r.reason for r in table.rows)


def test_plain_text_has_no_rules_of_dashes(table):
    text = str(table)
    assert text.startswith("attention under ")
    assert "--" not in text
    assert text.splitlines()[-1].startswith("casts: ")
    assert len(text.splitlines()) < 40


def test_to_dict_is_json(table):
    data = json.loads(json.dumps(table.to_dict()))
    assert data["rows"][0]["operation"] == table.rows[0].operation
    assert set(data) == {"function", "policy", "rows", "casts"}
    assert set(data["rows"][0]) >= {"module", "operation", "count", "dtype", "reason", "where"}
    assert len(data["rows"]) == len(table.rows)


def test_rich_prints_it(table):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    printed = console.file.getvalue()
    assert "dot_general" in printed
    assert "products: 5 bf16" in printed


# -- arguments -----------------------------------------------------------------------------------


def test_shapes_stand_for_arrays():
    def fun(w, x, *, double):
        return jnp.sum(x @ w) * (2 if double else 1)

    spec = explain(fun, "bf16-mixed")(ARRAY, ARRAY, double=True)
    given = explain(fun, "bf16-mixed")(jnp.ones((4, 4)), jnp.ones((4, 4)), double=True)
    assert spec.to_dict() == given.to_dict()


def test_a_float32_policy_explains_that_nothing_is_low():
    table = explain(lambda x: x @ x, "float32")(jnp.ones((2, 2)))
    assert {r.dtype for r in table.rows} == {"f32"}
    assert table.casts == ()
    assert "casts: none" in str(table)


def test_without_arguments_it_says_that_it_has_to_be_called():
    def loss_fn(w):
        return jnp.sum(w**2)

    shown = repr(explain(loss_fn, "bf16-mixed"))
    assert "call it with the arguments of loss_fn" in shown
    assert "print(explain(loss_fn, policy)(params, batch))" in shown


def test_an_unknown_policy_is_refused_as_by_autocast():
    with pytest.raises(ValueError, match=r"unknown policy 'bf16_mxied'"):
        explain(lambda x: x, "bf16_mxied")(jnp.ones(2))


def test_what_a_loop_keeps_is_named_with_its_dtype():
    def fun(w, x):
        def step(carry, weights):
            position, hidden, of_zeros, stream = carry
            hidden = jnp.tanh(hidden @ w)
            of_zeros = jnp.tanh(of_zeros @ w + hidden)
            stream = stream + jnp.tanh(jax.nn.standardize(stream) @ weights) @ weights
            return (position + 1e-3 * hidden, hidden, of_zeros, stream), None

        start = (x, x, jnp.zeros_like(x), x @ w)
        return jax.lax.scan(step, start, jnp.stack([w, w, w, w]))[0]

    rows = explain(fun, "bf16-mixed")(jnp.ones((8, 8)), jnp.ones((2, 8))).rows
    carries = [(r.operation, r.dtype, r.reason) for r in rows if "carry" in r.operation]
    assert carries == [
        (
            "scan carry 0 [2,8]",
            "f32",
            "a recurrent state: it reaches itself by sums, not by a product",
        ),
        (
            "scan carry 1 [2,8]",
            "bf16",
            "made anew by a product in each turn",
        ),
        ("scan carry 2 [2,8]", "f32", "carried in float32: it starts as a constant"),
        (
            "scan carry 3 [2,8]",
            "bf16",
            "a residual stream: rounded as in layers without a loop",
        ),
    ]


def test_a_rounding_that_the_author_wrote_and_a_reader_cannot_bear_is_said():
    def loss(w, x):
        p = jax.nn.sigmoid(x @ w).astype(jnp.bfloat16)
        return -jnp.mean(jnp.log1p(-p.astype(jnp.float32)))

    table = explain(loss, "bf16-mixed")(ARRAY, ARRAY)
    (warning,) = table.warnings()
    assert warning.startswith("test_explain.py:"), warning
    assert "its distance to a constant is read by log1p, test_explain.py:" in warning
    assert "wrong under any policy" in warning
    assert warning in str(table)


def test_a_function_that_is_low_throughout_is_told_once_where_it_rounds():
    def loss(w, x):
        return -jnp.mean(jnp.log1p(-jax.nn.sigmoid(x @ w)))

    low = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    assert len(explain(loss, "32-true")(low, low).warnings()) == 1
    assert explain(loss, "bf16-mixed")(ARRAY, ARRAY).warnings() == []


def test_a_rounding_that_the_author_wrote_and_a_reader_can_bear_is_not_warned_of():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w).astype(jnp.bfloat16).astype(jnp.float32) ** 2)

    assert explain(loss, "bf16-mixed")(ARRAY, ARRAY).warnings() == []
