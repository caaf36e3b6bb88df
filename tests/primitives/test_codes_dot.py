"""Products of int8 codes on a CPU."""

import functools as ft

import jax
import numpy as np
import pytest
from eqquant.kernels import cpu
from eqquant.primitives import _codes_dot, codes_dot


OVER = [(-1, -1), (-1, -2), (-2, -1), (-2, -2)]


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_native_kernel_computes_exact_sums(over, lead, rng):
    def codes(rows: int, axis: int):
        of_rows = rng.integers(-127, 128, (*lead, rows, 96), np.int8)
        of_rows[..., 0] = 127  # The largest magnitude of each row.
        return of_rows if axis == -1 else of_rows.swapaxes(-1, -2)

    a, b = map(codes, (7, 5), over)
    program = jax.jit(ft.partial(codes_dot, over=over)).lower(a, b)
    _, kernel = _codes_dot._choose_on_cpu(a, b, over)
    if not isinstance(kernel, cpu.NativeKernel):
        pytest.skip(f"no native kernel: {kernel}")
    assert "eqquant_dot" in program.as_text()
    rows = lambda x, axis: np.asarray(x if axis == -1 else x.swapaxes(-1, -2), np.int64)
    expected = rows(a, over[0]) @ rows(b, over[1]).swapaxes(-1, -2)
    # Sums are less than 2**24 here, so float32 contains them exactly.
    np.testing.assert_array_equal(program.compile()(a, b), expected)
