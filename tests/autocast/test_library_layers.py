"""Every public layer of Flax linen, Flax NNX and Equinox, under autocast and under policies."""

import inspect

import _differential as differential
import _evaluate
import _linen_layers
import _nnx_layers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _differential import MODES
from _libraries import LIBRARIES, drawn
from flax import nnx

import mpjax
import mpjax.linen
import mpjax.nnx
from mpjax import autocast

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
POLICIES = {"bf16-mixed": BF16, "16-mixed": F16}
FORWARD, GRAD = MODES[0], MODES[1]
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(0)}

pytestmark = [
    pytest.mark.standard_promotion("layers promote their own masks and counts implicitly"),
    pytest.mark.no_leak_check("flax keeps modules and scopes of a trace until they are collected"),
    pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning"),  # RoPE's own
]


def layers_of(*libraries):
    rows = [(library, name) for library in libraries for name in LIBRARIES[library].layers]
    return pytest.mark.parametrize(("library", "name"), rows)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_public_module_has_a_row_or_a_reason(library):
    of = LIBRARIES[library]
    classes = {n: v for n, v in vars(of.module).items() if inspect.isclass(v)}
    public = {name for name, value in classes.items() if issubclass(value, of.base)}
    assert public == of.layers.keys() | of.others.keys()


# -- under autocast --------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@layers_of(*LIBRARIES)
def test_gradients_of_layers_are_right_to_rounding(library, name):
    program = LIBRARIES[library].program(name)
    differential.check_traced(program, GRAD, lambda f: autocast(f, "bf16-mixed"), BF16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FORWARD, GRAD], ids=lambda mode: mode.name)
@pytest.mark.parametrize("policy", POLICIES)
@layers_of(*LIBRARIES)
def test_layer_under_autocast_is_itself_to_rounding(library, name, policy, mode):
    program = LIBRARIES[library].program(name)
    differential.check(program, mode, lambda f: autocast(f, policy), POLICIES[policy])


# -- under a policy of Flax ------------------------------------------------------------------------


def per_path(rows, policy):
    """Returns a policy that leaves the first of several modules with a dtype in float32."""
    inner = [row.path for row in rows if row.path and row.dtype != "-"]
    return mpjax.PolicyMap(policy, {path: "float32" for path in inner[:1] if len(inner) > 1})


def linen_under(name, policy):
    """Returns a layer under a policy by path, and what it is called with."""
    layer, args = _linen_layers.LAYERS[name]
    rows = mpjax.linen.tabulate(layer, *args, rngs=KEYS).rows
    return mpjax.linen.with_policy(layer, per_path(rows, policy)), args


def nnx_under(name, policy):
    layer, args = _nnx_layers.LAYERS[name]()
    mpjax.nnx.set_policy(layer, per_path(mpjax.nnx.tabulate(layer).rows, policy))
    return layer, args


def run(layer, variables, args):
    """Returns the output and the new state of a layer."""
    keys = {"dropout": jax.random.key(2)}
    return layer.apply(variables, *args, rngs=keys, mutable=["batch_stats"])


def linen_pair(name, policy):
    """Returns a layer in float32 and under a policy by path: two functions of the same arrays."""
    layer, args = _linen_layers.LAYERS[name]
    model, _ = linen_under(name, policy)
    shapes = jax.eval_shape(lambda: layer.init(KEYS, *args))
    variables = jax.tree_util.tree_map_with_path(drawn, shapes)
    return *(lambda v, *xs, m=m: run(m, v, xs) for m in (layer, model)), [variables, *args]


def nnx_pair(name, policy):
    layer, args = _nnx_layers.LAYERS[name]()
    model, _ = nnx_under(name, policy)
    (plain, state), (graph, _) = nnx.split(layer), nnx.split(model)

    def of(graph):
        def fun(state, *args):
            copy = nnx.merge(graph, state)
            return copy(*args), nnx.state(copy)

        return fun

    return of(plain), of(graph), [state, *args]


