"""Tests of names that are taken for misspellings of others."""

import jax
import pytest

import mpjax
from mpjax._base.errors import misspelt, warn

KEYWORDS = ("loss_scale", "loss_fn", "growth_factor", "growth_interval", "accumulate", "unscale")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("loss_scal", "loss_scale"),
        ("lossscale", "loss_scale"),
        ("Loss_Scale", "loss_scale"),
        ("growht_interval", "growth_interval"),
        ("accumlate", "accumulate"),
        ("loss_fun", "loss_fn"),
    ],
)
def test_a_misspelt_name_is_found(word, name):
    assert misspelt(word, KEYWORDS) == [name]


@pytest.mark.parametrize(
    "word",
    [
        *("min_loss_scale", "loss_scale_window", "cur_scale", "loss_id", "growth_tracker"),
        *("scale", "rescale", "accumulate_steps", "set_growth_interval", "", "_"),
    ],
)
def test_a_name_with_another_word_is_no_misspelling(word):
    assert misspelt(word, KEYWORDS) == []


def test_nine_of_ten_slips_of_one_letter_are_found_in_public_names():
    slips = [
        (name, slip)
        for name in mpjax.__all__
        for i in range(1, len(name))
        for slip in (name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:])
    ]
    found = [misspelt(slip, mpjax.__all__) == [name] for name, slip in slips]
    assert sum(found) > 0.9 * len(found)


def _called_by_jax():
    jax.eval_shape(lambda: warn("something"))


def _called_by_us():
    mpjax.value_and_grad(lambda x: (warn("something"), x)[1], loss_scale=None)(1.0)


@pytest.mark.parametrize("call", [lambda: warn("something"), _called_by_jax, _called_by_us])
def test_a_warning_is_shown_at_the_users_line(call):
    with pytest.warns(mpjax.PolicyWarning) as caught:
        call()
    assert [warning.filename for warning in caught] == [__file__]
