"""Low-precision products: values, both gradients, and the codes that they keep."""

import collections
import functools as ft
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from eqquant.training import (
    low_precision,
    master_weights,
    Recipe,
    save_quantized,
    with_rounding_key,
)
from helpers import assert_identical, needs_compiler, relative, slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


PRESETS = ["int8", "fp8", "mxfp8", "nvfp4"]
STOCHASTIC = Recipe("int8", stochastic=True)
# Float32 sums, in another order than float64 ones.
SUMS = 2e-6


#
# References in float64
#


def per_row(x, axis, dtype, largest):
    """Return codes and scales."""
    scale = np.abs(x).max(axis, keepdims=True) / largest
    codes = x / scale
    codes = np.round(codes) if dtype is np.int8 else codes.astype(np.float32)
    return codes.astype(dtype).astype(np.float64), scale


def mx(x, axis):
    x = np.moveaxis(x, axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(most / 448))
    rounded = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    out = (rounded.astype(np.float64) * scale).reshape(x.shape)
    return np.moveaxis(out, -1, axis)


def nv(x, axis, square=False):
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = np.moveaxis(x, axis, -1)
    unit = np.abs(x).max() / (6 * 448)
    blocks = (x / unit).reshape(*x.shape[:-1], -1, 16)
    most = np.abs(blocks).max(-1, keepdims=True)
    if square:
        most = most.reshape(-1, 16, *most.shape[1:]).max(1, keepdims=True)
        most = np.repeat(most, 16, 1).reshape(*blocks.shape[:-1], 1)
    scale = (most / 6).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    y = blocks / scale.astype(np.float64)
    # The nearest level; of two at the same distance, the one with an even mantissa.
    distance = np.abs(np.abs(y)[..., None] - levels)
    best = np.argmin(distance + (np.arange(8) % 2) * 1e-9, -1)
    rounded = np.sign(y) * levels[best] * scale.astype(np.float64) * unit
    return np.moveaxis(rounded.reshape(x.shape), -1, axis)


E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57344)


def expected_products(preset, x, w, g):
    """Return the results of the forward product and of both backward ones."""
    if preset in ("int8", "fp8"):
        first, back = {"int8": ((np.int8, 127),) * 2, "fp8": (E4M3, E5M2)}[preset]
        (qx, sx), (qw, sw) = per_row(x, 1, *first), per_row(w, 1, *first)
        (qg, sg), (qh, sh) = per_row(g * sw.T, 1, *back), per_row(g * sx, 0, *back)
        return (qx * sx) @ (qw * sw).T, (qg * sg) @ qw, (qh * sh).T @ qx
    if preset == "mxfp8":
        return mx(x, 1) @ mx(w, 1).T, mx(g, 1) @ mx(w, 0), mx(g, 0).T @ mx(x, 0)
    from eqquant.training.rounded._codes import random_hadamard

    turn = lambda a: np.asarray(random_hadamard(jnp.asarray(a, jnp.float32), -2))
    turned_g, turned_x = (turn(a).astype(np.float64) for a in (g, x))
    w = nv(w, 1, square=True)
    return nv(x, 1) @ w.T, nv(g, 1) @ w, nv(turned_g, 0).T @ nv(turned_x, 0)


def operands(normal, tokens=96, rows=64, size=64):
    return normal(tokens, size), normal(rows, size), normal(tokens, rows)


def vjp_of(recipe, x, w, key=None):
    layer = eqx.nn.Linear(*w.shape[::-1], use_bias=False, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, w)

    def product(x, w):
        model = eqx.tree_at(lambda m: m.weight.master, low_precision(layer, recipe), w)
        if key is not None:
            model = with_rounding_key(model, key)
        return jax.vmap(model)(x)

    return jax.vjp(product, x, w)


@pytest.mark.parametrize("preset", ["int8", "fp8", slow("mxfp8"), slow("nvfp4")])
def test_the_three_products_equal_float64(preset, normal):
    x, w, g = operands(normal)
    numbers = PRESETS_OF[preset]
    out, pull = vjp_of(numbers, x, w)
    expected = expected_products(
        preset, *(np.asarray(a, np.float64) for a in (x, w, g))
    )
    # A value next to a tie may round to the other side. That is rare, except for the
    # rotated operands of NVFP4, whose rotation is in float32.
    tolerance = 1e-4 if preset == "nvfp4" else SUMS
    for got, want in zip((out, *pull(g)), expected, strict=True):
        assert relative(got, want) < tolerance


