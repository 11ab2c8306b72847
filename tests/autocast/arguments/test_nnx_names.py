"""NNX modules under autocast: operations carry their module's path, and nothing else changes."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from _named_products import in_float32
from flax import nnx

import mpjax
import mpjax.nnx

pytestmark = pytest.mark.standard_promotion("nnx.BatchNorm multiplies by a Python float")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def widen(self, x):
        return self.up(x)

    def __call__(self, x):
        return self.norm(self.widen(x))


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=0, out_axes=0)
def stacked(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


class Net(nnx.Module):
    """Modules that methods and NNX's transformations call."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(4, 4, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.stack = stacked(rngs)
        self.last = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = nnx.remat(lambda layer, x: layer(x))(layer, x)
        scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = nnx.jit(lambda last, x: last(x))(self.last, scan(x, self.stack))
        return self.embed.attend(x)


MODULES = {"embed", "layers/0/up", "layers/1/up", "stack", "last/layers/0"}
TOKENS = jnp.array([[1, 2]])


@pytest.fixture
def model():
    return Net(nnx.Rngs(0))


def loss_fn(model, tokens):
    return jnp.mean(model(tokens).astype(jnp.float32) ** 2)


def test_products_are_named_after_their_modules(model):
    table = mpjax.explain(model, "bf16-mixed")(TOKENS)
    found = {row.module for row in table.rows if row.operation == "dot_general"}
    assert found == {f"Net/{path}" for path in MODULES}


@pytest.mark.parametrize(
    ("rule", "modules"),
    [
        ("layers/1", {"layers/1/up"}),
        ("layers/*", {"layers/0/up", "layers/1/up"}),
        ("*/up", {"layers/0/up", "layers/1/up"}),
        ("Net/stack", {"stack"}),
        ("embed", {"embed"}),
        ("last/layers/0", {"last/layers/0"}),
    ],
)
def test_a_rule_means_the_same_module_as_in_set_policy(model, rule, modules):
    policies = mpjax.PolicyMap("bf16-mixed", {rule: "float32"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = mpjax.autocast(lambda model: nnx.grad(loss_fn)(model, TOKENS), policies)
        assert in_float32(fast, model) == modules  # what is computed again, too
        mpjax.nnx.set_policy(model, policies)
    dtypes = {row.path: row.dtype for row in mpjax.nnx.tabulate(model).rows}
    assert {path for path in MODULES if dtypes[path] == "f32"} == modules


def test_the_callers_model_is_what_it_was(model):
    before, structure = dict(vars(model)), jax.tree.structure(model)
    out, same = mpjax.autocast(lambda model: (model(TOKENS), model), "bf16-mixed")(model)
    assert out.dtype == jnp.float32
    assert vars(model).keys() == before.keys()
    for each in (model, same):
        assert jax.tree.structure(each) == structure
        assert [type(m) for _, m in nnx.iter_modules(each)] == [
            type(m) for _, m in nnx.iter_modules(Net(nnx.Rngs(0)))
        ]
    moved = nnx.state(model, nnx.BatchStat)["layers"][0]["norm"]["mean"]
    assert jnp.any(moved.get_value() != 0)  # its statistics came back


def test_naming_does_not_trace_again(model):
    traces = []

    @nnx.jit
    def step(model, tokens):
        traces.append(None)
        return nnx.value_and_grad(mpjax.autocast(loss_fn, "bf16-mixed"))(model, tokens)[0]

    step(model, TOKENS)
    step(model, TOKENS)
    assert len(traces) == 1


def test_a_model_that_the_function_merges_is_named_there(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    policies = mpjax.PolicyMap("bf16-mixed", {"embed": "float32"})

    def plain(params, rest):
        return loss_fn(nnx.merge(graphdef, params, rest), TOKENS)

    def named(params, rest):
        return loss_fn(mpjax.nnx.name_operations(nnx.merge(graphdef, params, rest)), TOKENS)

    assert in_float32(mpjax.autocast(named, policies), params, rest) == {"embed"}
    with pytest.warns(mpjax.PolicyWarning, match=r"Type .*, or mpjax\.nnx\.name_operations\(model"):
        mpjax.autocast(plain, policies)(params, rest)


@pytest.mark.no_leak_check("explain of a jitted step holds its jaxpr")
def test_a_train_step_of_a_model_names_its_operations(model):
    policies = mpjax.PolicyMap("bf16-mixed", {"embed": "float32"})
    step = mpjax.nnx.make_train_step(model, optax.sgd(0.1), policies, loss_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_float32(step, step.init(), TOKENS) == {"embed"}
    assert repr(step).startswith("<train step of loss_fn under PolicyMap(")


def test_a_named_model_is_copied_and_pickled_as_one_of_its_own_class(model):
    named = copy.deepcopy(mpjax.nnx.name_operations(model))
    assert in_float32(lambda model: model(TOKENS), named) == MODULES
    linear = mpjax.nnx.name_operations(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    restored = pickle.loads(pickle.dumps(linear))
    assert type(restored) is nnx.Linear
    assert not hasattr(restored, "mpjax_path")
    assert jnp.array_equal(restored.kernel.get_value(), linear.kernel.get_value())


def test_a_class_that_watches_its_subclasses_is_left_alone():
    seen = []

    class Watching(nnx.Module):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(cls)

    class Model(Watching):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    table = mpjax.explain(Model(nnx.Rngs(0)), "bf16-mixed")(jnp.ones((1, 4)))
    assert seen == [Model]
    assert {row.module for row in table.rows} == {"Model/up"}
