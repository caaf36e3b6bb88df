"""Products over 8 devices: results of one device, kernels, and collectives."""

import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, largest_float
from eqquant import Binary, Int2, Int4, NF4
from eqquant.formats import Int6
from eqquant.kernels.cpu import _choose, _library
from helpers import pairs, relative, slow, strict, TOLERANCE
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


M, SIZE = 8, 256
# Float32 sums of 256 terms in another order, with cancellation.
SUMS = 1e-6


def mesh_of(kind=AxisType.Auto, shape=(2, 4), names=("d", "m")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def quantized(normal, format, *shape, precision="highest", **options):
    """Quantize with exact products, because each device rounds its own part."""
    return eqquant.quantize(normal(*shape), format, precision=precision, **options)


# The spec of the weight, and the collectives. The activation is split over "d".
SPLITS = {
    "whole": (P(), set()),
    "outputs": (P("m"), set()),
    "contracted": (P(None, "m"), {("all-reduce", "f32")}),
    "gathered outputs": (P(("d", "m")), {("all-gather", "u8"), ("all-gather", "f32")}),
    "gathered, contracted": (
        P("d", "m"),
        {("all-gather", "u8"), ("all-gather", "f32"), ("all-reduce", "f32")},
    ),
}
FORMATS = [NF4(), Binary()]


def reference(q, x, ct):
    """Return the product and its gradients for activation and scales."""
    w, scales, x, ct = (np.float64(a) for a in (q.dequantize(), q.scales, x, ct))
    by_scale = (ct.T @ x * w).reshape(*scales.shape, -1).sum(-1) / scales
    return x @ w.T, ct @ w, by_scale


@pairs("kind, how, format", [AxisType.Auto, AxisType.Explicit], SPLITS, FORMATS)
def test_a_product_and_its_gradients(kind, how, format, normal):
    spec, moved = SPLITS[how]
    mesh = mesh_of(kind)
    q, x, ct = quantized(normal, format, SIZE, SIZE), normal(M, SIZE), normal(M, SIZE)

    def product(x, q):
        return x @ q.T

    def gradients(x, scales, q, ct):
        loss = lambda x, scales: jnp.sum(product(x, q.replace(scales=scales)) * ct)
        return jax.grad(loss, (0, 1))(x, scales)

    expected = reference(q, x, ct)
    split = eqquant.shard_tree(q, mesh, spec, batch="d")
    assert (split.plan is None) == (kind == AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, ct = put(x, mesh, "d"), put(ct, mesh, "d")
        forward = jax.jit(product).lower(x, split).compile()
        got = forward(x, split), *jax.jit(gradients)(x, split.scales, split, ct)
    assert collectives(forward) == moved
    has_library = not isinstance(_library.load(), str)
    assert ("eqquant_dot" in forward.as_text()) == has_library
    assert largest_float(forward) < q.size / 2
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < TOLERANCE["highest"]
    assert got[2].sharding.is_equivalent_to(split.scales.sharding, 2)


@pairs("kind, how", [AxisType.Auto, AxisType.Explicit], SPLITS)
def test_without_a_kernel_the_same_is_moved(kind, how, normal, monkeypatch):
    monkeypatch.setattr(_choose, "load", lambda: "there are none in this test")
    spec, moved = SPLITS[how]
    mesh = mesh_of(kind)
    q, x = quantized(normal, "nf4", SIZE, SIZE), normal(M, SIZE)
    split = eqquant.shard_tree(q, mesh, spec, batch="d")
    with jax.set_mesh(mesh):
        x = put(x, mesh, "d")
        compiled = jax.jit(lambda x, q: x @ q.T).lower(x, split).compile()
        got = compiled(x, split)
    assert "eqquant_dot" not in compiled.as_text()
    assert collectives(compiled) == moved
    # At this size, the part of a device is a single tile.
    assert how == "whole" or largest_float(compiled) < q.size / 2
    assert relative(got, np.float64(x) @ np.float64(q.dequantize()).T) < SUMS


@pytest.mark.parametrize("spec", [P(None, "m"), P("d", "m")])
def test_activations_in_int8_are_rounded_as_whole_rows(spec, normal):
    # Rounded by the largest value of the whole row: the same integers.
    q = quantized(normal, "int8", SIZE, SIZE, precision="high", activations="int8")
    x = normal(M, SIZE) * np.geomspace(1, 100, SIZE, dtype=np.float32)
    split = eqquant.shard_tree(q, mesh_of(), spec, batch="d")
    product = jax.jit(lambda x, q: x @ q.T)
    assert relative(product(x, split), product(x, q)) < SUMS


def test_sums_are_of_float32(normal):
    q = quantized(normal, "nf4", SIZE, SIZE).astype("bfloat16")
    split = eqquant.shard_tree(q, mesh_of(), P(None, "m"), batch="d")
    lowered = jax.jit(lambda x, q: x @ q.T).lower(
        normal(M, SIZE, dtype="bfloat16"), split
    )
    (summed,) = re.findall(
        r"all_reduce.*?\}\) : \((.*?)\)", lowered.as_text(), re.DOTALL
    )
    assert summed.endswith("xf32>") and lowered.out_info.dtype == jnp.bfloat16


@pytest.mark.parametrize("scatter", [-2, slow(-1)])
def test_sums_that_are_scattered(scatter, normal):
    mesh = mesh_of()
    axis = P(("d", "m")) if scatter == -2 else P("d", "m")
    q = quantized(normal, "nf4", SIZE, SIZE)
    x, ct = normal(M, SIZE), normal(M, SIZE)
    how = {"batch": "d", "scatter": scatter}
    a, b = (eqquant.shard_tree(q, mesh, s, **how) for s in (P("m"), P(None, "m")))
    product = jax.jit(lambda x, q: x @ q.T)
    compiled = product.lower(put(x, mesh, "d"), b).compile()
    assert collectives(compiled) == {("reduce-scatter", "f32")}
    assert compiled.output_shardings.spec == axis
    assert relative(product(x, b), x @ q.T) < SUMS
    # The gradient has a sum if the product has none.
    gradient = jax.jit(lambda x, q, ct: jax.vjp(lambda x: x @ q.T, x)[1](ct)[0])
    args = put(x, mesh, "d"), a, put(ct, mesh, "d", "m")
    assert collectives(gradient.lower(*args).compile()) == {("reduce-scatter", "f32")}
    assert relative(gradient(*args), ct @ q) < SUMS
    said = eqquant.debug.explain(lambda x, q: x @ q.T, x, b)
    assert "summed and scattered over m" in said
    # Rows that are not divisible.
    if scatter == -2:
        few = product.lower(put(x[:4], mesh, "d"), b).compile()
        assert collectives(few) == {("all-reduce", "f32")}


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
def test_scales_in_eight_bits_are_gathered_so(kind, normal):
    mesh = mesh_of(kind)
    format = NF4(double_quantization=True)
    layers, x = quantized(normal, format, 2, SIZE, SIZE), normal(M, SIZE)
    split = eqquant.shard_tree(layers, mesh, P(None, "d", "m"), batch="d")
    scan = lambda x, q: jax.lax.scan(lambda x, w: (x @ w.T, None), x, q)[0]
    mapped = lambda x, q: jax.vmap(lambda x: q[0] @ x)(x)
    for fn in (scan, mapped)[: 1 if kind == AxisType.Auto else 2]:
        with jax.set_mesh(mesh):
            args = put(x, mesh, "d"), split
            compiled = jax.jit(fn).lower(*args).compile()
            got = compiled(*args)
        assert collectives(compiled) == {("all-gather", "u8"), ("all-reduce", "f32")}
        assert relative(got, fn(x, layers)) < SUMS
    if kind == AxisType.Explicit:
        return
    # The same plan has no effect on one device.
    here = jax.device_put(split, jax.devices()[0])
    np.testing.assert_array_equal(jax.jit(scan)(x, here), jax.jit(scan)(x, layers))


TWICE = {"double_quantization": True}


@pytest.mark.parametrize("kind", [AxisType.Explicit, slow(AxisType.Auto)])
@pytest.mark.parametrize(
    "format",
    [
        Int4(affine=True, **TWICE),
        Int2(16, affine=True, unsigned=True, double_quantization="k"),
        slow(NF4(**TWICE)),
        slow(Int6(16, double_quantization="k")),
    ],
    ids=repr,
)
def test_several_groups_of_scales_in_a_few_bits(kind, format, normal):
    mesh = mesh_of(kind)
    size = 4 * 256 * (2 if format.is_k_quant else format.block_size)
    q, x = quantized(normal, format, 4, size), normal(M, size)
    split = eqquant.shard_tree(q, mesh, P(None, "m"), batch="d")
    for part in jax.tree.leaves(split.scales):
        assert part.sharding.spec == P(None, "m")
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x, q: x @ q.T)(put(x, mesh, "d"), split)
    assert relative(got, np.float64(x) @ np.float64(q.dequantize()).T) < 4 * SUMS


def test_two_plans_for_one_shape(normal):
    q, x = quantized(normal, "nf4", SIZE, SIZE), normal(M, SIZE)
    mesh = mesh_of()
    a, b = (eqquant.shard_tree(q, mesh, s, batch="d") for s in (P("m"), P(None, "m")))
    fn = jax.jit(lambda x, a, b: (x @ a.T) @ b.T)
    compiled = fn.lower(put(x, mesh, "d"), a, b).compile()
    assert collectives(compiled) == {("all-reduce", "f32")}
    assert relative(fn(x, a, b), fn(x, q, q)) < SUMS


def test_layers_in_a_scan_with_remat(normal):
    layers = quantized(normal, "int8", 3, SIZE, SIZE)
    x = normal(M, SIZE)

    def loss(x, layers):
        def step(x, w):
            return jnp.tanh(x @ w.T / 16), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(step), x, layers)[0] ** 2)

    mesh = mesh_of()
    split = eqquant.shard_tree(layers, mesh, P(None, "d", "m"), batch="d")
    assert split.plan.axes == ((), ("d",), ("m",))
    gradient = jax.jit(jax.grad(loss))
    compiled = gradient.lower(put(x, mesh, "d"), split).compile()
    assert ("all-gather", "s8") in collectives(compiled)
    assert largest_float(compiled) < SIZE * SIZE / 2
    assert relative(gradient(x, split), gradient(x, layers)) < 5 * SUMS