# NVFP4 rounds gradients stochastically by default, which the reference does not.
PRESETS_OF = {name: name for name in PRESETS} | {"nvfp4": Recipe("nvfp4")}


@pytest.mark.parametrize(
    "recipe, error",
    [
        (Recipe("int8"), 0.02),
        (Recipe("int8", "bfloat16", "bfloat16"), 6e-3),
        (Recipe("bfloat16", "int8", "mxfp8"), 0.06),
        (Recipe("float8_e4m3fn", "int8", "float8_e4m3fn"), 0.06),
        (Recipe("mxfp8", "nvfp4", "int8"), 0.3),
        (Recipe("nvfp4", "bfloat16", "bfloat16"), 6e-3),
    ],
)
def test_gradients_are_straight_through(recipe, error, normal):
    """They equal the gradients of the float product, up to rounding."""
    x, w, g = operands(normal)
    _, pull = vjp_of(recipe, x, w)
    for got, want in zip(pull(g), (g @ w, g.T @ x), strict=True):
        assert relative(got, want) < max(error, 0.2 if "nvfp4" in str(recipe) else 0.03)


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def mlp(size=64):
    return eqx.nn.MLP(size, size, 128, 2, key=jax.random.key(0))


@pytest.mark.parametrize("preset", ["int8", *map(slow, PRESETS[1:])])
def test_mapped_tokens_are_rows_of_one_product(preset, normal):
    """Scales of the weight gradient are over all tokens, as for a matrix."""
    x, w, g = operands(normal)
    array = low_precision(eqx.nn.Linear(64, 64, key=jax.random.key(0)), preset).weight
    array = eqx.tree_at(lambda a: a.master, array, w)
    array = with_rounding_key(array, jax.random.key(1)) if preset == "nvfp4" else array
    mapped = lambda a, x: jnp.sum(jax.vmap(lambda x: a @ x)(x) * g)
    whole = lambda a, x: jnp.sum((x @ a.T) * g)
    for got, want in zip(
        *(jax.grad(f, (0, 1), allow_int=True)(array, x) for f in (mapped, whole)),
        strict=True,
    ):
        got, want = (master_weights(a) for a in (got, want))
        assert_identical(got, want)


@pytest.mark.slow
def test_each_example_has_a_gradient_of_its_own(normal):
    model, x = low_precision(mlp(), "int8"), normal(3, 8, 64)
    gradient = eqx.filter_grad(loss)
    each = eqx.filter_vmap(gradient, in_axes=(None, 0))(model, x)
    for i in range(3):
        alone = gradient(model, x[i])
        for got, want in zip(*map(jax.tree.leaves, (each, alone)), strict=True):
            assert relative(got[i], want) < SUMS


def test_layers_in_a_scan_and_experts(normal):
    make = lambda key: eqx.nn.Linear(32, 32, key=key)
    stack = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
    stack = low_precision(stack, STOCHASTIC, where=lambda a: a.ndim == 3)
    x = normal(16, 32)

    def run(stack, x, scan):
        stack = with_rounding_key(stack, jax.random.key(1))
        arrays, static = eqx.partition(stack, eqx.is_array)
        step = lambda x, a: (jnp.tanh(jax.vmap(eqx.combine(a, static))(x)), None)
        if scan:
            return jnp.sum(jax.lax.scan(step, x, arrays)[0])
        for i in range(3):
            x, _ = step(x, jax.tree.map(lambda a, i=i: a[i], arrays))
        return jnp.sum(x)

    gradients = [eqx.filter_grad(ft.partial(run, scan=s))(stack, x) for s in (1, 0)]
    for got, want in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert relative(got, want) < SUMS
    out = jnp.einsum("bi,eoi->ebo", x, stack.weight.master)
    experts = eqquant.quaxify(lambda w: jnp.einsum("bi,eoi->ebo", x, w))(stack.weight)
    assert relative(experts, out) < 0.02


