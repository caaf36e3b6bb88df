"""Test products of TPU kernels with codes that have a history."""

import functools as ft

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.debug import compile_for_tpu
from eqquant.formats import from_plane_order, Trellis
from eqquant.kernels import choose, Compute, Matmul, tpu, TPUKernel, View
from eqquant.kernels.tpu import _chips, _history, _tiles, _two_parts
from helpers import (
    assert_identical,
    kernels_in,
    multiply_by,
    needs_compiler,
    pairs,
    relative,
    slow,
)
from jax.experimental import pallas as pl


def stored(q) -> int:
    return q.codes.shape[-1] * 8 // q.format.bits


@pairs(
    "bits, block_size, axis",
    [2, 3, 4],
    [256, 192, 64, slow(32), slow(512)],
    [1, 0],
)
def test_levels_by_indices(bits, block_size, axis, normal):
    """They equal the levels of the states."""
    format = Trellis(bits=bits, block_size=block_size)
    q = eqquant.quantize(normal(32, 3072), format)
    used = _two_parts.used_bytes(q.codes.shape[1], format)
    planes = _tiles.planes_of(format)

    def kernel(codes, out):
        codes = _two_parts.read(codes, 0, used, format)
        codes = codes if axis else codes.T
        planes = _history.indices(codes, format, axis)
        out[...] = jnp.concatenate([p if axis else p.T for p in planes], 1)

    out = jax.ShapeDtypeStruct((32, used * planes), jnp.int8)
    index = pl.pallas_call(kernel, out_shape=out, interpret=True)(q.codes)
    index = from_plane_order(index, _tiles.bits_of(format), planes)
    levels = _history.table_of(format)[np.asarray(index)]
    expected = format.levels(format.ordered_states(q.codes), jnp.int8)
    np.testing.assert_array_equal(levels, expected)


@pytest.mark.parametrize("bits, entries", [(2, 32), (3, 128), (4, 128)])
def test_tables_fit_in_a_register(bits, entries):
    # Chips with lookups along sublanes have 32 entries.
    assert len(_history.table_of(Trellis(bits=bits))) == entries


@pairs(
    "kind, bits, m, contract_rows, operand, block_size",
    ["TPU v5e", "TPU v6e", slow("TPU v4"), slow("TPU7x")],
    [2, 3, 4],
    [5, 40],
    [False, True],
    [("float32", "high"), ("bfloat16", "default"), ("float32", "highest")],
    [256, slow(192), slow(64)],
)
def test_products(
    kind, bits, m, contract_rows, operand, block_size, monkeypatch, normal
):
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    dtype, precision = operand
    q = eqquant.quantize(normal(70, 1000), Trellis(bits=bits, block_size=block_size))
    x = normal(m, 70 if contract_rows else 1000).astype(dtype)
    w = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (w if contract_rows else w.T)
    if not contract_rows:
        x = jnp.pad(x, ((0, 0), (0, stored(q) - 1000)))
    matmul = Matmul(q.format, contract_rows, Compute(precision), dtype)
    out = multiply_by(tpu.KERNELS, matmul, x, q.codes, q.scales, interpret=True)
    tolerance = {"high": 1e-4, "default": 2.5e-2, "highest": 2e-6}[precision]
    assert relative(out[:, : expected.shape[1]], expected) < tolerance


@pytest.mark.slow
@pairs("bits, m, contract_rows", [2, 3, 4], [8, 40], [False, True])
def test_layers_of_a_stack_are_read_in_place(bits, m, contract_rows, normal):
    q = eqquant.quantize(normal(3, 256, 512), Trellis(bits=bits))
    x = normal(m, 256 if contract_rows else 512)
    matmul = Matmul(q.format, contract_rows)
    multiply = ft.partial(multiply_by, tpu.KERNELS, matmul, x, interpret=True)
    view = View(jnp.int32(1), q.codes, q.scales)
    own = view.take((q.codes, q.scales))
    assert_identical(multiply(*own, view=view), multiply(*own))


def test_which_kernels_serve_a_history(normal):
    def chosen(m, **options):
        format = Trellis(**options.pop("format", {}))
        q = eqquant.quantize(normal(16, 768), format)
        matmul = Matmul(format, compute=Compute(tpu=TPUKernel(**options)))
        kernel = choose(tpu.KERNELS, matmul.of(normal(m, 768), q.codes, q.scales))
        return kernel if isinstance(kernel, str) else kernel.name

    assert chosen(8) == "decode" and chosen(40) == "float32"
    # Blocks of 192 codes are no part of a register.
    assert chosen(8, format={"block_size": 192}) == "float32"
    assert "codes like those of trellis" in chosen(8, lookup=False)


@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        ("v5e", 3, 256),
        slow(("v5e", 2, 256)),
        slow(("v5e", 4, 192)),
        ("v6e", 2, 256),
        slow(("v6e", 3, 192)),
        slow(("v6e", 4, 256)),
        slow(("v4", 3, 256)),
        slow(("v5p", 2, 256)),
        slow(("TPU7x", 4, 256)),
    ],
)
def test_kernels_compile(case):
    chip, bits, block_size = case
    format = Trellis(bits=bits, block_size=block_size)
    q = jax.eval_shape(
        lambda: eqquant.quantize(jnp.ones((1024, 768)), format, check_finite=False)
    )
    decode = "decode" if block_size == 256 else "columns"
    for m, name in ((8, decode), (256, "columns"), (256, "rows")):
        x = jax.ShapeDtypeStruct((m, q.shape[name != "rows"]), jnp.bfloat16)
        fn = (lambda x, q: x @ q) if name == "rows" else (lambda x, q: x @ q.T)
        compiled = compile_for_tpu(fn, x, q, chip=chip)
        assert kernels_in(compiled) == [f"trellis_{name}"]
        assert compiled.memory_analysis().temp_size_in_bytes < 2**22
