"""The check that a kernel passes before its first product on a device.

These kernels ran on one kind of GPU. So each kernel first multiplies small
arrays, and the result is compared with XLA: once per process and compiled program.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax import apart, warn
from ...formats import pack
from .. import xla
from .._product import Matmul, Product
from ._kernel import TensorCoreKernel


def failure_of(kind: str, kernel: TensorCoreKernel, product: Product) -> str | None:
    """Return why the kernel of a product failed its check, or None if it passed."""
    kernel, sample = kernel.sample(product)
    failure = _failure_of(kind, kernel, sample)
    if failure:
        warn(
            f"The kernel for {product.format!r} ({kernel.name}) failed its check on "
            f"{kind!r}. XLA computes these products instead: {failure}",
            UserWarning,
            once=True,
        )
    return failure


@ft.cache
def _failure_of(kind: str, kernel: TensorCoreKernel, product: Product) -> str | None:
    del kind
    return apart(_compare, kernel, product)


def _compare(kernel: TensorCoreKernel, product: Product) -> str | None:
    rng = np.random.default_rng(0)
    codes = _random_codes(rng, product)
    scales = rng.uniform(0.5, 2, product.scales.shape)
    scales = jnp.asarray(scales, product.scales.dtype)
    x = jnp.asarray(rng.standard_normal(product.x.shape), product.x.dtype)
    x_scales = []
    if kernel.operand == "int8":
        x = jnp.asarray(rng.integers(-127, 128, x.shape), jnp.int8)
        x_scales = [jnp.asarray(rng.uniform(0.5, 2, (1, product.m, 1)), jnp.float32)]
    interpret = jax.default_backend() == "cpu"
    dot = jax.jit(ft.partial(kernel.dot, product, interpret=interpret))
    matmul = Matmul(product.format, product.contract_rows, product.compute)
    wide = x.astype(jnp.float32)
    for scale in x_scales:
        wide = wide * scale
    reference = jax.jit(ft.partial(xla.dot, matmul=matmul))
    expected = np.asarray(reference(wide, codes, scales))
    try:
        out = np.asarray(dot(x, codes, scales, *x_scales), np.float32)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    # Significands have 8, 11 or 16 bits. Sums of integers are exact.
    bound = 1e-2 if kernel.parts == (1, 1) else 1e-4
    bound = {"float16": 1e-3, "int8": 1e-5}.get(kernel.operand, bound)
    if product.out_dtype == jnp.bfloat16:
        bound = 1e-2
    return None if error < bound else f"its relative error is {error:.1e}"


def _random_codes(rng: np.random.Generator, product: Product) -> jax.Array:
    """Return codes with levels, in the layout of a weight."""
    format = product.format
    codes = rng.choice(format.used_codes, (1, product.rows, product.columns))
    if format.bits < 8:
        codes = codes.reshape(1, product.rows, -1, format.group)
        codes = pack(codes, format.bits).reshape(product.codes.shape)
    return jnp.asarray(codes)
