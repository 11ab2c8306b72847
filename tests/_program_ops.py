"""The steps that random programs are made of, as source text: a line an expression.

`{x}`, `{y}` are float32 arrays of equal shape, `{i}` an int32 array, `{b}` a boolean one of that
shape, `{a}` an axis of theirs. Arguments are kept where the operation is defined and smooth.
"""


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


# Same shape in and out, every shape.
UNARY = _lines("""
jnp.tanh({x})
jax.nn.sigmoid({x})
jnp.exp(-jnp.abs({x}))
jnp.exp(jnp.minimum({x}, 2.0))
jnp.exp2(jnp.tanh({x}))
jnp.expm1(jnp.tanh({x}))
jnp.log(jnp.abs({x}) + 0.5)
jnp.log1p(jnp.abs({x}))
jnp.log1p(jnp.square({x}) + 1e-6)
jnp.sqrt(jnp.square({x}) + 0.25)
lax.rsqrt(jnp.square({x}) + 0.25)
lax.cbrt(jnp.square({x}) + 0.25)
lax.integer_pow(jnp.tanh({x}), 3)
lax.integer_pow(jnp.square({x}) + 1.0, -1)
jnp.power(jnp.abs({x}) + 0.5, 1.3)
jnp.square(jnp.tanh({x}))
jnp.sin({x})
jnp.cos({x})
jnp.tan(0.5 * jnp.tanh({x}))
jnp.arcsin(0.9 * jnp.tanh({x}))
jnp.arccos(0.9 * jnp.tanh({x}))
jnp.arctan({x})
jnp.sinh(jnp.tanh({x}))
jnp.cosh(jnp.tanh({x}))
jnp.arcsinh({x})
jnp.arccosh(1.5 + jnp.square({x}))
jnp.arctanh(0.9 * jnp.tanh({x}))
lax.erf({x})
lax.erfc({x})
lax.erf_inv(0.9 * jnp.tanh({x}))
lax.lgamma(1.5 + jnp.square({x}))
lax.digamma(1.5 + jnp.square({x}))
jnp.abs({x})
-{x}
jnp.sign({x}) * 0.5
{x} - jnp.floor({x})
jnp.ceil({x}) * 0.5
jnp.round({x}) + {x}
1.0 / (1.0 + jnp.abs({x}))
{x} * 0.5 + 1.0
2.0 - {x}
{x} / 3.0
{x} + 1e-8
jnp.maximum({x}, 0.0)
jnp.minimum({x}, 1.0)
jnp.clip({x}, -1.0, 1.0)
jnp.where({x} > 0.1, {x}, 0.25 * {x})
jnp.remainder({x}, 2.0)
jax.nn.relu({x})
jax.nn.gelu({x})
jax.nn.gelu({x}, approximate=False)
jax.nn.silu({x})
jax.nn.softplus({x})
jax.nn.elu({x})
jax.nn.selu({x})
jax.nn.leaky_relu({x})
jax.nn.log_sigmoid({x})
jax.nn.soft_sign({x})
lax.stop_gradient({x})
lax.reduce_precision({x}, 8, 23)
checkpoint_name({x}, "saved")
jnp.nan_to_num({x})
{x}.astype(jnp.bfloat16).astype(jnp.float32)
{x}.astype(jnp.float16).astype(jnp.float32)
jax.jit(jnp.tanh)({x})
jnp.copysign({x}, 1.5)
jnp.where(jnp.isfinite({x}), {x}, 0.0)
{x} + on_host({x})
watched({x}) * 1.5
""")

BINARY = _lines("""
{x} + {y}
{x} - {y}
{x} * {y}
{x} * jnp.tanh({y})
{x} / (1.0 + jnp.square({y}))
jnp.maximum({x}, {y})
jnp.minimum({x}, {y})
jnp.arctan2({x}, jnp.square({y}) + 0.5)
jnp.power(jnp.abs({x}) + 0.5, jnp.tanh({y}))
jnp.where({x} > {y}, {x}, {y})
jnp.logaddexp({x}, {y})
jnp.hypot({x} + 3.0, {y})
lax.select({x} < 0.3, {x}, {y})
lax.clamp(jnp.minimum({x}, {y}), 0.5 * {x}, jnp.maximum({x}, {y}) + 1.0)
{x} + lax.stop_gradient({y})
""")

# With a boolean or an integer array of the same shape.
WITH_BOOL = _lines("""
jnp.where({b}, {x}, 0.5 * {y})
jnp.where({b}, {x}, 0.0)
jnp.where({b}, {x}, 1.0) * {y}
{x} * {b}.astype(jnp.float32)
lax.select({b}, {x}, {y})
""")

