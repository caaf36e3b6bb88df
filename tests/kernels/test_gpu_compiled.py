"""Test the GPU kernels with NVIDIA's compiler, where it is installed."""

import functools as ft
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant import Binary, Int3, Int4, Int8, MXFP4, NF3, NF4, Ternary
from eqquant._jax import gpus
from eqquant.debug import compile_for_gpu
from eqquant.formats import float_scales, Int5, Int6, Trellis
from eqquant.kernels import Compute, GPUKernel, Matmul
from eqquant.kernels.gpu import _chips, _choose, _triton
from eqquant.kernels.gpu._lookup import table_bytes
from eqquant.primitives import codes_dot
from eqquant.training import low_precision
from eqquant.trees import scan_layers
from helpers import load_benchmark, needs_gpu_compiler
from jax import lax


sass = load_benchmark("_gpu_sass")
TRITON = Compute(gpu=GPUKernel("triton"))
W8A8 = Compute(activations="int8")
W8A8_TRITON = Compute(activations="int8", gpu=GPUKernel("triton"))
Q5_K = Int5(affine=True, double_quantization="k", unsigned=True)
Q6_K = Int6(block_size=16, double_quantization="k")
MORE = [
    (Int5(), 16, False, "bfloat16", "a100", 9.7),
    (Q6_K, 16, False, "bfloat16", "a100", 10.5),
    (Int6(), 16, False, "bfloat16", "a100", 7.4),
    (Int5(), 64, False, "bfloat16", "h100", 6.4),
    (Trellis(bits=2), 16, True, "bfloat16", "h100", 4.9),
    (Trellis(bits=3), 1, False, "float32", "a100", 12.6),
    (Trellis(bits=4), 1, False, "bfloat16", "h200", 6.1),
    (Trellis(bits=4), 16, True, "bfloat16", "h100", 6.0),
    (Trellis(bits=4), 64, False, "bfloat16", "rtx4090", 8.4),
    (Q6_K, 128, False, "bfloat16", "h100", 9.1),
    (Int6(), 16, True, "bfloat16", "h100", 9.3),
    (Int5(), 1, True, "bfloat16", "h100", 8.1),
    (Int3(), 16, True, "float32", "h100", 8.0),
    (Int5(), 16, False, "float32", "h100", 10.0),
    (NF3(), 1, False, "bfloat16", "h100", 5.8),
    (Int8(), 1, False, "bfloat16", "a100", 6.3),
    (Int8(), 16, True, "bfloat16", "h100", 7.3),
    (Ternary(), 16, False, "float16", "a100", 5.0),
    (Binary(), 16, True, "bfloat16", "h100", 9.0),
    (NF4(), 1, False, "float32", "h100", 6.7),
    (NF4(), 16, False, "bfloat16", "rtx4090", 5.5),
    (NF4(), 64, False, "bfloat16", "h100", 5.3),
    (Int4(), 16, False, "bfloat16", "a100", 7.1),
    (Int4(), 1, False, "float32", "h100", 7.8),
    (Int4(), 16, False, "bfloat16", "rtx4090", 7.0),
    (Int4(), 64, False, "bfloat16", "h100", 8.4),
    (Int4(), 128, False, "bfloat16", "a100", 15.5),
    ((Int8(), W8A8), 16, False, "bfloat16", "h100", 1.6),
    ((Int8(), W8A8_TRITON), 2048, False, "bfloat16", "a100", 2.2),
    ((Int8(), W8A8), 2048, False, "bfloat16", "rtx4090", 2.0),
    (Int8(), 2048, False, "bfloat16", "rtx4090", 10.1),
    (Int8(block_size=64), 2048, False, "bfloat16", "rtx4090", 11.7),
    (Int4(block_size=64), 2048, False, "bfloat16", "rtx4090", 10.3),
    (Ternary(), 2048, False, "bfloat16", "rtx4090", 7.7),
    (Ternary(block_size=128), 2048, False, "bfloat16", "rtx4090", 8.6),
    (Binary(), 2048, False, "float16", "rtx4090", 16.3),
    ((NF4(), TRITON), 2048, False, "bfloat16", "a100", 13.4),
    ((Binary(), TRITON), 2048, False, "bfloat16", "h100", 3.9),
    ((Ternary(), TRITON), 2048, False, "float16", "h100", 4.6),
]


