"""Parts that do not fit each other: each is one problem with its name."""

import dataclasses
from typing import Any

import eqquant
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.formats import (
    Float8Scales,
    FourBitScales,
    Int8,
    IntegerScales,
    NF4,
    PowerOfTwoScales,
    problems_of,
    problems_of_scales,
    QuantizedOffsets,
    QuantizedScales,
)
from eqquant.formats._format import bound_scales, largest_scale, max_blocks, sum_blocks


BYTES = jnp.ones((2, 16), jnp.uint8)
SCALES = {
    "codes": QuantizedScales(BYTES, BYTES[:, :1]),
    "signed codes": QuantizedOffsets(BYTES.astype("int8"), BYTES[:, :1]),
    "powers": PowerOfTwoScales(BYTES),
    "floats": Float8Scales(BYTES, jnp.ones((2, 1), jnp.float32)),
    "integers": IntegerScales(BYTES.astype("int8"), jnp.ones((2, 2), jnp.float16)),
    "four bits": FourBitScales(BYTES[:, :8], jnp.ones((2, 1), jnp.float16)),
}
PARTS = [
    (name, field.name)
    for name, scales in SCALES.items()
    for field in dataclasses.fields(scales)
]


@pytest.mark.parametrize("name", SCALES)
def test_parts_of_scales_that_fit_have_no_problem(name):
    assert not list(problems_of_scales(SCALES[name]))


@pytest.mark.parametrize("name, part", PARTS)
def test_parts_of_scales_that_do_not_fit(name, part):
    scales = SCALES[name]
    kind, value = type(scales).__name__, getattr(scales, part)

    def problems(value):
        return list(map(str, problems_of_scales(_replaced(scales, **{part: value}))))

    if (name, part) != ("integers", "codes"):  # The format determines their dtype.
        (dtype,) = problems(value.astype("int32"))
        assert dtype.startswith(f"{part} of {kind} must be ") and "int32" in dtype
    # In a part that determines the shape, this moves the problem to the other part.
    found = problems(value[:1])
    if len(dataclasses.fields(scales)) > 1:
        assert len(found) == 1 and f"of {kind} must be" in found[0]
    (missing,) = problems(None)
    assert missing.startswith(f"{kind} must have ") and part in missing


@pytest.mark.parametrize("name", ["codes", "powers"])
def test_scales_without_an_axis(name):
    scales = SCALES[name]
    for field in dataclasses.fields(scales):
        scalar = {field.name: getattr(scales, field.name)[0, 0]}
        scales = _replaced(scales, **scalar)
    (problem,) = map(str, problems_of_scales(scales))
    assert problem.endswith("must have at least one axis.")


def _replaced(parts, **fields):
    """Replace fields without the checks of the constructor, as when a file is read."""
    out = object.__new__(type(parts))
    for name in (field.name for field in dataclasses.fields(parts)):
        object.__setattr__(out, name, fields.get(name, getattr(parts, name)))
    return out


def test_problems_of_a_quantized_array():
    stacked = eqquant.quantize(jnp.ones((2, 3, 70)), NF4())
    assert stacked.padding == 58 and not list(stacked.problems())
    q = eqquant.quantize(jnp.ones((3, 64)), NF4())
    assert not list(q.problems())

    def first(**fields):
        return str(next(_replaced(q, **fields).problems()))

    assert "dtype must be floating" in first(dtype=np.dtype("int32"))
    assert "codes must have at least one axis" in first(codes=q.codes[0, 0])
    assert "axes must name at least one" in first(axes=())
    assert "axes" in first(axes=(-1, -1))
    assert "inner must have 0 sizes for (-1,), got (2,)" in first(inner=(2,))
    assert "inner must have 1 sizes" in first(axes=(-2, -1), inner=(-1,))
    assert "inner must have 1 sizes" in first(axes=(-2, -1), inner=(2.0,))
    for padding in (-1, 65, 1.0):
        assert "padding must be from 0 to 64" in first(padding=padding)
    assert "inner must divide" in first(axes=(-2, -1), inner=(5,))
    assert "inner must divide" in first(axes=(-2, -1), inner=(0,))
    parts = {"axes": (-2, -1), "inner": (4,)}
    assert not list(_replaced(q, **parts).problems())


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_codes_and_scales_need_an_axis(part):
    parts = {"codes": BYTES.astype("int8"), "scales": jnp.ones((2, 1))}
    assert not list(problems_of(Int8(), **parts))
    parts[part] = parts[part][0, 0]
    with pytest.raises(ValueError, match="codes and scales must have at least one"):
        raise next(problems_of(Int8(), **parts))


def test_arguments_of_a_format():
    assert Int8(block_size=1).block_size == 1
    sizes: Any = ((0, ValueError), (True, TypeError))
    for size, error in sizes:
        with pytest.raises(error, match="block_size must be a positive"):
            Int8(block_size=size)
    with pytest.raises(ValueError, match="multiple of 2"):
        NF4(block_size=3)
    for dtype in ("int8", "no dtype", object()):
        with pytest.raises(ValueError, match="scale_dtype must be one of"):
            Int8(scale_dtype=dtype)
    assert repr(NF4()) == "NF4(block_size=64)"
    assert repr(Int8(scale_dtype="float16")) == (
        "Int8(block_size=None, scale_dtype='float16')"
    )
    with pytest.raises(TypeError, match="precision is not a field of a format"):
        NF4(precision="high")  # pyright: ignore


def test_bounds_of_scales():
    tiny = float(jnp.finfo("float16").tiny)
    given = jnp.array([1.0, 0.0, 1e9, 5.0, jnp.nan])
    absmax = jnp.array([1.0, 1e-9, 1e9, 0.0, jnp.nan])
    out = bound_scales(given, absmax, "float16", 1e5, largest=2)
    np.testing.assert_array_equal(out, np.array([1, tiny, 50000, 0, 0], np.float16))
    # The nearest bfloat16 to the limit is above it.
    top = largest_scale("bfloat16", 257.0, 1)
    assert top == 256 and largest_scale("bfloat16", 256.0, 1) == 256
    assert largest_scale("bfloat16", 259.0, 1) == 258
    assert largest_scale("float16", 1e9, 1) == 65504


@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 128, 130, 192])
def test_sums_and_maxima_of_blocks(size, rng):
    blocks = rng.integers(-100, 100, (2, 3, size)).astype(np.float32)
    np.testing.assert_array_equal(max_blocks(jnp.asarray(blocks)), blocks.max(-1))
    np.testing.assert_array_equal(sum_blocks(jnp.asarray(blocks)), blocks.sum(-1))
