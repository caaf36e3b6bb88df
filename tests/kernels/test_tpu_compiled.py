"""Test the TPU kernels with the TPU compiler, and the reports of `debug`."""

import functools as ft
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from eqquant.debug import compile_for_tpu
from eqquant.kernels import Compute, TPUKernel
from helpers import (
    kernels_in,
    large_copies,
    needs_compiler,
    pairs,
    slow,
)
from jax import lax
from jax.sharding import PartitionSpec as P


CHIPS = ["v5e", "v6e", "v4", "v5p", "TPU7x"]
FORMATS = [NF4(), Int8(), Ternary(), Binary()]


def quantized(rows, columns, format, **options):
    return jax.eval_shape(
        ft.partial(eqquant.quantize, format=format, check_finite=False, **options),
        jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16),
    )


@needs_compiler
@pytest.mark.parametrize(
    "chip, format",
    [
        ("v6e", Int8()),
        # v5e and v6e with every format, the other generations with one each.
        *(pytest.param("v6e", f, marks=pytest.mark.slow) for f in FORMATS[::2]),
        *(pytest.param("v5e", f, marks=pytest.mark.slow) for f in FORMATS),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in zip(CHIPS[2:], FORMATS[1:], strict=True)
        ),
    ],
)
def test_products_become_kernels(chip, format):
    q = quantized(2048, 2048, format)
    for m, kernel in ((8, "decode"), (256, "columns")):
        x = jax.ShapeDtypeStruct((m, 2048), jnp.bfloat16)
        compiled = compile_for_tpu(lambda x, q: x @ q.T, x, q, chip=chip)
        assert kernels_in(compiled) == [f"{format.name}_{kernel}"]
        # No temporary has half the size of the weight in bfloat16.
        assert compiled.memory_analysis().temp_size_in_bytes < 2**22
    compiled = compile_for_tpu(lambda x, q: x @ q, x, q, chip=chip)
    assert kernels_in(compiled) == [f"{format.name}_rows"]
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22


@needs_compiler
@pairs(
    "chip, precision, make, m, by_columns",
    CHIPS,
    ["highest", "default"],
    [NF4, Ternary],
    [5, 40],
    [True, False],
)
def test_ragged_shapes_compile(chip, precision, make, m, by_columns):
    q = quantized(300, 1300, make(), precision=precision)
    x = jax.ShapeDtypeStruct((m, 1300 if by_columns else 300), jnp.float32)
    fn = lambda x, q: x @ (q.T if by_columns else q)
    assert len(kernels_in(compile_for_tpu(fn, x, q, chip=chip))) == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "chip, dtype, format, by_columns",
    [
        ("v5e", "bfloat16", NF4(), True),  # Compiles for 30 seconds.
        ("v5e", "float32", Int8(), False),
        ("v6e", "float32", Int8(), True),
        ("v4", "float32", NF4(), True),
        ("v4", "bfloat16", NF4(), False),
    ],
)
def test_many_rows_fit_in_vector_memory(chip, dtype, format, by_columns):
    q = quantized(4096, 4096, format)
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.dtype(dtype))
    fn = lambda x, q: x @ (q.T if by_columns else q)
    assert len(kernels_in(compile_for_tpu(fn, x, q, chip=chip))) == 1


@needs_compiler
@pairs(
    "chip, case",
    ["v5e", "v6e", "TPU7x"],
    [
        (Int8(), Compute(activations="int8")),
        (Ternary(), Compute(activations="int8")),
        slow((NF4(), Compute(tpu=TPUKernel(lookup=False)))),
    ],
)
def test_w8a8_and_choices_compile(chip, case):
    format, compute = case
    q = quantized(1024, 1024, format, compute=compute)
    x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
    compiled = compile_for_tpu(lambda x, q: x @ q.T, x, q, chip=chip)
    assert kernels_in(compiled) == [f"{format.name}_columns"]


@needs_compiler
@pytest.mark.parametrize("columns", map(slow, (4096, 8192, 14336)))
def test_no_component_is_expanded_outside(columns):
    # The kernel reads scales in place, without a copy or a transpose.
    q = quantized(4096, columns, NF4())
    x = jax.ShapeDtypeStruct((8, columns), jnp.bfloat16)
    compiled = compile_for_tpu(lambda x, q: x @ q.T, x, q)
    held = compiled.memory_analysis().argument_size_in_bytes
    assert (held - 8 * columns * 2) / (4096 * columns) <= 0.57
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@needs_compiler
@pairs("chip, format", ["v5e", "v6e"], FORMATS)
def test_models_and_their_gradients_become_kernels(chip, format):
    model = eqx.filter_eval_shape(
        lambda key: eqquant.quantize_tree(
            eqx.nn.MLP(256, 256, 256, depth=2, key=key), format
        ),
        jax.random.key(0),
    )
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    forward = compile_for_tpu(lambda m, x: jax.vmap(m)(x), model, x, chip=chip)
    assert kernels_in(forward) == [f"{format.name}_decode"] * 3
    backward = compile_for_tpu(
        jax.grad(lambda x, m: jnp.sum(jax.vmap(m)(x) ** 2)), x, model, chip=chip
    )
    assert sorted(kernels_in(backward)) == sorted(
        [f"{format.name}_decode"] * 3 + [f"{format.name}_rows"] * 3
    )


