"""Native kernels that add the offsets of affine formats."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.formats import Int2, Int4, Int5, Int6, Int8
from eqquant.kernels import Compute, cpu, Matmul
from eqquant.kernels.cpu._call import call, has_small_levels
from helpers import relative


library = cpu.load()
pytestmark = pytest.mark.skipif(
    isinstance(library, str), reason=f"NATIVE KERNELS NOT RUN: {library}"
)
# The documented error of each kernel, with a margin for small shapes.
TOLERANCE = {
    "float, AVX2": 3e-6,
    "float, AVX-512": 3e-6,
    "int16, AVX2": 2e-4,
    "int8, AVX2": 4e-2,
    "int16, VNNI": 2e-4,
    "int8, VNNI": 4e-2,
    "float, NEON": 3e-6,
    "int8, dotprod": 4e-2,
}
NEEDS = [name.split(", ")[1].lower().replace("-", "") for name in TOLERANCE]
KERNELS = [
    name
    for name, needs in zip(TOLERANCE, NEEDS, strict=True)
    if not isinstance(library, str) and needs in library.instructions
]
FORMATS = {
    "q4_1": Int4(32, "float16", "absmax", affine=True, unsigned=True),
    "q5_1": Int5(32, "float16", "absmax", affine=True, unsigned=True),
    "q4_k": Int4(32, affine=True, unsigned=True, double_quantization="k"),
    "q2_k": Int2(16, affine=True, unsigned=True, double_quantization="k"),
    "int6": Int6(32, affine=True, double_quantization=True),
    "int6 rows": Int6(None, "bfloat16", affine=True),
    "int4": Int4(affine=True),
    "int8": Int8(64, affine=True),
    "int8 rows": Int8(None, affine=True),
    "int8 unsigned": Int8(64, "bfloat16", affine=True, unsigned=True),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_of_any_kind(kernel, name, normal):
    # Offsets that are large, so that an error in them is not hidden by the weight.
    w = normal(67, 512) + 2 * normal(67, 1)
    q = eqquant.quantize(w, FORMATS[name])
    dense = np.asarray(q.dequantize(), np.float64)
    format, shift = q.format.centred
    if kernel == "int8, AVX2" and not has_small_levels(format):
        pytest.skip("the kernel does not serve this format")
    for rows in (1, 2, 4, 21, 70):
        for contract_rows in (False, True):
            if contract_rows and kernel.startswith(("int8", "int16, A")):
                continue
            x = normal(rows, 67 if contract_rows else 512)
            x = x.astype(jnp.bfloat16 if rows == 21 else jnp.float32)
            matmul = Matmul(format, contract_rows, shift=shift)
            args = x, q.codes, q.scales
            out = call(kernel, matmul.of(*args), *args, offsets=q.offsets)
            weight = dense if contract_rows else dense.T
            assert relative(out, np.asarray(x, np.float64) @ weight) < TOLERANCE[kernel]


@pytest.mark.parametrize("power", [-80, 80])
@pytest.mark.parametrize("kernel", KERNELS)
def test_activations_out_of_range(kernel, power, normal):
    # Kernels compute these products again, with scaled operands and without offsets.
    q = eqquant.quantize(normal(67, 512) + 2, FORMATS["q4_1"])
    format, shift = q.format.centred
    x = normal(2, 512) * 2.0**power
    matmul = Matmul(format, False, shift=shift)
    args = x, q.codes, q.scales
    out = call(kernel, matmul.of(*args), *args, offsets=q.offsets)
    expected = np.float64(x) @ np.float64(q.dequantize()).T
    scale = 2.0**-power
    assert relative(np.float64(out) * scale, expected * scale) < TOLERANCE[kernel]


def test_stacks_of_weights(normal):
    q = eqquant.quantize(normal(3, 40, 128) + 1, FORMATS["q4_1"])
    x = normal(3, 2, 128)
    out = jax.vmap(lambda x, q: x @ q.T)(x, q)
    expected = np.einsum("bmk,bnk->bmn", np.float64(x), np.float64(q.dequantize()))
    assert relative(out, expected) < 2e-4


@pytest.mark.parametrize("rows", [1, 40])
def test_rounded_activations_multiply_offsets(rows, normal):
    # The weight is only offsets, so the product is exact for the rounded activation.
    format = Int4(None, affine=True)
    q = eqquant.quantize(jnp.full((3, 64), 2.0), format, activations="int8")
    x = normal(rows, 64)
    rounded = np.float64(eqquant.training.round_activations(x)).sum(-1, keepdims=True)
    assert relative(x @ q.T, rounded * np.full(3, 2.0)) < 1e-6


@pytest.mark.parametrize("precision", ["highest", "high", "default"])
def test_no_product_is_left_to_xla(precision, normal):
    q = eqquant.quantize(
        normal(64, 256), FORMATS["q4_1"], compute=Compute(precision=precision)
    )
    for fn, x in ((lambda x, q: x @ q.T, 256), (lambda x, q: x @ q, 64)):
        text = jax.jit(fn).lower(normal(1, x), q).as_text()
        assert "eqquant_dot" in text
        assert "dot_general" not in text and "reduce" not in text