# Keep the shape and have an axis.
ALONG = _lines("""
jax.nn.softmax({x}, axis={a})
jax.nn.log_softmax({x}, axis={a})
jax.nn.softmax(jnp.where({b}, {x}, -1e9), axis={a})
jax.nn.standardize({x}, axis={a}, epsilon=1e-2)
{x} / jnp.sqrt(jnp.mean(jnp.square({x}), axis={a}, keepdims=True) + 1e-6)
{x} / (jnp.sum(jnp.abs({x}), axis={a}, keepdims=True) + 1e-8)
{x} - jnp.mean({x}, axis={a}, keepdims=True)
{x} - jnp.max({x}, axis={a}, keepdims=True)
jnp.cumsum({x}, axis={a})
lax.cumsum({x}, axis={a}, reverse=True)
jnp.cumprod(jnp.tanh({x}) + 1.5, axis={a})
lax.cummax({x}, axis={a})
lax.cummin({x}, axis={a})
lax.cumlogsumexp({x}, axis={a})
jnp.sort({x}, axis={a})
jnp.flip({x}, axis={a})
jnp.roll({x}, 1, axis={a})
lax.associative_scan(jnp.add, {x}, axis={a})
jnp.take_along_axis({x}, jnp.argsort({y}, axis={a}), axis={a})
jnp.vectorize(lambda r: r - jnp.sum(r), signature="(n)->(n)")({x})
jax.vmap(lambda r: jnp.tanh(r) * 2.0, in_axes={a}, out_axes={a})({x})
""")

# Drop an axis; the last ones give integers or booleans.
REDUCE = _lines("""
jnp.sum({x}, axis={a})
jnp.mean({x}, axis={a})
jnp.max({x}, axis={a})
jnp.min({x}, axis={a})
jnp.var({x}, axis={a})
jnp.std({x} , axis={a}) + 0.1
jnp.prod(jnp.tanh({x}) + 1.5, axis={a})
jax.nn.logsumexp({x}, axis={a})
jnp.sqrt(jnp.sum(jnp.square({x}), axis={a}) + 1e-3)
lax.reduce({x}, 0.0, lax.add, ({a},))
lax.reduce({x}, -jnp.inf, lax.max, ({a},))
lax.top_k(jnp.moveaxis({x}, {a}, -1), 1)[0][..., 0]
jnp.take({x}, 1, axis={a})
jnp.einsum("...i->...", jnp.moveaxis({x}, {a}, -1))
jnp.median({x}, axis={a})
jnp.average({x}, axis={a}, weights=jnp.exp(-jnp.square({y})))
""")

REDUCE_TO_INT = _lines("""
jnp.argmax({x}, axis={a}).astype(jnp.int32)
jnp.argmin({x}, axis={a}).astype(jnp.int32)
jnp.sum({x} > 0.0, axis={a}).astype(jnp.int32)
""")

TO_BOOL = _lines("""
{x} > 0.0
{x} <= {y}
jnp.isfinite({x})
({x} > -0.5) & ({x} < 0.7)
jnp.logical_not({x} >= 0.2)
""")

INTEGER = _lines("""
{i} + 1
{i} * 3 % 7
jnp.bitwise_xor({i}, 5)
jnp.left_shift({i}, 1)
jnp.right_shift({i}, 1)
lax.population_count({i})
lax.clz({i})
jnp.where({i} > 2, {i}, -{i})
jnp.sort({i}, axis=None).reshape({i}.shape)
jnp.cumsum({i}).reshape({i}.shape).astype(jnp.int32)
lax.stop_gradient({i} ^ 3)
""")

FROM_INT = _lines("""
{i}.astype(jnp.float32) * 0.125
jnp.sin({i}.astype(jnp.float32) + 255.0)
""")

# Integers, samples and bits from a key: (shape) is filled in.
SAMPLES = _lines("""
jax.random.normal({k}, {shape})
jax.random.uniform({k}, {shape}, minval=-1.0)
jax.random.bernoulli({k}, 0.4, {shape}).astype(jnp.float32)
jax.random.truncated_normal({k}, -1.0, 1.0, {shape})
jax.random.normal(jax.random.fold_in({k}, 3), {shape})
jax.random.normal(jax.random.split({k}, 2)[1], {shape})
jax.random.randint({k}, {shape}, 0, 9).astype(jnp.float32) * 0.25
""")