PAIRS = {"linen": linen_pair, "nnx": nnx_pair}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bf16-mixed", "16-mixed"])
@layers_of(*PAIRS)
def test_a_layer_under_a_policy_by_path_computes_what_it_does_in_float32(library, name, policy):
    plain, low, args = PAIRS[library](name, policy)
    leaves = jax.tree.leaves(args)
    found, expected = (
        (jax.eval_shape(fun, *args), _evaluate.evaluate(jax.make_jaxpr(fun)(*args), leaves))
        for fun in (low, plain)
    )
    assert jax.tree.structure(found[0]) == jax.tree.structure(expected[0])
    if library == "linen":  # a model has the policy's output dtype; NNX's is that of its last layer
        types = [[x.dtype for x in jax.tree.leaves(out)] for out, _ in (found, expected)]
        assert types[0] == types[1]
    else:
        kept = [[x.dtype for x in jax.tree.leaves(out[1])] for out, _ in (found, expected)]
        assert kept[0] == kept[1]
    for a, b in zip(found[1], expected[1], strict=True):
        if not jnp.issubdtype(b.dtype, jnp.floating):
            continue
        # Inputs, weights and about six results in a row are rounded, each by half an epsilon of
        # the largest value there is; what is multiplied here is of the size of one.
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        bound = 4 * float(jnp.finfo(POLICIES[policy]).eps) * max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound)


@layers_of("linen")
def test_a_policy_reaches_all_of_a_linen_layer(library, name):
    layer, args = _linen_layers.LAYERS[name]
    model = mpjax.linen.with_policy(layer, "p=f32,c=f16,o=f32")
    rows = mpjax.linen.tabulate(model, *args, rngs=KEYS).rows
    assert {row.dtype for row in rows} <= {"f16", "-"}
    assert {row.reason for row in rows if row.dtype == "-"} <= {"has no dtype", "policy"}


@layers_of("nnx")
def test_a_policy_reaches_all_of_an_nnx_layer(library, name):
    model, _ = _nnx_layers.LAYERS[name]()
    mpjax.nnx.set_policy(model, "p=bf16,c=f16,o=f32")
    writes_weights = (nnx.WeightNorm, nnx.SpectralNorm)
    for path, module in nnx.iter_modules(model):
        if hasattr(module, "dtype"):
            low = BF16 if isinstance(module, writes_weights) else F16
            assert module.dtype == low, path
    kinds = {x.get_value().dtype for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Param)}
    assert kinds == {jnp.dtype(BF16)}


def summed(out):
    return sum(jnp.sum(x.astype(F32)) for x in jax.tree.leaves(out))


def linen_step(name, policy):
    """Returns a step of gradient descent, and the variables that it starts from."""
    layer, args = linen_under(name, policy)

    def step(variables):
        def loss(params):
            out, state = run(layer, {**variables, "params": params}, args)
            return summed(out), state

        params = variables.get("params", {})
        grads, state = mpjax.grad(loss, has_aux=True, loss_scale=2.0)(params)
        new = mpjax.optim.apply_updates(params, grads)
        return {**variables, **state, **({"params": new} if params else {})}

    return step, jax.eval_shape(lambda: layer.init(KEYS, *args))


def nnx_step(name, policy):
    model, args = nnx_under(name, policy)
    tx = mpjax.with_loss_scale(optax.adam(1e-2), mpjax.DynamicLossScale(2.0))
    structure, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state):
        model, optimizer = nnx.merge(structure, state)
        with mpjax.nnx.undo_skipped(optimizer, model):
            scale = mpjax.current_loss_scale(optimizer)
            grads = mpjax.nnx.grad(lambda model: summed(model(*args)), loss_scale=scale)(model)
            optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return step, state


STEPS = {"linen": linen_step, "nnx": nnx_step}
# JAX has no QR decomposition in 16 bits, which the recurrent weights of these start from.
CELLS = ["GRUCell", "LSTMCell", "MGUCell", "OptimizedLSTMCell", "SimpleCell"]
ORTHOGONAL = {("linen", name) for name in ("Bidirectional", "RNN", *CELLS)}


@pytest.mark.sampled(3)
@layers_of(*STEPS)
def test_variables_of_a_layer_keep_their_dtypes_across_a_step(library, name):
    for policy in ("bf16-mixed", "16-mixed" if (library, name) in ORTHOGONAL else "16-true"):
        step, state = STEPS[library](name, policy)
        after = jax.eval_shape(step, state)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        types = [[(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (after, state)]
        assert types[0] == types[1]
