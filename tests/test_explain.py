"""The table that explains autocast's decisions."""

import io
import json

import jax
import jax.numpy as jnp
import pytest

from mpjax._autocast import explain


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


def test_rows_say_what_runs_in_which_dtype_and_why(table):
    found = {(r.module, r.operation): (r.count, r.dtype) for r in table.rows}
    assert found["attn", "dot_general"] == (3, "bf16")
    assert found["attn", "exp"] == (1, "f32")
    assert found["head", "dot_general"] == (2, "bf16")
    reasons = {r.operation: r.reason for r in table.rows}
    assert reasons["exp"].startswith("range")
    assert "float32 accumulation" in reasons["dot_general"]
    assert all("test_explain.py" in r.where for r in table.rows)


def test_rows_are_grouped_by_module(table):
    modules = [r.module for r in table.rows]
    assert modules == sorted(modules, key=modules.index)


def test_casts_are_counted_with_their_bytes(table):
    casts = {(c.source, c.target): c for c in table.casts}
    # x, q, k and o once each, and four results of products, the weights among them
    assert casts["f32", "bf16"].count >= 8
    assert casts["f32", "bf16"].bytes >= 2 * (3 * 4 + 3 * 16)


def test_plain_text_has_no_dashes_and_fits_a_screen(table):
    text = str(table)
    assert text.startswith("attention under ")
    assert "--" not in text
    assert text.splitlines()[-1].startswith("casts: ")
    assert len(text.splitlines()) < 40


def test_to_dict_is_json(table):
    data = json.loads(json.dumps(table.to_dict()))
    assert data["rows"][0]["operation"] == table.rows[0].operation
    assert set(data) == {"function", "policy", "rows", "casts"}


def test_rich_prints_it(table):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert "dot_general" in console.file.getvalue()


def test_a_float32_policy_explains_that_nothing_is_low():
    table = explain(lambda x: x @ x, "float32")(jnp.ones((2, 2)))
    assert {r.dtype for r in table.rows} == {"f32"}
    assert table.casts == ()
