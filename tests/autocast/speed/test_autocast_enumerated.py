"""An index that counts the rows is left out: what is picked has a choice for a derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _differential import equations
from _samples import integers, normal
from _small import together, total
from jax import lax

from mpjax import autocast

X = normal(0, 8, 4, 6)
WIDE = X.reshape(32, 6)
LABELS = integers(1, 6, 32)
OF_PLACES = LABELS.reshape(8, 4)


def rows():
    return jnp.arange(8)[:, None]


COUNTED = {
    "a label of each row": lambda x: x.reshape(32, 6)[jnp.arange(32), LABELS],
    "of bytes": lambda x: x.reshape(32, 6)[jnp.arange(32, dtype=jnp.uint8), LABELS],
    "counted from the end": lambda x: x.reshape(32, 6)[jnp.arange(32), LABELS - 6],
    "of each column": lambda x: x.reshape(32, 6)[LABELS[:6] * 5, jnp.arange(6)],
    "of each place": lambda x: x[rows(), jnp.arange(4), OF_PLACES],
    "of each place, columns first": lambda x: x[rows().T, jnp.arange(4)[:, None], OF_PLACES.T],
    "of a middle axis": lambda x: x[rows(), OF_PLACES[:, :1] % 4, jnp.arange(6)],
    "clipped": lambda x: x.reshape(32, 6).at[jnp.arange(32), LABELS + 3].get(mode="clip"),
    "filled": lambda x: (
        x.reshape(32, 6).at[jnp.arange(32), LABELS + 3].get(mode="fill", fill_value=-1.0)
    ),
}
OTHERS = {
    "counted from 1": lambda x: x.reshape(32, 6)[jnp.arange(32) + 1, LABELS],
    "of the first row": lambda x: x.reshape(32, 6)[jnp.arange(1), LABELS],
    "of some other rows": lambda x: x.reshape(32, 6)[
        lax.select(LABELS > 2, jnp.full(32, 3), jnp.arange(32)), LABELS
    ],
    "counted down": lambda x: x.reshape(32, 6)[jnp.arange(32)[::-1], LABELS],
    "of the first rows": lambda x: x.reshape(32, 6)[jnp.arange(16), LABELS[:16]],
    "counted with bytes that end": lambda x: jnp.tile(x.reshape(32, 6), (10, 1))[
        jnp.arange(320).astype(jnp.uint8), jnp.tile(LABELS, 10)
    ],
    "all in two columns": lambda x: x.reshape(32, 6)[jnp.arange(6), jnp.arange(6)],
    "a row for all": lambda x: x.reshape(32, 6)[jnp.arange(32)[:, None], LABELS[None]],
    "of one place twice": lambda x: x[jnp.arange(8), jnp.arange(8) % 4, LABELS[:8]],
    "rows": lambda x: x[jnp.arange(8), OF_PLACES[:, 0] % 4],
}


def scatters(fun):
    found = equations(jax.make_jaxpr(jax.grad(fun))(X).jaxpr)
    return [eqn for eqn in found if "scatter" in str(eqn.primitive)]


def test_what_is_picked_and_its_gradient_are_those_of_the_program():
    def both(fun):
        low = jax.value_and_grad(autocast(fun, "bf16-mixed"))
        of_examples = lambda x: jax.tree.map(lambda y: y[0], jax.vmap(low)(x[None]))  # noqa: E731
        return lambda x: (low(x), of_examples(x), jax.value_and_grad(fun)(x))

    found = together({name: both(total(fun)) for name, fun in (COUNTED | OTHERS).items()}, X)
    for name, (got, mapped, want) in found.items():
        for a, b, c in zip(*map(jax.tree.leaves, (got, mapped, want)), strict=True):
            np.testing.assert_allclose(a, c, rtol=2**-19, err_msg=name)
            np.testing.assert_allclose(b, c, rtol=2**-19, err_msg=name)


@pytest.mark.parametrize("name", COUNTED)
def test_an_index_that_counts_the_rows_leaves_no_scatter(name):
    fun = total(COUNTED[name])
    assert scatters(fun)
    assert not scatters(autocast(fun, "bf16-mixed"))


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_index_is_gathered_as_before(name):
    fun = total(OTHERS[name])
    assert len(scatters(autocast(fun, "bf16-mixed"))) == len(scatters(fun))


def test_a_loss_is_a_choice_in_the_kernel_of_its_softmax():
    def loss(w, x, y):
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.mean(logits[jnp.arange(x.shape[0]), y])

    def alike(w, x, y):
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], 1))

    args = normal(2, 6, 64), WIDE, LABELS
    got, want = (jax.grad(autocast(f, "bf16-mixed"))(*args) for f in (loss, alike))
    np.testing.assert_array_equal(got, want)