# Products: (shape of x, shapes of further weights, expression); letters are sizes.
PRODUCTS = _lines("""
x:ab   | w:bc     | ac    | {x} @ {w}
x:ab   | w:cb     | ac    | {x} @ {w}.T
x:ab   | w:b      | a     | {x} @ {w}
x:ab   | w:ac     | bc    | {x}.T @ {w}
x:ab   | w:b      | ab    | {x} * {w}
x:ab   | w:bc,v:c | ac    | {x} @ {w} + {v}
x:ab   | w:bc,v:cb | ab   | jnp.tanh({x} @ {w}) @ {v}
x:ab   | w:bc     | c     | jnp.einsum("ab,bc->c", {x}, {w})
x:ab   |          | aa    | {x} @ {x}.T
x:ab   | w:ab     | a     | jnp.einsum("ab,ab->a", {x}, {w})
x:ab   | w:bc     | ac    | jax.vmap(lambda r: r @ {w})({x})
x:ab   | w:bc     | ac    | jnp.dot({x}, {w}, preferred_element_type=jnp.float32)
x:ab   | w:bc     | ac    | jnp.dot({x}, {w}, precision="highest")
x:ab   | w:bc     | ac    | jax.checkpoint(lambda t: jnp.tanh(t @ {w}))({x})
x:ab   | w:bc     | ac    | jax.jit(lambda t, u: t @ u)({x}, {w})
x:a    | w:a      |       | jnp.vdot({x}, {w})
x:a    | w:ab     | b     | {x} @ {w}
x:a    | w:b      | ab    | jnp.outer({x}, {w})
x:abc  | w:cd     | abd   | {x} @ {w}
x:abc  | w:dc     | abd   | jnp.einsum("abc,dc->abd", {x}, {w})
x:abc  | w:acd    | abd   | {x} @ {w}
x:abc  | w:adc    | abd   | jnp.einsum("abc,adc->abd", {x}, {w})
x:abc  | w:abd    | acd   | jnp.einsum("abc,abd->acd", {x}, {w})
x:abc  | w:bcd    | ad    | jnp.tensordot({x}, {w}, 2)
x:abc  | w:bd     | adc   | jnp.einsum("abc,bd->adc", {x}, {w})
x:abc  | w:acd    | abd   | jax.vmap(jnp.matmul)({x}, {w})
x:abc  | w:adc,v:adc | abc | jax.nn.softmax({x} @ jnp.swapaxes({w}, 1, 2), axis=-1) @ {v}
x:abc  | w:2cd    | abd   | conv({x}, {w})
x:abc  | w:2cd    | abd   | conv({x}, {w}, rhs_dilation=(2,))
x:abc  | w:21c    | abc   | conv({x}, {w}, feature_group_count={x}.shape[-1])
""")

# Move values to another shape: (shape in, shape out, expression).
MOVES = _lines("""
ab  | ba  | {x}.T
ab  | ab  | {x}[::-1]
ab  | b   | {x}[0]
ab  | a   | {x}[:, 1]
a   | ab  | jnp.broadcast_to({x}[:, None], ({a}, {b}))
a   | ba  | jnp.tile({x}, ({b}, 1))
a   | ba  | jnp.stack([{x}] * {b})
a   | a   | {x}[jnp.arange({a})[::-1]]
a   | a   | {x}.at[0].set(0.5)
a   | a   | {x}.at[jnp.array([0, 1, 0])].add(0.25)
a   | a   | {x}.at[1].mul(2.0)
a   | a   | {x}.at[0].max(0.1)
ab  | ab  | {x}.at[0].set({x}[1])
ab  | ab  | {x}.at[jnp.array([1, 0])].add({x}[:2])
ab  | cb  | {x}[jnp.array([1, 0, 1, 1])[:{c}]]
ab  | ab  | lax.dynamic_update_slice({x}, {x}[:1] * 2.0, (1, 0))
ab  | b   | lax.dynamic_index_in_dim({x}, 1, keepdims=False)
ab  | ab  | jnp.tril({x})
ab  | ab  | jnp.pad({x}, ((1, 0), (0, 1)))[1:, :-1]
ab  | ab  | jnp.concatenate([{x}[1:], {x}[:1]])
ab  | ab  | jnp.concatenate(jnp.split({x}, [1])[::-1])
ab  | ab  | {x} + jnp.arange({b}, dtype=jnp.float32)
ab  | ab  | {x} * jax.nn.one_hot(1, {b}, dtype=jnp.float32)
ab  | ab  | lax.reduce_window({x}, 0.0, lax.add, (1, 2), (1, 1), "SAME")
ab  | ab  | lax.reduce_window({x}, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")
ab  | bac | jnp.swapaxes(jnp.stack([{x}] * {c}, -1), 0, 1)
abc | acb | jnp.swapaxes({x}, 1, 2)
abc | cab | jnp.transpose({x}, (2, 0, 1))
abc | ab  | {x}[..., 0]
abc | bc  | {x}[1]
abc | bc  | jnp.sum({x}, axis=0)
abc | abc | {x} - jnp.mean({x}, axis=(0, 1), keepdims=True)
    | a   | jnp.full(({a},), 1.0) * {x}
    | ab  | jnp.broadcast_to({x}, ({a}, {b}))
    |     | jax.nn.relu({x}) + 1.0
aa  | aa  | jnp.linalg.cholesky({x} @ {x}.T + 4.0 * jnp.eye({a}))
aa  | aa  | jax.scipy.linalg.solve_triangular(jnp.tril({x}) + 4.0 * jnp.eye({a}), {x}, lower=True)
aa  | a   | jnp.diag({x})
aa  | aa  | jnp.linalg.solve({x} + 6.0 * jnp.eye({a}), {x})
a   | a   | jnp.real(jnp.fft.ifft(jnp.fft.fft({x}) * 0.5))
""")