@pytest.mark.parametrize("shape, names", [((2, 2, 2), "edm"), ((8,), "e")])
def test_experts(shape, names, normal):
    experts = quantized(normal, "nf4", 8, SIZE, SIZE)
    mesh = mesh_of(shape=shape, names=tuple(names))
    spec = P("e", None, "m" if "m" in names else None)
    split = eqquant.shard_tree(experts, mesh, spec)
    x = normal(8, M, SIZE)
    fn = jax.jit(jax.vmap(lambda x, w: jax.vmap(lambda x: w @ x)(x)))
    compiled = fn.lower(put(x, mesh, "e", "d" if "d" in names else None), split)
    compiled = compiled.compile()
    assert collectives(compiled) == ({("all-reduce", "f32")} if "m" in names else set())
    assert relative(fn(x, split), fn(x, experts)) < SUMS
    # The same activation for all weights.
    same = jax.jit(lambda x, w: jax.vmap(lambda w: x @ w.T)(w))
    assert relative(same(x[0], split), same(x[0], experts)) < SUMS


def test_inside_of_a_shard_map_over_another_axis(normal):
    mesh = mesh_of()
    q, x = quantized(normal, "nf4", SIZE, SIZE), normal(M, SIZE)
    split = eqquant.shard_tree(q, mesh, P(None, "m"), batch="d")
    fn = jax.shard_map(
        lambda x, q: x @ q.T,
        mesh=mesh,
        in_specs=(P("d"), P()),
        out_specs=P("d"),
        axis_names={"d"},
    )
    compiled = jax.jit(fn).lower(put(x, mesh, "d"), split).compile()
    assert collectives(compiled) == {("all-reduce", "f32")}
    assert relative(jax.jit(fn)(x, split), x @ q.T) < SUMS


