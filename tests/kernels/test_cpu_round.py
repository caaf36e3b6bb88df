"""The native kernel that rounds weights in training."""

import functools as ft

import eqquant
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from eqquant.kernels import cpu
from helpers import assert_identical


RULES = [("absmean", True), ("absmean", False), ("threshold", False)]

library = cpu.load()
needs_library = pytest.mark.skipif(
    isinstance(library, str), reason=f"NATIVE KERNELS NOT RUN: {library}"
)


@needs_library
@hypothesis.settings(max_examples=8)
@hypothesis.given(
    format=st.sampled_from(
        [
            *(make(block_size=b) for make in (NF4, Int8, Ternary) for b in (64, None)),
            *(Ternary(rule=r, least_squares=s) for r, s in RULES),
            Binary(),
            Binary(block_size=8),
        ]
    ),
    rows=st.sampled_from([1, 7]),
    columns=st.sampled_from([5, 64, 192, 299, 1024, 4160]),
    exponent=st.integers(-37, 37),
    seed=st.integers(0, 99),
    special=st.sampled_from([0.0, -0.0, 1e-45, 3.4e38, np.inf, np.nan]),
)
def test_rounding_is_bit_for_bit_that_of_quantizing(
    format, rows, columns, exponent, seed, special
):
    hypothesis.assume(columns % (format.block_size or 1) == 0)
    rng = np.random.default_rng(seed)
    array = (rng.standard_normal((rows, columns)) * 10.0**exponent).astype("f4")
    array[0, seed % columns] = special
    through = ft.partial(eqquant.straight_through, format=format, check_finite=False)
    assert "eqquant_round" in jax.jit(through).lower(array).as_text()
    q = eqquant.quantize(array, format, check_finite=False)
    # The compiler chooses the bits of a NaN from an infinity.
    one_nan = lambda x: jnp.where(jnp.isnan(x), jnp.nan, x)
    assert_identical(one_nan(through(array)), one_nan(q.dequantize()))


@needs_library
def test_rounding_on_a_mesh_or_exported_is_by_xla(normal):
    options = dict(format="ternary", check_finite=False)
    through = jax.jit(ft.partial(eqquant.straight_through, **options))
    array = normal(16, 512)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )
    assert "eqquant_round" not in through.lower(split).as_text()
    assert_identical(through(split), through(array))
    exported = jax.export.export(through)(array)
    assert "eqquant_round" not in exported.mlir_module()


@needs_library
def test_arguments_of_rounding_are_checked(normal):
    def call(x, boundaries=15, levels=16, **attributes):
        results = (
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.bool_),
        )
        attributes = (
            dict(
                kind=np.int64(0),
                block=np.int64(8),
                largest_scale=np.float32(1),
                by_deviation=False,
                least_squares=False,
                instructions=np.int64(1),
            )
            | attributes
        )
        return jax.ffi.ffi_call("eqquant_round", results)(
            x, jnp.zeros(boundaries), jnp.zeros(levels), **attributes
        )

    call(normal(4, 16))
    for changed, message in (
        (dict(x=normal(4)), "two axes"),
        (dict(kind=np.int64(4)), "kind must be"),
        (dict(boundaries=16), "15 boundaries"),
        (dict(instructions=np.int64(0)), "cannot round"),
        (dict(block=np.int64(0)), "block must divide"),
        (dict(block=np.int64(5)), "block must divide"),
    ):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call(**dict(x=normal(4, 16)) | changed))