# `most` bounds the instructions per weight: 10 % above JAX 0.10.2. Newer versions may
# take 21 % more than that version.
@needs_gpu_compiler
@pytest.mark.parametrize(
    "format, m, contract_rows, dtype, chip, most",
    [
        (NF4(), 16, False, "bfloat16", "h100", 4.5),
        (NF4(), 16, False, "bfloat16", "a100", 5.5),
        (Int4(), 1, False, "bfloat16", "h200", 5.7),
        (Int8(), 1, False, "bfloat16", "h100", 4.7),
        (Q5_K, 16, False, "bfloat16", "h200", 6.4),
        (Q6_K, 1, False, "bfloat16", "h100", 6.7),
        (Int3(), 16, False, "bfloat16", "h100", 5.0),
        (Trellis(bits=2), 16, False, "bfloat16", "h100", 5.4),
        (Trellis(bits=3), 16, False, "bfloat16", "h100", 9.3),
        (Ternary(), 16, False, "bfloat16", "h100", 2.0),
        (Binary(), 1, False, "bfloat16", "h100", 1.8),
        (NF4(), 16, True, "bfloat16", "a100", 7.6),
        ((Int8(), W8A8_TRITON), 2048, False, "bfloat16", "h100", 1.8),
        ((Ternary(), TRITON), 2048, False, "bfloat16", "h100", 4.3),
        (NF4(), 2048, False, "bfloat16", "rtx4090", 10.3),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in MORE],
    ],
)
def test_compiled_without_spills(format, m, contract_rows, dtype, chip, most, capsys):
    format, compute = format if isinstance(format, tuple) else (format, Compute())
    q = jax.eval_shape(
        ft.partial(
            eqquant.quantize, format=format, check_finite=False, compute=compute
        ),
        jax.ShapeDtypeStruct((14336, 4096), dtype),
    )
    x = jax.ShapeDtypeStruct((m, 14336 if contract_rows else 4096), dtype)
    program = compile_for_gpu(
        lambda x, q: x @ (q if contract_rows else q.T), x, q, chip=chip
    )
    (kernel,) = (k for k in program.kernels if k.name.startswith(format.name))
    assert kernel.spilled == 0
    if compute.activations == "int8":
        x = jax.ShapeDtypeStruct(x.shape, "int8")
    # The table is declared once and fits in shared memory.
    table = table_bytes(format)
    assert kernel.ptx.count(" levels[") == (table > 0)
    launched = re.search(rf"{kernel.name} .*shared_memory: (\d+)", program.launches)
    assert launched is not None
    dynamic = int(launched[1])
    assert kernel.shared == table and table + dynamic < gpus[chip].shared - 1024
    # Below 48 KiB, JAX 0.10 does not request more shared memory. With JAX 0.11, such
    # kernels have run on an H200.
    requests_more = jax.__version_info__ >= (0, 11) or dynamic > 49152
    assert not table or requests_more or table + dynamic <= 49152
    centred = format.centred[0] if format.has_offsets else format
    matmul = Matmul(centred, contract_rows, compute, q.dtype, dtype)
    product = matmul.of(x, q.codes, jax.eval_shape(float_scales, q.scales))
    tiles = _choose.kernel_on(_chips.known(gpus[chip].name), product).tiles
    codes = tiles.rows * tiles.bytes * tiles.subtiles
    threads = 32 * tiles.warps
    loop = [name for name in max(sass.loops_in(kernel), key=len) if name != "NOP"]
    each = len(loop) * threads / (codes * _triton.planes_in(format))
    programs = gpus[chip].registers // (-(-kernel.registers // 8) * 8 * threads)
    in_flight = programs * codes * _triton.unit_bytes(format) * (tiles.stages - 1)
    with capsys.disabled():
        print(
            f"\n{format} {m=} {contract_rows=} {dtype} {chip}: {each:.2f} instructions "
            f"a weight, {kernel.registers} registers, {in_flight / 2**10:.0f} KiB in "
            "flight",
            end=" ",
        )
    assert each < most * (1 if jax.__version_info__ < (0, 11) else 1.1)
    # The bytes per core that arrive in a microsecond must be in flight. Products of
    # many rows are bound by compute.
    assert m > 128 or in_flight > 1e-6 * gpus[chip].bandwidth / gpus[chip].cores / 2


