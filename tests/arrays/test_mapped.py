"""Which axes of a quantized array `jax.vmap` maps."""

import itertools
from typing import Any

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_identical
from jax import lax


FORMATS = {
    "float scales": eqquant.NF4(),
    "one scale per row": eqquant.Int8(),
    "8-bit scales": eqquant.NF4(double_quantization=True),
    "8-bit offsets": eqquant.NF3(affine=True, double_quantization=True),
    "powers of two": eqquant.MXFP4(),
    "float8 scales": eqquant.NVFP4(),
    # Codes and scales have equal shapes.
    "one byte per block": eqquant.Binary(block_size=8),
}
# All axes have the same size, so that no mistake is found by its shape.
SIZE = 16


def decode(w) -> Any:
    return eqquant.dequantize(w) if eqquant.is_quantized(w) else w


def is_leading(ndim, axis, mapped):
    return mapped % ndim < axis


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_vmap_maps_the_axis_or_raises(format, normal):
    by_last = eqquant.quantize(normal(SIZE, SIZE, SIZE), format)
    for axis, mapped in itertools.product(range(3), range(-3, 3)):
        q = by_last.swapaxes(axis, -1)
        fn = jax.vmap(decode, in_axes=mapped)
        if is_leading(3, axis, mapped):
            assert_identical(fn(q), fn(q.dequantize()))
        else:
            with pytest.raises(ValueError, match="vmap"):
                fn(q)


@pytest.mark.parametrize("axis", range(2))
def test_matrices(axis, normal):
    q = eqquant.quantize(normal(SIZE, SIZE), "nf4", axis=axis)
    for mapped in range(-2, 2):
        fn = jax.vmap(decode, in_axes=mapped)
        if is_leading(2, axis, mapped):
            assert_identical(fn(q), fn(q.dequantize()))
        else:
            with pytest.raises(ValueError, match="vmap"):
                fn(q)
            by_axes = eqquant.quaxify(fn, on_materialise="allow")
            assert_identical(decode(by_axes(q)), fn(q.dequantize()))


TRANSFORMED = {
    "jit of vmap": lambda fn, axis: jax.jit(jax.vmap(fn, axis)),
    # The second call does not trace the function again.
    "vmap of jit": lambda fn, axis: jax.vmap(jax.jit(fn), axis),
    "vmap in vmap": lambda fn, axis: (
        lambda q: jax.vmap(lambda q: jax.vmap(fn, axis)(q))(jax.tree.map(pair, q))
    ),
    "vmap of vmap": lambda fn, axis: (
        lambda q: jax.vmap(jax.vmap(fn), axis + (axis >= 0))(jax.tree.map(pair, q))
    ),
    "vmap of grad": lambda fn, axis: jax.vmap(
        lambda q: jax.grad(lambda x: jnp.sum(x * fn(q)))(1.0), axis
    ),
    "filter_vmap": lambda fn, axis: eqx.filter_vmap(fn, in_axes=axis),
    "a keyword and a container": lambda fn, axis: (
        lambda q: jax.vmap(lambda qs: fn(qs["a"][0]), axis)({"a": [q]})
    ),
}


def pair(part):
    return jnp.stack([part, part])


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_map_the_axis_or_raise(name, normal):
    for axis in range(3):
        q = eqquant.quantize(normal(8, 8, 8), eqquant.Int8(), axis=axis)
        for mapped in (-3, -2, 0, 1):
            fn = TRANSFORMED[name](decode, mapped)
            # "vmap of vmap" maps the axes `mapped + 1` and then 0 of the pair.
            outer = "vmap of vmap" if mapped >= 0 else ""
            if is_leading(3, axis, mapped) and (name != outer or axis):
                assert_identical(fn(q), fn(q.dequantize()))
            else:
                for _ in range(2):
                    with pytest.raises(ValueError, match="vmap"):
                        fn(q)


def test_arrays_that_a_mapped_function_makes_are_not_checked(normal):
    """Their batch axis may be anywhere."""
    q = eqquant.quantize(normal(4, 3, 2, 16), "nf4")

    def fn(q):
        turned = jax.jit(lambda q: q.T)(q)
        copied = jax.tree.map(lambda part: part, turned)
        inner = jax.vmap(lambda i, q: decode(q) + i, (0, None))
        return inner(jnp.arange(2.0), copied.T), decode(copied)

    dense = lambda w: (jnp.stack([w, w + 1]), w.T)
    got = jax.vmap(fn, in_axes=1)(q)
    assert_identical(got, jax.vmap(dense, in_axes=1)(q.dequantize()))


@pytest.mark.parametrize("axis", range(2))
def test_mapped_results(axis, normal):
    w = normal(3, 16, 16)
    quantize = lambda w: eqquant.quantize(w, "nf4", axis=axis)
    for out in range(-3, 3):
        fn = jax.vmap(quantize, out_axes=out)
        if out % 3 <= axis:
            expected = jnp.moveaxis(jax.vmap(lambda w: decode(quantize(w)))(w), 0, out)
            assert_identical(decode(fn(w)), expected)
        else:
            with pytest.raises(ValueError, match="out_axes"):
                fn(w)
    shared = jax.vmap(lambda _: quantize(w[0]), out_axes=None)(w)
    assert_identical(shared, quantize(w[0]))


def test_parts_are_mapped_together(normal):
    q = eqquant.quantize(normal(16, 16, 16), "int8")
    axes = eqx.tree_at(lambda q: q.scales, jax.tree.map(lambda _: 0, q), 1)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        jax.vmap(decode, in_axes=(axes,))(q)


def test_parts_that_do_not_fit_are_an_error(normal):
    q = eqquant.quantize(normal(6, 64), "int8")
    scales: Any = q.scales
    cut, added = q.with_static(scales=scales[:1]), q.with_static(codes=q.codes[None])
    for bad in (cut, added):
        for use in (decode, lambda q: q @ jnp.ones(64), lambda q: q[0]):
            with pytest.raises(ValueError, match="leading axes"):
                use(bad)


def test_scans_over_the_blocked_axis_are_an_error(normal):
    q = eqquant.quantize(normal(64, 64), "int8", axis=0)
    with pytest.raises(ValueError, match="too few"):
        lax.scan(lambda _, row: (None, decode(row)), None, q)