def test_an_embedding_over_its_vocabulary(normal):
    mesh = mesh_of()
    table = eqquant.quantize_tree(eqx.nn.Embedding(weight=normal(512, 64)), "int8")
    split = eqquant.shard_tree(table, mesh, rules={"weight": P("m")}, batch="d")
    tokens = np.arange(16, dtype=np.int32) * 31
    fn = jax.jit(lambda t, tokens: jax.vmap(t)(tokens))
    compiled = fn.lower(split, put(tokens, mesh, "d")).compile()
    assert not any(kind == "all-gather" for kind, _ in collectives(compiled))
    np.testing.assert_array_equal(fn(split, tokens), fn(table, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [P("m"), P(None, "m"), P()])
def test_rows_of_a_table_that_explicit_axes_split(rows, normal):
    mesh = mesh_of(AxisType.Explicit)
    table = eqquant.quantize_tree(eqx.nn.Embedding(weight=normal(512, 64)), "int8")
    split = eqquant.shard_tree(table, mesh, rules={"weight": rows}, batch="d")
    tokens = np.arange(16, dtype=np.int32) * 31
    expected = table.weight.dequantize()[tokens]
    with jax.set_mesh(mesh):
        for fn in (lambda t, i: jax.vmap(t)(i), lambda t, i: t.weight[i]):
            fn = jax.jit(fn)
            wide = put(tokens, mesh, "d")
            assert collectives(fn.lower(split, wide).compile()) <= {
                ("all-reduce", "s8"),
                ("all-reduce", "f32"),
            }
            found = fn(split, wide)
            assert jax.typeof(found).sharding.spec == P("d", *rows[1:] or (None,))
            np.testing.assert_array_equal(found, expected)


def test_a_convolution_over_batch_and_outputs(normal):
    mesh = mesh_of()
    layer = eqx.nn.Conv2d(16, 32, 3, padding=1, key=jax.random.key(0))
    layer = eqquant.quantize_tree(layer, "int8")
    split = eqquant.shard_tree(layer, mesh, rules={"*": P("m")}, batch="d")
    x = normal(8, 16, 6, 6)
    params, static = eqx.partition(split, eqx.is_array)
    fn = jax.jit(lambda p, x: jax.vmap(strict(eqx.combine(p, static)))(x))
    compiled = fn.lower(params, put(x, mesh, "d")).compile()
    assert not any(kind == "all-gather" for kind, _ in collectives(compiled))
    assert relative(fn(params, x), jax.vmap(strict(layer))(x)) < 1e-4


def test_a_step_of_qlora(normal):
    mesh = mesh_of()
    model = eqx.nn.MLP(SIZE, SIZE, SIZE, 1, key=jax.random.key(0))
    model = eqquant.quantize_tree(model, "nf4")
    specs = {"layers.0.*": P(("m", "d")), "layers.1.weight": P("d", "m")}
    x = normal(M, SIZE)

    def adapted(model):
        model = eqquant.lora_tree(model, rank=4, key=jax.random.key(1))
        # Initially one factor is zero, so the gradient of the other would be zero.
        noise = lambda x: x + 0.1 if eqx.is_inexact_array(x) else x
        trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
        return jax.tree.map(noise, trainable), frozen

    def gradient_of(frozen):
        def loss(trainable, x):
            return jnp.mean(jax.vmap(eqx.combine(trainable, frozen))(x) ** 2)

        return jax.grad(loss)

    expected = gradient_of(adapted(model)[1])(adapted(model)[0], x)
    split = eqquant.shard_tree(model, mesh, rules=specs, batch="d")
    trainable, frozen = adapted(split)
    parts, static = eqx.partition(frozen, eqx.is_array)
    step = jax.jit(lambda t, p, x: gradient_of(eqx.combine(p, static))(t, x))
    compiled = step.lower(trainable, parts, put(x, mesh, "d")).compile()
    assert ("all-gather", "u8") in collectives(compiled)
    assert largest_float(compiled) < SIZE * SIZE / 2
    got = step(trainable, parts, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative(a, b) < 1e-4
    merged, _ = eqquant.merge_lora(eqx.combine(trainable, frozen), "nf4")
    for old, new in zip(split.layers, merged.layers, strict=True):
        assert new.weight.plan == old.weight.plan
        before, after = old.weight.codes.sharding, new.weight.codes.sharding
        assert after.is_equivalent_to(before, 2)


def test_without_a_plan_one_warning_for_each_place(normal, recwarn):
    mesh = mesh_of()
    q, x = put(quantized(normal, "nf4", SIZE, SIZE), mesh, "m"), normal(M, SIZE)
    for scale in (1, 2):
        jax.jit(lambda x, q: x @ q.T * scale)(x, q)  # noqa: B023
    assert len([w for w in recwarn if "shard_tree" in str(w.message)]) == 1
    explain = lambda q: eqquant.debug.explain(lambda x, q: x @ q.T, x, q)
    assert "call eqquant.shard_tree" in explain(q)
    said = explain(eqquant.shard_tree(q, mesh, P("d", "m"), batch="d"))
    assert "on each of 8 devices" in said
    assert "gathered over d" in said and "summed over m" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, second", [("m", (None, "m")), (("m", "d"), ("d", "m"))]
)
def test_adapters_on_a_mesh_with_explicit_axes(first, second, normal):
    mesh = mesh_of(AxisType.Explicit)
    model = eqx.nn.MLP(SIZE, SIZE, SIZE, 1, key=jax.random.key(0))
    model = eqquant.quantize_tree(model, "nf4", precision="highest")
    model = eqquant.lora_tree(model, rank=4, key=jax.random.key(1))
    specs = {"layers.0.weight": P(first), "layers.1.weight": P(*second)}
    specs["layers.0.bias"] = P("m")  # Results are not split over "d".
    split = eqquant.shard_tree(model, mesh, rules=specs, batch="d")
    x = normal(M, SIZE)

    @eqx.filter_jit
    def gradient(model, x):
        trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
        loss = lambda t: jnp.mean(jax.vmap(eqx.combine(t, frozen))(x) ** 2)
        return eqx.filter_grad(loss)(trainable)

    with jax.set_mesh(mesh):
        got = gradient(split, put(x, mesh, "d"))
    expected = jax.tree.leaves(gradient(model, x))
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        assert relative(a, b) < 1e-5