# `most` bounds the instructions of a pipeline step, and `between` the instructions
# between the products of two steps: 10 % above JAX 0.10.2.
@needs_gpu_compiler
@pytest.mark.parametrize(
    "format, dtype, most, between",
    [
        (NF4(), "bfloat16", 184, 37),
        *map(
            lambda case: pytest.param(*case, marks=pytest.mark.slow),
            [
                (Int4(), "bfloat16", 187, 39),
                (Int8(), "bfloat16", 172, 95),
                (Int8(block_size=64), "bfloat16", 183, 71),
                (Ternary(), "float16", 112, 68),
                (Binary(), "bfloat16", 113, 70),
                ((Int8(), W8A8), "bfloat16", 89, 80),
            ],
        ),
    ],
)
def test_compiled_mosaic_kernel_overlaps_decoding(format, dtype, most, between, capsys):
    format, compute = format if isinstance(format, tuple) else (format, Compute())
    q = jax.eval_shape(
        ft.partial(
            eqquant.quantize, format=format, check_finite=False, compute=compute
        ),
        jax.ShapeDtypeStruct((14336, 4096), dtype),
    )
    x = jax.ShapeDtypeStruct((2048, 4096), dtype)
    program = compile_for_gpu(lambda x, q: x @ q.T, x, q, chip="h100")
    integers = compute.activations == "int8"
    assert program.num_launches == (4 if integers else 1)
    (kernel,) = (k for k in program.kernels if "mosaic" in k.name)
    assert kernel.name == f"{format.name}_columns_mosaic_gpu_kernel"
    # The registers of three warpgroups fit at launch, before they are redistributed.
    assert kernel.spilled == 0 and kernel.registers * 384 <= gpus["h100"].registers
    # Mosaic declares a single byte of static memory, at which dynamic memory starts.
    assert kernel.shared == 1 and "levels" not in kernel.ptx
    multiplies = lambda loop: any("GMMA" in name for name in loop)
    step = min(filter(multiplies, sass.loops_in(kernel)), key=len)
    step = [name for name in step if name != "NOP"]
    at = {name: [i for i, x in enumerate(step) if name in x] for name in WAITS}
    # Four products share one wait. The assembler inserts more waits if instructions
    # write registers that a product still reads.
    first, *_, last = at["GMMA"]
    (wait,) = at["WARPGROUP.DEPBAR"]
    assert len(at["GMMA"]) == 4
    apart = (first - wait) % len(step)
    with capsys.disabled():
        print(f"\n{format} {dtype}: {len(step)} instructions, {apart} apart", end=" ")
    assert len(step) < most and apart < between
    # All codes are loaded between the start of the products and the wait.
    during = (step + step)[last : last + (wait - last) % len(step)]
    assert during.count("LDS.U16") == (0 if integers else 2 * format.bits)


