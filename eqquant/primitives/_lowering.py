"""What `quantized_dot` becomes on each platform: which kernel, and after what."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from .._jax import is_automatically_partitioned, is_exported
from ..formats import Format
from ..kernels import cpu, tpu, xla


def dot_by(kernel) -> Callable:
    """The product by a kernel, after what a format says is done to the activation."""

    def dot(x, codes, scales, *, format: Format, **params):
        params |= {"format": format}
        if format.activations == "int8":
            x, params["x_unit"] = kernel.round_int8(x)
        return kernel.dot(x, codes, scales, **params)

    return dot


def _seen(x, format: Format):
    """The activation as a kernel gets it: its shape and dtype."""
    dtype = jnp.int8 if format.activations == "int8" else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _dot_on(kernel) -> Callable:
    """The product by the kernel of a platform, or by XLA's where it has none."""

    def dot(x, codes, scales, **params):
        seen = _seen(x, params["format"])
        reason = kernel.why_not(seen, codes, scales, **params)
        return dot_by(xla if reason else kernel)(x, codes, scales, **params)

    return dot


def _lower_by(dot: Callable) -> Callable:
    return mlir.lower_fun(dot, multiple_results=False)


def _lower_on(kernel, *, exports: bool) -> Callable:
    """The lowering for a platform that has a kernel of its own."""
    portable, native = _lower_by(dot_by(xla)), _lower_by(_dot_on(kernel))

    def lower(ctx, *args, **params):
        # The compiler cannot split a kernel over devices; what XLA made it can.
        is_split = is_automatically_partitioned(ctx)
        anywhere = is_split or (not exports and is_exported(ctx))
        return (portable if anywhere else native)(ctx, *args, **params)

    return lower


# The kernels of platforms that have their own. XLA's serve on all others.
_kernels = {"cpu": cpu, "tpu": tpu}
lowerings = {
    None: _lower_by(dot_by(xla)),
    # What is exported may run where there is no library of native kernels.
    "cpu": _lower_on(cpu, exports=False),
    "tpu": _lower_on(tpu, exports=True),
}


def implementation_on(platform: str) -> Callable:
    """What a product is lowered to on a platform, as a function of raw arrays."""
    kernel = _kernels.get(platform)
    return dot_by(xla) if kernel is None else _dot_on(kernel)


def lowering_of(x, codes, scales, *, platform: str, **params) -> str:
    """What a product becomes on a platform, in words, and how activations are rounded.
    Only shapes and dtypes count."""
    operands = _seen(x, params["format"]), codes, scales
    because = ""
    if platform in _kernels:
        kernel = _kernels[platform]
        reason = kernel.why_not(*operands, **params)
        if reason is None:
            return kernel.describe(*operands, **params)
        because = f", as {reason}"
    return xla.describe(*operands, **params) + because
