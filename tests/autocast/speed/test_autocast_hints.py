"""Hints are a table whose rows keep the same laws: `_hinted.py` has a program for each."""

import json

import jax
import numpy as np
import pytest
from _hinted import ALL, HINTED, hints
from _places import ROOT

RESULTS = ROOT / "benchmarks" / "results"
FAMILIES = {"all": set(ALL), "gpu": {"cuda"}, "tpu": {"tpu"}}


def test_every_row_has_a_function_a_program_and_a_kind():
    assert hints.FUNCTIONS.keys() == hints.HINTS.keys() == HINTED.keys()
    assert {hint.kind for hint in hints.HINTS.values()} == {"cut", "mark", "way", "around"}


def test_an_unknown_hint_is_an_error():
    with pytest.raises(KeyError, match="no_such_hint"), hints.without("no_such_hint"):
        pass


def share_what_eight_bits_share(hinted, loss=None):
    """What products of 8 bits share is lowered once more the first time."""
    if hinted.policy != "bf16-mixed":
        hinted.texts(ALL, loss)


@pytest.mark.parametrize("name", HINTED)
def test_law_a_hint_changes_the_program_that_it_is_for_where_it_is_for_and_comes_back(name):
    hinted, named = HINTED[name], hints.HINTS[name].platforms.split(", ")
    assert set().union(*map(FAMILIES.get, named)) <= set(hinted.platforms)
    share_what_eight_bits_share(hinted)
    before = hinted.texts(ALL)
    with hints.without(name):
        without = hinted.texts(ALL)
    changed = [p for p, a, b in zip(ALL, before, without, strict=True) if a != b]
    assert tuple(changed) == hinted.platforms
    assert hinted.texts(changed[:1]) == [before[ALL.index(changed[0])]]


@pytest.mark.filterwarnings("ignore:autocast:mpjax.PolicyWarning")  # two layers, none in 8 bits
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HINTED)
def test_law_a_hint_leaves_a_program_alone_that_is_nearly_what_it_is_for(name):
    hinted = HINTED[name]
    share_what_eight_bits_share(hinted, hinted.other)
    before = hinted.texts(hinted.platforms[-1:], hinted.other)
    with hints.without(name):
        assert hinted.texts(hinted.platforms[-1:], hinted.other) == before


def on_a_cpu(hinted):
    return jax.tree.leaves(jax.jit(hinted.gradients())(*hinted.args))


ROUNDS = {
    "attended": "a kernel's formula rounds its scores and weights less",
    **{name: "a cut" for name, hint in hints.HINTS.items() if hint.kind == "cut"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in HINTED if name not in ROUNDS])
def test_law_a_hint_that_is_no_cut_changes_no_bit_on_a_cpu(name):
    hinted = HINTED[name]
    before = hinted.texts(("cpu",))
    with hints.without(name):
        if hinted.texts(("cpu",)) == before:
            return  # the same program
        without = on_a_cpu(hinted)
    jax.clear_caches()
    for a, b in zip(on_a_cpu(hinted), without, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_row_was_measured_when_the_table_of_results_says():
    """But for the kernels of attention: their tables are those of each target."""
    measured: dict[str, str] = {}
    for file in ("ablation.json", "eight_bits_ablation.json"):
        table = json.loads((RESULTS / file).read_text())
        for row in table["rows"]:
            run = table["runs"][row["run"] - 1]
            jaxlib = run["versions"].partition("jaxlib ")[2].partition(",")[0]
            last = measured.get(row["variant"], "")
            measured[row["variant"]] = max(last, f"{jaxlib} {run['date']}")
    for name, hint in hints.HINTS.items():
        assert name == "attended" or hint.measured == measured[name], name
