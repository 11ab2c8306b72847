"""What a reader sees at a prompt and in a notebook: tables and summaries, never walls of arrays."""

import base64
import html
import html.parser
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
import mpjax.nnx
from mpjax._base import shown as _shown
from mpjax.optim import LossScaleState

PARAMS = {"w": jnp.full((300, 2), 2.0**-6), "b": jnp.zeros(3)}
BATCH = jnp.ones((4, 300))


def loss_fn(params, batch):
    with jax.named_scope("<head>"):
        return jnp.mean((batch @ params["w"]) ** 2)


class Cells(html.parser.HTMLParser):
    """Collects the rows of a table, and every tag that was opened and not closed."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in ("br", "img", "source"):
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.rows[-1].append(self.text)
        self.text = ""

    def handle_data(self, data):
        self.text += data


def small_loss(w, x):
    with jax.named_scope("<layer>"):
        return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)


def reports():
    model = mpjax.nnx.set_policy(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), "bf16-mixed")
    step = jax.jit(lambda state, x: (state - 0.1 * x, x.sum()), donate_argnums=0)
    return {
        "explain": mpjax.explain(loss_fn, "bf16-mixed")(PARAMS, BATCH),
        "tabulate": mpjax.nnx.tabulate(model),
        "pods": mpjax.pods.check(step, (jnp.ones(8), jnp.ones(8)), "cpu:1"),
        "support": mpjax.check_support("bf16-mixed", "cpu-plain"),
        "bytes": mpjax.optim.bytes_per_parameter(optax.adam(1e-3), PARAMS),
        **{name: make() for name, make in NUMERICS.items()},
    }


W, X = jnp.eye(4) / 3, jnp.full((2, 4), 2.0**-7)
NUMERICS = {
    "diagnose": lambda: mpjax.numerics.diagnose(small_loss, "16-mixed")(W * 2.0**120, X),
    "diagnose, healthy": lambda: mpjax.numerics.diagnose(small_loss, "bf16-mixed")(W, X),
    "compare": lambda: mpjax.numerics.compare(small_loss, "bf16-mixed")(W, X),
    "exponents": lambda: mpjax.numerics.exponents(small_loss, "float32")(W, X),
    "suggest": lambda: mpjax.numerics.suggest(small_loss, "bf16-mixed", tolerance=1e-4)(W, X),
    "promotions": lambda: mpjax.numerics.find_promotions(lambda x: x * np.float32(2))(
        jnp.ones(8, jnp.bfloat16)
    ),
}
# What a line at a prompt says of each.
HEADLINES = {
    "explain": r"<Explanation of loss_fn under .*; products: .*; casts: ",
    "tabulate": r"<ModuleTable of .*: 1 modules, 1 in bf16",
    "pods": r"<Report of cpu:1 .*: nothing wrong",
    "support": r"<SupportReport of .* on CPU without bfloat16 units: slow",
    "bytes": r"<BytesPerParameter of bytes a parameter, of 603: 16\.0",
    "diagnose": r"<Report of small_loss .* not finite.*; cause: range",
    "diagnose, healthy": r"<Report of small_loss .* gradients are finite; cause: none",
    "compare": r"<Comparison of small_loss .*: gradients off by .* at most; most .* '<layer>'",
    "exponents": r"<ExponentReport of small_loss .*: float16 would make 0 of .*% of gradients",
    "suggest": r"<Suggestion of small_loss: \d modules in float32 for gradients within ",
    "promotions": r"<Promotions of <lambda>: 1 promotions, 16 bytes more; test_shown\.py:",
}


@pytest.fixture(scope="module")
def shown():
    return reports()


@pytest.fixture(scope="module", params=[*HEADLINES])
def named(request, shown):
    return request.param, shown[request.param]


def test_a_prompt_shows_one_line(named):
    name, report = named
    assert re.match(HEADLINES[name], repr(report)), repr(report)
    assert len(repr(report).splitlines()) == 1
    assert len(repr(report)) < 400
    assert len(str(report).splitlines()) > 1


def test_a_notebook_shows_well_formed_tables_with_the_words_of_print(named):
    _, report = named
    shown = Cells(report._repr_html_())
    assert shown.open == []
    assert len(shown.rows) > 1
    assert "<pre>" not in report._repr_html_()
    for word in ("dot_general", "bf16", "<layer>", "multiply", "opt_state", "mu"):
        assert (word in str(report)) <= (html.escape(word) in report._repr_html_())


# -- figures -------------------------------------------------------------------------------------


def colours(figure):
    axes, legend = figure.axes[0], figure.axes[0].get_legend()
    words = [*axes.get_xticklabels(), *axes.texts, axes.xaxis.label, *legend.get_texts()]
    patches = (figure.patch, axes.patch, legend.get_frame(), *axes.spines.values())
    return [
        *(word.get_color() for word in words),
        *((patch.get_facecolor(), patch.get_edgecolor()) for patch in patches),
    ]


def test_a_notebook_has_titles_above_and_numbers_in_one_piece(named):
    text = named[1]._repr_html_()
    assert text.startswith("<p><b>")
    assert "<caption>" not in text
    for style, cell in re.findall(r'<td style="([^"]*)">([^<]*)</td>', text):
        assert ("nowrap" in style) == (len(html.unescape(cell)) <= 12)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**24, 3.5, np.inf])
def test_a_loss_scale_has_all_of_its_digits(scale):
    cause = mpjax.numerics.Cause("none", "", "")
    report = mpjax.numerics.Report("f", "16-mixed", scale, 1.0, (), 1, (), (), (), cause)
    shown = re.search(r"loss scale (\S+):", repr(report))[1]
    assert float(shown) == scale
    assert "e" not in shown


def test_a_report_names_the_policy_as_it_was_typed(named):
    name, report = named
    if name in ("explain", "support", "diagnose", "diagnose, healthy", "compare", "exponents"):
        assert re.search(r"(16-mixed|float32)\b", str(report._repr_html_()).split("</b>")[0])
        assert "p=f32" not in str(report).splitlines()[0]


def test_a_figure_shows_itself_at_its_size_light_and_dark():
    figure = NUMERICS["exponents"]().plot()
    before = colours(figure)
    shown = figure._repr_html_()
    assert Cells(shown).open == []
    pictures = re.findall(r"data:image/png;base64,([\w+/=]+)", shown)
    sizes = [struct.unpack(">II", base64.b64decode(p)[16:24]) for p in pictures]
    assert sizes == [(1536, 768)] * 2  # sharp: two pixels for one of the 768 x 384 of the page
    assert "width: 768px" in shown
    assert re.search(r'<source media="\(prefers-color-scheme: dark\)"', shown)
    assert pictures[0] != pictures[1]
    assert colours(figure) == before


def test_a_figure_has_its_axes_where_all_formats_end_outside():
    figure = mpjax.numerics.exponents(small_loss, "float32")(jnp.eye(4), jnp.ones((2, 4))).plot()
    figure._repr_html_()  # matplotlib warns where words outside take all of the room
    assert figure.axes[0].get_position().width > 0.8


def test_a_figure_is_shown_once():
    import matplotlib.pyplot as plt

    NUMERICS["exponents"]().plot()
    assert plt.get_fignums() == []  # pyplot would show what it holds a second time


# -- tables --------------------------------------------------------------------------------------


def test_a_notebook_shows_the_cells_of_the_table(shown):
    table = Cells(shown["tabulate"]._repr_html_())
    shown = Cells(shown["explain"]._repr_html_())
    assert shown.rows[0] == ["operations", "dtype", "why", "where"]
    assert shown.rows[1] == ["<head>"]  # escaped on the way, and no tag
    assert shown.rows[2][:2] == ["dot_general", "bf16"]
    assert shown.rows[2][3].startswith("test_shown.py:")
    assert table.rows[1] == [".", "Linear", "bf16", "f32", "10", "policy"]


def test_size_stays_below_five_digits():
    sizes = [_shown.size(10**k - 1) for k in (1, 4, 5, 7, 8, 11)]
    assert sizes == ["9 B", "9999 B", "99 kB", "9999 kB", "99 MB", "99 GB"]


# -- a train step and its state ------------------------------------------------------------------


@pytest.mark.standard_promotion("adam raises a float to the power of an integer count")
def test_a_state_is_shown_as_steps_sizes_and_loss_scale():
    step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), "16-mixed", loss_scale=1024.0)
    state = step.init(PARAMS, None)
    assert repr(state).splitlines() == [
        "TrainState after 0 steps",
        "  params      603 numbers in 2 arrays, 2412 B f32",
        "  opt_state   4 B bool, 4828 B f32, 12 B i32",
        "  loss scale  1024 (static); 0 steps skipped, 0 in a row",
    ]
    after, _ = step(state, BATCH)
    assert repr(after).startswith("TrainState after 1 steps\n")
    assert repr(state).startswith("TrainState, donated: ")
    after, _ = step(after, jnp.full_like(BATCH, jnp.nan))
    assert repr(after).splitlines()[-1].endswith("1 steps skipped, 1 in a row")


def test_a_state_without_values_is_shown_too():
    def with_mean(params, extra_state, batch):
        return loss_fn(params, batch), extra_state

    step = mpjax.make_train_step(with_mean, optax.sgd(1e-3), "32-true")
    state, shown = step.init(PARAMS, {"mean": jnp.zeros(2, jnp.bfloat16)}), []
    assert "  extra_state 4 B bf16" in repr(jax.eval_shape(lambda: state)).splitlines()
    jax.jit(lambda state: shown.append(repr(state)))(state)
    assert shown[0].startswith("TrainState after (traced) steps")
    assert "loss scale  none; " in repr(state)


def test_a_diverged_state_says_what_to_type():
    step = mpjax.make_train_step(loss_fn, optax.sgd(1e-3), "16-mixed", max_consecutive_skips=1)
    state, _ = step(step.init(PARAMS), jnp.full_like(BATCH, jnp.nan))
    assert "raise_if_diverged(state)" in repr(state).splitlines()[-1]
    assert isinstance(state.opt_state, LossScaleState)


def test_a_step_is_shown_in_one_line():
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16-mixed", accumulate=2)
    shown = "<train step of loss_fn under 'bf16-mixed' (p=f32,c=bf16,o=f32), accumulate=2>"
    assert repr(step) == shown


# -- the norm of the gradients -------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["32-true", "bf16-mixed", "16-mixed"])
def test_grad_norm_is_that_of_the_true_gradients_before_clipping(policy):
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
    step = mpjax.make_train_step(loss_fn, tx, policy, loss_scale=256.0)
    _, metrics = step(step.init(PARAMS), BATCH)
    grads = jax.grad(loss_fn)(PARAMS, BATCH)
    assert metrics["grad_norm"].dtype == jnp.float32
    # A factor of each gradient is rounded to bfloat16 at worst, the rest are powers of two and 75.
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=2**-8)


def test_grad_norm_leaves_out_what_is_no_gradient():
    name = "_overwrite_with_gradient"

    def loss(params, batch):
        return jnp.sum(params["w"] * batch) + 0 * jnp.sum(params[name]["scale"])

    step = mpjax.make_train_step(loss, optax.sgd(0.1), "32-true")
    state = step.init({"w": jnp.zeros(4), name: {"scale": jnp.full(2, 7.0)}})
    assert step(state, jnp.ones(4))[1]["grad_norm"] == 2


def test_grad_norm_of_a_skipped_step_is_not_finite():
    step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "16-mixed")
    _, metrics = step(step.init(PARAMS), jnp.full_like(BATCH, jnp.inf))
    assert not jnp.isfinite(metrics["grad_norm"])
    assert metrics["skipped_steps"] == 1