@needs_gpu_compiler
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_compiled_mosaic_kernel_reads_a_stack_in_place(format):
    """Only scales of whole rows, 4 bytes per row of the weight, are copied."""
    quantize = ft.partial(eqquant.quantize, format=format, check_finite=False)
    stack = jax.eval_shape(quantize, jax.ShapeDtypeStruct((4, 2048, 2048), "bfloat16"))
    x = jax.ShapeDtypeStruct((512, 2048), "bfloat16")
    layers = lambda x, q: scan_layers(lambda x, w: (x @ w.T, None), x, q)[0]
    names = [k.name for k in compile_for_gpu(layers, x, stack, chip="h100").kernels]
    assert f"{format}_columns_mosaic_gpu_kernel" in names
    copies = [name for name in names if "slice" in name or "copy" in name]
    assert len(copies) == (format == "int8")


WAITS = "GMMA", "WARPGROUP.DEPBAR"


# `launches` bounds the kernels. `most` bounds the instructions per code of the kernel
# that writes codes: 10 % above JAX 0.10.2. No temporary has the size of the weight.
@needs_gpu_compiler
@pytest.mark.parametrize(
    "format, chip, dtype, launches, most",
    [
        (NF4(), "h100", "bfloat16", 4, 26.5),
        (Ternary(), "h100", "float32", 8, 14.6),
        pytest.param(NF4(), "a100", "float32", 4, 26.5, marks=pytest.mark.slow),
        pytest.param(MXFP4(), "h100", "float32", 4, 31, marks=pytest.mark.slow),
    ],
)
def test_compiled_encoding_has_no_large_temporaries(
    format, chip, dtype, launches, most
):
    quantize = ft.partial(eqquant.quantize, format=format, check_finite=False)
    weight = jax.ShapeDtypeStruct((14336, 4096), dtype)
    program = compile_for_gpu(quantize, weight, chip=chip)
    assert program.num_launches <= launches
    assert program.compiled.memory_analysis().temp_size_in_bytes < weight.size // 4
    (kernel,) = (k for k in program.kernels if k.name == "loop_or_fusion")
    instructions = [name for name in sass.names_in(kernel) if name != "NOP"]
    # Each thread writes four bytes.
    assert len(instructions) / (4 * 8 // format.bits) < most


def doubled_products_in(kernel) -> list[str]:
    """Return the instructions for int8 that multiply the same registers twice."""
    products = re.findall(r"mma\.sync[^;]*\.s8\.s8[^;]*;", kernel.ptx)
    operands = lambda text: re.findall(r"{([^}]*)}", text)[1].split(",")
    is_doubled = lambda text: len({*map(str.strip, operands(text))}) < 4
    return list(filter(is_doubled, products))


# A tile of XLA's Triton matmul with 16 int8 along the contracted axis doubles all sums.
@needs_gpu_compiler
@pytest.mark.parametrize("chip", ["h200", "a100"])
def test_no_short_sum_is_doubled(chip):
    shape = jax.ShapeDtypeStruct
    codes = shape((8, 32), "int8"), shape((8, 64), "int8")
    plain = compile_for_gpu(
        lambda a, b: lax.dot_general(
            a, b, (((0,), (0,)), ((), ())), preferred_element_type="int32"
        ),
        *codes,
        chip=chip,
    )
    assert any(map(doubled_products_in, plain.kernels)), "XLA works; use int8 again"

    def step(w, x):
        layer = low_precision(eqx.nn.Linear(64, 96, key=jax.random.key(0)), "int8")
        layer = eqx.tree_at(lambda layer: layer.weight.master, layer, w)
        return jnp.sum(jax.vmap(layer)(x) ** 2)

    floats = shape((96, 64), "float32"), shape((8, 64), "float32")
    q = eqquant.quantize(jnp.ones((32, 256)), "int8", activations="int8")
    programs = [
        compile_for_gpu(lambda a, b: codes_dot(a, b, (-2, -2)), *codes, chip=chip),
        compile_for_gpu(jax.grad(step, (0, 1)), *floats, chip=chip),
        compile_for_gpu(
            lambda x, q: x @ q.T, shape((150, 256), "float32"), q, chip=chip
        ),
    ]
    for program in programs:
        assert program.kernels and not any(map(doubled_products_in, program.kernels))
