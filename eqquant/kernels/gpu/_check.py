"""The check that a kernel passes before its first product on a device.

Not every GPU was available to test these kernels. So each kernel first multiplies small
arrays, and the result is compared with XLA: once per process and compiled program.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import apart, warn
from ...formats import Format, pack
from .. import xla
from .._compute import Compute
from .._product import Matmul
from ._kernel import TensorCoreKernel


def failure_of(
    kind: str,
    kernel: TensorCoreKernel,
    *,
    format: Format,
    contract_rows: bool,
    blocked: bool,
    dtypes: tuple,
) -> str | None:
    """Return why the kernel failed its check, or None if it passed."""
    kernel, *_ = kernel.sample(format)
    failure = _failure_of(kind, kernel, format, contract_rows, blocked, dtypes)
    if failure:
        warn(
            f"The kernel for {format!r} ({kernel.name}) failed its check on {kind!r}. "
            f"XLA computes these products instead: {failure}",
            UserWarning,
            once=True,
        )
    return failure


@ft.cache
def _failure_of(*args) -> str | None:
    return apart(_compare, *args)


def _compare(
    kind: str,
    kernel: TensorCoreKernel,
    format: Format,
    contract_rows: bool,
    blocked: bool,
    dtypes,
) -> str | None:
    del kind
    x_dtype, _, scale_dtype = dtypes
    kernel, m, rows, packed = kernel.sample(format)
    rng = np.random.default_rng(0)
    columns = packed * 8 // format.bits
    dtype = np.dtype(format.code_dtype)
    all_codes = np.arange(2**format.bits, dtype=np.uint8).view(dtype)
    used = np.setdiff1d(all_codes, np.array(format.unused_codes, dtype))
    codes = rng.choice(used, (1, rows, columns))
    if format.bits < 8:
        codes = pack(codes.reshape(1, rows, -1, format.group), format.bits)
        codes = codes.reshape(1, rows, packed)
    blocks = columns // format.block_size if format.block_size and blocked else 1
    scales = rng.uniform(0.5, 2, (1, rows, blocks))
    x = rng.standard_normal((1, m, rows if contract_rows else columns))
    x = jnp.asarray(x, x_dtype)
    codes, scales = jnp.asarray(codes), jnp.asarray(scales, scale_dtype)
    x_scales = []
    if kernel.operand == "int8":
        x = jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8)
        x_scales = [jnp.asarray(rng.uniform(0.5, 2, (1, m, 1)), jnp.float32)]
    out_dtype = jnp.float32
    if kernel.by == "Mosaic":
        out_dtype = jnp.bfloat16 if kernel.operand == "int8" else x_dtype
    with_kernel = ft.partial(
        kernel.dot,
        out_dtype=out_dtype,
        interpret=jax.default_backend() == "cpu",
        format=format,
        contract_rows=contract_rows,
    )
    matmul = Matmul(format, contract_rows, Compute("highest"))
    with_xla = ft.partial(xla.dot, matmul=matmul)
    wide = x.astype(jnp.float32)
    for scale in x_scales:
        wide = wide * scale
    expected = np.asarray(jax.jit(with_xla)(wide, codes, scales))
    try:
        out = np.asarray(jax.jit(with_kernel)(x, codes, scales, *x_scales), np.float32)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    # Significands have 8, 11 or 16 bits. Sums of integers are exact.
    bound = 1e-2 if kernel.parts == (1, 1) else 1e-4
    bound = {"float16": 1e-3, "int8": 1e-5}.get(kernel.operand, bound)
    if jnp.dtype(out_dtype) == jnp.bfloat16:
        bound = 1e-2
    return None if error < bound else f"its relative error is {error:.1e}"
