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
from eqquant.kernels.cpu import _round
from eqquant.training.rounded._int8 import _by_xla, round_int8
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


@needs_library
@pytest.mark.parametrize(
    "instructions", range(1, len(getattr(library, "instructions", "")) + 1)
)
def test_int8_codes_of_low_precision_equal_those_of_xla(
    instructions, normal, monkeypatch
):
    usable = library._replace(instructions=library.instructions[:instructions])
    monkeypatch.setattr(_round, "load", lambda: usable)
    x = normal(7, 3, 299) * 10.0 ** jnp.arange(-30, 33, 3).reshape(7, 3, 1)
    x = x.at[1, 1].set(0).at[2, 0, 5].set(3e38).at[2, 1].set(1e-40)
    x = x.at[3, 2, :256].set(jnp.arange(256) / 2 - 64).at[3, 2, 256:].set(63.5)  # Ties.
    lowered = jax.jit(ft.partial(round_int8, axis=-1)).lower(x)
    assert "eqquant_round_int8" in lowered.as_text()
    codes, scales = lowered.compile()(x)
    expected_codes, expected_scales = jax.jit(ft.partial(_by_xla, axis=-1))(x)
    assert_identical(codes, expected_codes)
    assert_identical(scales, expected_scales)
    bad = x.at[4, 1, 7].set(jnp.nan).at[5, 0, 298].set(-jnp.inf)
    _, scales = round_int8(bad, -1)
    assert jnp.isnan(scales).sum() == 2 and jnp.isnan(scales[4, 1, 0])


@needs_library
def test_int8_codes_on_a_mesh_or_exported_are_by_xla(normal):
    run = jax.jit(ft.partial(round_int8, axis=-1))
    x = normal(8, 64)
    assert "eqquant_round" not in jax.export.export(run)(x).mlir_module()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    assert "eqquant_round" not in run.lower(spread).as_text()
    assert_identical(run(spread)[0], run(x)[0])
