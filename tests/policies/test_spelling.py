"""A rule written once means the same module: in trees, Flax models and autocast."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from _named_products import in_float32, products
from _places import ROOT

import mpjax
import mpjax.linen
from mpjax._policies import spelling

F32 = mpjax.get_policy("float32")


class Encoder(nn.Module):
    def setup(self):
        self.up = nn.Dense(4)
        self.down = nn.Dense(4)

    def narrow(self, x):
        return self.down(x)

    def __call__(self, x):
        return self.narrow(self.up(x))


class Net(nn.Module):
    """Modules that a method, another module and a lifted transformation call."""

    def setup(self):
        self.embed = nn.Embed(4, 4)
        self.encoder = nn.remat(Encoder)()
        self.head = nn.Dense(4)

    def encode(self, x):
        return self.encoder(x)

    def __call__(self, tokens):
        return self.embed.attend(self.head(self.encode(self.embed(tokens))))


NET, TOKENS = Net(), jnp.array([[1, 2]])
VARIABLES = jax.jit(NET.init)(jax.random.key(0), TOKENS)
PARAMS = VARIABLES["params"]
PRODUCTS = {"encoder/up", "encoder/down", "head", "embed"}  # `embed` is a product in `attend`


def in_autocast(policies):
    return in_float32(mpjax.autocast(NET.apply, policies), VARIABLES, TOKENS)


def in_model(policies):
    model = mpjax.linen.with_policy(NET, policies)
    jax.eval_shape(model.init, jax.random.key(0), TOKENS)  # which warns
    return in_float32(model.apply, VARIABLES, TOKENS)


def in_tree(tree):
    def found(policies):
        cast = policies.cast_to_compute(tree)
        paths = jax.tree_util.tree_leaves_with_path(cast)
        names = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in paths}
        full = {name for name, x in names.items() if x.dtype == jnp.float32}
        return {name.removeprefix("params/").rpartition("/")[0] for name in full}

    return found


USES = {
    "autocast": in_autocast,
    "with_policy": in_model,
    "cast_to_compute(params)": in_tree(PARAMS),
    "cast_to_compute(variables)": in_tree(VARIABLES),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("rule", "modules"),
    [
        ("head", {"head"}),
        ("head/*", {"head"}),
        ("*/head", {"head"}),
        ("params/head", {"head"}),
        ("params/head/*", {"head"}),
        ("re:(.*/)?head(/.*)?", {"head"}),
        ("re:.*/head/.*", {"head"}),
        ("re:head/.*", {"head"}),
        ("embed", {"embed"}),
        ("encoder", {"encoder/up", "encoder/down"}),
        ("encoder/*", {"encoder/up", "encoder/down"}),
        ("encoder/down", {"encoder/down"}),
        ("*/down", {"encoder/down"}),
        ("*/encoder/d*/*", {"encoder/down"}),
        ("*", PRODUCTS),
    ],
)
def test_law_a_rule_means_the_same_module_everywhere(rule, modules, use):
    policies = mpjax.PolicyMap("bf16-mixed", {rule: "float32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert USES[use](policies) == modules


@pytest.mark.parametrize("use", ["autocast", "with_policy"])
@pytest.mark.parametrize("rule", ["Net/encoder/down", "Net/encoder/d*"])
def test_the_models_name_may_stand_before(rule, use):
    assert USES[use](mpjax.PolicyMap("bf16-mixed", {rule: "float32"})) == {"encoder/down"}


def test_an_operation_may_be_meant_by_the_method_that_runs_it():
    assert in_autocast(mpjax.PolicyMap("bf16-mixed", {"Net/embed.attend": "float32"})) == {"embed"}


def test_what_is_computed_again_follows_the_rule_too():
    def loss(params):
        grads = jax.grad(lambda p: jnp.sum(NET.apply({"params": p}, TOKENS) ** 2))(params)
        return sum(jnp.sum(grad) for grad in jax.tree.leaves(grads))

    policies = mpjax.PolicyMap("bf16-mixed", {"encoder/up": "float32"})
    found = products(jax.make_jaxpr(mpjax.autocast(loss, policies))(PARAMS).jaxpr)
    found = [(names[-1], dtype, "rematted_computation" in names) for names, dtype in found]
    assert ("up", jnp.float32, True) in found
    assert ("up", jnp.float32, False) in found
    assert {name for name, dtype, _ in found if dtype == jnp.float32} == {"up"}
    assert ("up", jnp.bfloat16) not in [pair[:2] for pair in found]


@pytest.mark.parametrize(
    ("rule", "path", "means"),
    [
        ("norm", "batch_stats/norm/mean", True),  # of the module as a whole
        ("params/norm", "batch_stats/norm/mean", False),
        ("batch_stats/norm", "batch_stats/norm/mean", True),
        ("batch_stats/norm", "norm/mean", False),
        ("net/norm", "net/~/norm/scale", True),  # Haiku's mark of a constructor
        ("net/~/norm", "net/~/norm/scale", True),
        ("head", "encoder/head/kernel", False),
        ("head/*", "header/kernel", False),
        ("*/head", "my_head/kernel", False),
        ("re:head", "head/kernel", False),  # the whole path
        (r"re:a\/.*", "a", False),  # its end is an escape, no edge
        ("re:.*/?head", "head", True),
        ("[!e]*", "encoder/up", False),
        ("re:(?!encoder/).*", "encoder/up", False),
        ("Encoder/norm", "norm", False),
    ],
)
def test_what_a_rule_means_in_a_tree(rule, path, means):
    policies = mpjax.PolicyMap("bf16-mixed", {rule: "float32"})
    assert (policies.policy_for(path) == F32) is means


@pytest.mark.parametrize(
    ("scopes", "spelled"),
    [
        (("Net", "head"), "head"),
        (("Net", "Net.encode", "head"), "head"),
        (("Net.encode", "head"), "head"),
        (("student", "Net", "head"), "student/head"),
        (("Net", "Net", "rematted_computation", "head"), "head"),
        (("Net", "block", "block"), "block/block"),
        (("eqx.nn.MLP", "eqx.nn.Linear"), "eqx.nn.MLP/eqx.nn.Linear"),
        (("Net", "Dense_0"), "Dense_0"),
    ],
)
def test_spellings_of_an_operation(scopes, spelled):
    found = spelling.of_operation(scopes)
    assert (found[0], found[-1]) == ("/".join(scopes), spelled)


def test_a_scope_that_no_model_makes_is_part_of_the_path():
    assert spelling.of_operation(("loss", "head")) == ("loss/head",)
    policies = mpjax.PolicyMap("bf16-mixed", {"head": "float32"})
    assert policies.policy_for(spelling.of_operation(("loss", "head"))) != F32


# -- what matches nothing, and what comes too late -----------------------------------------------


@pytest.mark.parametrize(
    ("rule", "use", "fix"),
    [
        ("Net/head", "cast_to_compute(params)", "part 'Net' in that place.\n  Type 'head': "),
        ("head/kernel", "autocast", "part 'kernel' in that place.\n  Type 'head': "),
        ("params/head/kernel", "autocast", "'kernel' in that place.\n  Type 'params/head': "),
        ("head/kernel", "with_policy", "part 'kernel' in that place.\n  Type 'head': "),
        ("Head", "autocast", "Nearest: 'Net/head' (case matters)."),
    ],
)
def test_rule_that_names_too_much_is_told_what_to_leave_out(rule, use, fix):
    policies = mpjax.PolicyMap("bf16-mixed", {rule: "float32"})
    with pytest.warns(mpjax.PolicyWarning, match=re.escape(fix)):
        USES[use](policies)


@pytest.mark.parametrize("use", USES)
def test_rule_that_an_earlier_one_hides_is_warned_of_everywhere(use):
    policies = mpjax.PolicyMap("bf16-mixed", {"encoder": "float32", "encoder/up": "bf16-mixed"})
    text = (
        r"rule 2 of 2, 'encoder/up', decides nothing: rule 1, 'encoder', comes first\.\n.*\n  Put"
    )
    with pytest.warns(mpjax.PolicyWarning, match=text) as caught:
        USES[use](policies)
    if "cast_to" in use:
        assert caught[0].filename == __file__  # the user's line


@pytest.mark.parametrize("use", USES)
def test_hidden_rule_that_says_the_same_misleads_no_one(use):
    policies = mpjax.PolicyMap("bf16-mixed", {"encoder": "float32", "encoder/up": "float32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        USES[use](policies)


# -- the table in the documentation --------------------------------------------------------------


def test_the_table_of_uses_is_true():
    """Each row: where, what the path looks like there, all rules that mean it."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    section = page.partition("## One path, every use")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*`[^|]*) \| `([^|`]*)` \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 7
    for use, path, rules in rows:
        spelled = spelling.of_operation(tuple(path.split("/"))) if "autocast" in use else path
        if "_policy" in use:
            spelled = spelling.in_model("Net", path)
        for rule in re.findall("`([^`]+)`", rules):
            policies = mpjax.PolicyMap("bf16-mixed", {rule: "float32"})
            assert policies.policy_for(spelled) == F32, (use, rule)