def test_training_with_optax_changes_no_types(normal):
    model = low_precision(mlp(), "fp8")
    x = normal(64, 64)
    optimiser = optax.adamw(1e-2)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        value, gradients = eqx.filter_value_and_grad(loss)(model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimiser.update(gradients, state, params)
        return eqx.apply_updates(model, updates), state, value

    first = None
    for _ in range(20):
        model, state, value = step(model, state)
        first = value if first is None else first
    assert value < first / 10
    plain = master_weights(model)
    assert jax.tree.structure(plain) == jax.tree.structure(mlp())
    mask = eqquant.trainable_mask(model)
    assert mask.layers[0].weight.master is mask.layers[0].bias is True


#
# Stochastic rounding
#


@pytest.mark.parametrize(
    "recipe",
    [
        STOCHASTIC,
        slow(Recipe("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn", stochastic=True)),
        slow(Recipe("mxfp8", stochastic=True)),
        slow(Recipe("nvfp4", stochastic=True)),
    ],
)
def test_the_mean_over_keys_is_not_biased(recipe, normal):
    x, w, g = operands(normal, 32, 16, 32)

    def gradients(key):
        return vjp_of(recipe, x, w, key)[1](g)

    keys = jax.random.split(jax.random.key(0), 1000)
    samples = jax.jit(lambda keys: jax.lax.map(gradients, keys))(keys)
    # Other operands keep their rounding, so compare with an exact gradient.
    exact = Recipe(recipe.forward, recipe.dgrad, recipe.wgrad)
    for product, sample in zip(("dgrad", "wgrad"), samples, strict=True):
        want = with_exact_gradient(exact, product, x, w, g)
        error = sample.mean(0) - want
        deviation = sample.std(0) / np.sqrt(len(keys))
        # The mean square of standard normal numbers is 1, give or take 4 deviations.
        # An element also has the rounding of float32.
        ratio = error / (deviation + 1e-6 * jnp.abs(want).max())
        assert jnp.abs(jnp.mean(ratio)) < 4 / np.sqrt(ratio.size)
        assert jnp.mean(ratio**2) < 1 + 4 * np.sqrt(2 / ratio.size)


def with_exact_gradient(recipe, product, x, w, g):
    """Return a backward product whose gradient is not rounded."""
    from eqquant.training.rounded import _products

    of_x, of_w, kept_x, kept_w = _products.encode(x, w, recipe, keep=True)
    kept = (kept_w or of_w) if product == "dgrad" else (kept_x or of_x)
    size = len(x) if product == "wgrad" else w.shape[0]
    values = _products.decoded(kept, recipe, product, size)
    return g @ values if product == "dgrad" else g.T @ values


def test_a_key_determines_the_bits(normal):
    x, w, g = operands(normal)
    a, b, c = (vjp_of(STOCHASTIC, x, w, jax.random.key(i))[1](g) for i in (0, 0, 1))
    for first, same, other in zip(a, b, c, strict=True):
        assert_identical(first, same)
        assert (first != other).any()


def test_gradients_need_a_key(normal):
    model = low_precision(mlp(), STOCHASTIC)
    jax.vmap(model)(normal(4, 64))  # Inference does not.
    with pytest.raises(ValueError, match="with_rounding_key"):
        eqx.filter_grad(loss)(model, normal(4, 64))
    with pytest.raises(ValueError, match="no weight of model is rounded"):
        with_rounding_key(low_precision(mlp(), "int8"), jax.random.key(0))


#
# Residuals of the backward pass
#


def kept_bytes(model, x):
    """Return the bytes that a backward pass keeps of activations, by dtype."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    run = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
    _, pull = jax.vjp(run, params, x)
    out = {}
    for leaf in jax.tree.leaves(pull):
        if leaf.shape[:1] == x.shape[:1] and leaf.ndim == 2:
            out[leaf.dtype.name] = out.get(leaf.dtype.name, 0) + leaf.nbytes
    return out


@pytest.mark.parametrize("preset, dtype", [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_activations_are_kept_as_codes(preset, dtype, normal):
    tokens, size = 67, 64
    model = eqx.nn.MLP(size, size, 128, 2, activation=jnp.sin, key=jax.random.key(0))
    x = normal(tokens, size)
    inputs = tokens * (size + 128 + 128)
    # The derivative of the activation function is a float in both.
    other = tokens * 2 * 128 * 4
    assert kept_bytes(model, x) == {"float32": 4 * inputs + other}
    kept = kept_bytes(low_precision(model, preset), x)
    scales = 3 * tokens * 4
    assert kept == {dtype: inputs, "float32": other + scales}


@pytest.mark.parametrize("preset", ["int8", *map(slow, PRESETS[1:])])
def test_checkpoints_save_codes_so_that_nothing_is_rounded_twice(preset, normal):
    x = normal(64, 64)
    model = low_precision(mlp(), PRESETS_OF[preset])

    def compiled(policy):
        @eqx.filter_jit
        def gradient(model, x):
            run = eqx.filter_checkpoint(lambda m, x: jax.vmap(m)(x), policy=policy)
            return eqx.filter_grad(lambda m: jnp.sum(run(m, x) ** 2))(model)

        return gradient

    plain = eqx.filter_jit(eqx.filter_grad(lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2)))
    for policy in (None, save_quantized):
        gradients = compiled(policy)(model, x), plain(model, x)
        for got, want in zip(*map(jax.tree.leaves, gradients), strict=True):
            assert relative(got, want) < SUMS

    def roundings(step):
        """Count the arrays that a step rounds."""
        text = str(eqx.filter_make_jaxpr(step)(model, x)[0])
        return text.count("reduce_max") + text.count("= round_int8[")

    assert 0 < roundings(compiled(save_quantized)) <= roundings(plain)
    assert roundings(compiled(None)) > roundings(compiled(save_quantized))


#
# Meshes
#


@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
@pytest.mark.parametrize("recipe", [slow("int8"), slow("mxfp8"), STOCHASTIC])
def test_eight_devices_compute_the_bits_of_one(recipe, kind, normal):
    x, model = normal(96, 64), low_precision(mlp(), recipe)
    key = jax.random.key(3) if recipe is STOCHASTIC else None

    def gradient(model, x):
        def value(model):
            keyed = model if key is None else with_rounding_key(model, key)
            return loss(keyed, x)

        return master_weights(eqx.filter_grad(value)(model))

    expected = eqx.filter_jit(gradient)(model, x)
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(kind,) * 2)
    put = lambda a, *names: jax.device_put(a, NamedSharding(mesh, P(*names)))
    specs = ("m",), (None, "m"), (("m", "d"),)
    where = lambda m: [layer.weight.master for layer in m.layers]
    weights = [put(w, *names) for w, names in zip(where(model), specs, strict=True)]
    split = eqx.tree_at(where, model, weights)
    where = lambda m: [layer.bias for layer in m.layers]
    biases = [
        put(b, *names) for b, names in zip(where(model), ("m", (), "m"), strict=True)
    ]
    split = eqx.tree_at(where, split, biases)
    with jax.set_mesh(mesh):
        got = eqx.filter_jit(gradient)(split, put(x, "d"))
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert relative(a, b) < SUMS


@pytest.mark.slow
def test_devices_sum_weight_gradients_in_float32(normal):
    model = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16) if eqx.is_array(a) else a, mlp()
    )
    params, static = eqx.partition(low_precision(model, "int8"), eqx.is_inexact_array)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    @jax.jit
    @ft.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    def gradient(params, x):
        value = lambda p: jax.lax.pmean(loss(eqx.combine(p, static), x), "d")
        return jax.grad(value)(params)

    x = normal(64, 64, dtype=jnp.bfloat16)
    text = str(jax.make_jaxpr(gradient)(params, x))
    sums = [line for line in text.splitlines() if "psum" in line and "128,64" in line]
    assert sums and all("f32[128,64]" in line.split("=")[0] for line in sums)
    got = master_weights(gradient(params, x))
    want = master_weights(eqx.filter_grad(loss)(eqx.combine(params, static), x))
    # Each device has scales of its own.
    assert relative(got.layers[2].weight, want.layers[2].weight) < 0.02


#
# Hardware
#


def compiled_gradients(chip, preset, tokens, size):
    """Return the text of a compiled program for both gradients of a layer."""
    layer = eqx.nn.Linear(size, 1024, use_bias=False, key=jax.random.key(0))
    w = jax.ShapeDtypeStruct((1024, size), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16)

    def gradients(w, x):
        model = eqx.tree_at(lambda m: m.weight, layer, w)
        model = low_precision(model, preset)
        value = lambda m, x: loss(m, x).astype(jnp.float32)
        return jax.grad(value, (0, 1))(model, x)

    return eqquant.debug.compile_for_tpu(gradients, w, x, chip=chip).as_text()


def products_of_xla(text):
    """Return the types of the operands of each product."""
    types = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    products = re.findall(
        r"= \w+\[.* (?:convolution|dot)\((%[\w.-]+), (%[\w.-]+)\)", text
    )
    return [tuple(types[name] for name in pair) for pair in products]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "chip, preset, type",
    [("v5e", "int8", "s8"), ("v6e", "int8", "s8"), ("TPU7x", "fp8", "f8")],
)
def test_all_three_products_are_native_on_tpus(chip, preset, type):
    """Both operands of each product are codes, and no other product is left.

    No size of the layer is a multiple of 128, which the kernels require.
    """
    products = products_of_xla(compiled_gradients(chip, preset, 248, 520))
    assert len(products) == 3
    assert all(name.startswith(type) for pair in products for name in pair)


@needs_compiler
@pytest.mark.parametrize("chip", ["v6e", slow("v5e")])
def test_kernels_compute_the_products_of_int8_on_tpus(chip):
    text = compiled_gradients(chip, "int8", 256, 512)
    calls = re.findall(r"%([a-z_0-9]+)\S* = .*custom_call_target=\"tpu_custom", text)
    # Activation and weight, and the gradient for each of its products.
    counts = {"round_rows": 3, "round_columns": 1, "int8_columns": 1, "int8_rows": 2}
    assert collections.Counter(calls) == counts
    assert not products_of_xla(text)
    # The codes of a transposed gradient are read as they are written.
    assert not re.search(r"= s8\[\S+ (?:copy|transpose)\(", text)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "TPU7x"])
def test_no_tpu_lacks_a_preset(chip):
    for preset in PRESETS:
        assert compiled_gradients(chip, PRESETS_OF[preset], 128, 256)


#
# Choice of weights, and errors
#


def test_the_base_of_an_adapter(normal):
    model = eqquant.lora_tree(mlp(), 4, key=jax.random.key(1))
    model = low_precision(model, "int8")
    assert isinstance(model.layers[0].weight.base, eqquant.training.LowPrecisionArray)
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    value = lambda t: loss(eqx.combine(t, frozen), normal(8, 64))
    gradients = jax.grad(value)(trainable)
    assert (gradients.layers[0].weight.b.master != 0).any()
    assert gradients.layers[0].weight.base.master is None
    assert isinstance(master_weights(model).layers[0].weight.base, jax.Array)


def test_rules_choose_recipes():
    model = low_precision(
        mlp(), "fp8", rules={"layers.0.weight": None, "layers.1.weight": "int8"}
    )
    first, second, third = (layer.weight for layer in model.layers)
    assert isinstance(first, jax.Array)
    assert second.recipe == Recipe("int8")
    assert third.recipe.dgrad == "float8_e5m2"


def test_lookups_use_the_float_weight(normal):
    table = eqx.nn.Embedding(32, 16, key=jax.random.key(0))
    assert isinstance(low_precision([table, mlp()], "int8")[0].weight, jax.Array)
    model = low_precision(table, rules={"weight": "int8"})
    assert_identical(jax.vmap(model)(jnp.arange(4)), table.weight[:4])


def test_bad_arguments(normal):
    with pytest.raises(ValueError, match="dgrad must be one of.*'int8'.*got 'int4'"):
        Recipe("int8", "int4")
    with pytest.raises(ValueError, match="recipe must be one of.*'nvfp4'.*bfloat16"):
        low_precision(mlp(), "int7")
    with pytest.raises(ValueError, match="no weight is chosen"):
        low_precision(mlp(), min_size=10**9)
    with pytest.raises(ValueError, match="layers.0.weight.*master_weights"):
        low_precision(low_precision(mlp()))
    with pytest.raises(ValueError, match="rule '\\*': low_precision: recipe must"):
        low_precision(mlp(), rules={"*": "int7"})
    model = low_precision(mlp())
    with pytest.raises(NotImplementedError, match="master_weights"):
        jax.hessian(lambda x: model(x).sum())(normal(64))


@pytest.mark.parametrize("preset", ["int8", "fp8", slow("mxfp8"), slow("nvfp4")])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_value_that_is_not_finite_stays_visible(preset, bad, normal):
    x, w, g = operands(normal)
    out, pull = vjp_of(PRESETS_OF[preset], x.at[3, 5].set(bad), w)
    assert not jnp.isfinite(out[3]).any()
    _, by_w = pull(g)
    assert not jnp.isfinite(by_w).all()
    _, pull = vjp_of(PRESETS_OF[preset], x, w)
    by_x, by_w = pull(g.at[3, 5].set(bad))
    assert not jnp.isfinite(by_x[3]).any()
    assert not jnp.isfinite(by_w).all()


def test_zeros_and_empty_batches():
    model = low_precision(eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(0)))
    for tokens in (0, 4):
        x = jnp.zeros((tokens, 64))
        gradients = eqx.filter_grad(lambda m, x: jnp.sum(jax.vmap(m)(x)))(model, x)
        assert (gradients.weight.master == 0).all()