@needs_compiler
@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_shard_map_has_the_kernel_on_every_device(check_vma):
    q = quantized(1024, 512, NF4())
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)

    def fn(x, q):
        return jax.shard_map(
            lambda x, q: x @ q.T,
            in_specs=(P(), P("devices")),
            out_specs=P(None, "devices"),
            check_vma=check_vma,
        )(x, q)

    for f in (fn, jax.grad(lambda x, q: jnp.sum(fn(x, q) ** 2))):
        assert kernels_in(compile_for_tpu(f, x, q, devices=4))


@needs_compiler
@pytest.mark.parametrize("format", [NF4(), slow(Int8())])
def test_loops_over_shard_map_read_layers_in_place(format):
    """The gradient has a kernel in each direction, and no copy of codes."""
    q = jax.eval_shape(
        lambda w: eqquant.quantize(w, format),
        jax.ShapeDtypeStruct((4, 512, 512), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((16, 512), jnp.float32)

    def fn(x, q):
        layer = jax.shard_map(
            lambda x, w: jnp.tanh(x @ w.T),
            in_specs=(P("devices"), P()),
            out_specs=P("devices"),
            check_vma=False,
        )
        return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, q)[0])

    gradient = eqquant.quaxify(jax.grad(fn), on_materialise="error")
    program = compile_for_tpu(gradient, x, q, devices=4)
    assert len(kernels_in(program)) == 2
    copies = large_copies(program.as_text(), 1024)
    assert not [line for line in copies if re.search(r" = [us]8\[", line)]


@pytest.mark.slow
@needs_compiler
def test_automatic_partitioning_compiles_without_a_kernel():
    q = quantized(1024, 512, NF4())
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    assert not kernels_in(compile_for_tpu(lambda x, q: x @ q.T, x, q, devices=4))


def test_compile_for_tpu_names_the_chips():
    with pytest.raises(ValueError, match="v5e"):
        compile_for_tpu(lambda x: x, jnp.ones(3), chip="v3")


def test_explain(normal):
    q = eqquant.quantize(normal(64, 128), "nf4")

    def fn(x, q):
        return jax.vmap(jax.jit(lambda x: q @ x))(x)

    explain = ft.partial(eqquant.debug.explain, fn, normal(5, 128), q)
    assert "Pallas kernel, variant 'decode'" in explain(platform="tpu")
    assert "XLA, recipe 'float'" in explain(platform="other")
    assert explain(platform="cpu") == explain()
    backward = eqquant.debug.explain(
        jax.grad(lambda x: jnp.sum(fn(x, q))), normal(5, 128), platform="tpu"
    )
    assert "'float32'" in backward and len(backward.splitlines()) == 2
    long = eqquant.quantize(normal(16, 2**19), NF4(block_size=2**19))
    why = eqquant.debug.explain(jnp.add, 1, 1, platform="tpu")
    assert why == "no product with a quantized weight, or in low precision"
    why = eqquant.debug.explain(
        lambda x: x @ long.T, jnp.ones((2, 2**19)), platform="tpu"
    )
    assert "XLA" in why and "too long" in why


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "chip, format, m",
    [
        ("v5e", NF4(), 8),
        ("v6e", NF4(), 8),
        *(pytest.param("v5e", f, 8, marks=pytest.mark.slow) for f in FORMATS[1:]),
        *(pytest.param("v6e", f, 256, marks=pytest.mark.slow) for f in FORMATS),
        pytest.param("v5p", NF4(), 8, marks=pytest.mark.slow),
        pytest.param("TPU7x", NF4(), 8, marks=pytest.mark.slow),
    ],
)
def test_a_scan_over_layers_copies_no_codes(chip, format, m):
    """Both directions of a product read each layer in the stack."""
    stack = jax.eval_shape(
        ft.partial(eqquant.quantize, format=format, check_finite=False),
        jax.ShapeDtypeStruct((4, 2048, 2048), jnp.bfloat16),
    )
    x = jax.ShapeDtypeStruct((m, 2048), jnp.bfloat16)
    step = lambda x, w: (jnp.tanh(jnp.tanh(x @ w.T) @ w), None)
    by_slices = lambda x, stack: jax.lax.scan(step, x, stack)[0]
    in_place = lambda x, stack: eqquant.trees.scan_layers(step, x, stack)[0]
    limit = 2048 * 2048 * format.bits // 8 // 2
    copies = {}
    # One number of rows shows that copies of this format and on this chip are found.
    for fn in (in_place, by_slices) if m == 8 else (in_place,):
        compiled = compile_for_tpu(fn, x, stack, chip=chip)
        assert len(kernels_in(compiled)) == 2
        copies[fn] = [
            line
            for line in large_copies(compiled.as_text(), limit)
            if f"[{m},2048]" not in line  # An activation may be larger than codes.
        ]
    assert not copies[in_place] and copies.get(by_slices) != []
