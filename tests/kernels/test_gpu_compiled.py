"""What the real compiler makes of the kernel for GPUs, where it is installed."""

import functools as ft
import re

import eqquant
import jax
import pytest
from eqquant import Binary, Int8, NF4, Ternary
from eqquant._jax import gpus
from eqquant.debug import compile_for_gpu
from eqquant.kernels.gpu import _chips
from eqquant.kernels.gpu._lookup import in_table
from eqquant.kernels.gpu._table import size_of
from helpers import needs_gpu_compiler


MORE = [
    (Int8(), 1, False, "bfloat16", "a100", 6.3),
    (Int8(), 16, True, "bfloat16", "h100", 7.3),
    (Ternary(), 16, False, "float16", "a100", 5.0),
    (Binary(), 16, True, "bfloat16", "h100", 9.0),
    (NF4(), 1, False, "float32", "h100", 6.7),
    (NF4(), 16, False, "bfloat16", "rtx4090", 5.5),
    (NF4(), 64, False, "bfloat16", "h100", 5.3),
]


# Instructions for a weight at most: a tenth more than there were with jax 0.10.2.
@needs_gpu_compiler
@pytest.mark.parametrize(
    "format, m, contract_rows, dtype, chip, most",
    [
        (NF4(), 16, False, "bfloat16", "h100", 4.5),
        (NF4(), 16, False, "bfloat16", "a100", 5.5),
        (Int8(), 1, False, "bfloat16", "h100", 4.7),
        (Ternary(), 16, False, "bfloat16", "h100", 2.0),
        (Binary(), 1, False, "bfloat16", "h100", 1.8),
        (NF4(), 16, True, "bfloat16", "a100", 7.6),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in MORE],
    ],
)
def test_compiled_without_spills(format, m, contract_rows, dtype, chip, most, capsys):
    q = jax.eval_shape(
        ft.partial(eqquant.quantize, format=format, check_finite=False),
        jax.ShapeDtypeStruct((14336, 4096), dtype),
    )
    x = jax.ShapeDtypeStruct((m, 14336 if contract_rows else 4096), dtype)
    program = compile_for_gpu(
        lambda x, q: x @ (q if contract_rows else q.T), x, q, chip=chip
    )
    (kernel,) = (k for k in program.kernels if k.name.startswith(format.name))
    assert kernel.spilled == 0
    # The table is declared once, and there is room for it.
    table = size_of(format.bits) if in_table(format) else 0
    assert kernel.ptx.count(" levels[") == (table > 0)
    launched = re.search(rf"{kernel.name} .*shared_memory: (\d+)", program.launches)
    assert launched is not None
    dynamic = int(launched[1])
    assert kernel.shared == table and table + dynamic < gpus[chip].shared - 1024
    # Otherwise some versions of JAX would not ask for as much.
    assert dynamic > 49152 or table + dynamic <= 49152
    tiles = _chips.tiles_for(
        _chips.known(gpus[chip].name),
        m,
        *q.codes.shape,
        batch=1,
        format=format,
        contract_rows=contract_rows,
        itemsize=x.dtype.itemsize,
    )
    codes = tiles.rows * tiles.bytes * tiles.subtiles
    threads = 32 * tiles.warps
    loop = [name for name in max(kernel.loops, key=len) if name != "NOP"]
    each = len(loop) * threads / (codes * 8 / format.bits)
    programs = gpus[chip].registers // (-(-kernel.registers // 8) * 8 * threads)
    in_flight = programs * codes * (tiles.stages - 1)
    with capsys.disabled():
        print(
            f"\n{format} {m=} {contract_rows=} {dtype} {chip}: {each:.2f} instructions "
            f"a weight, {kernel.registers} registers, {in_flight / 2**10:.0f} KiB in "
            "flight",
            end=" ",
        )
    assert each < most
    # What arrives in a microsecond, of which a core has its part.
    assert in_flight > 1e-6 * gpus[chip].bandwidth / gpus[chip].cores / 2
