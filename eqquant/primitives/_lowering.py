"""What `quantized_dot` becomes on each platform: which kernel, and after what."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from .._jax import is_automatically_partitioned, is_exported
from ..kernels import Compute, cpu, gpu, tpu, xla
from ._sharded import on_each_device, plan_for, plan_from_types, sharded


def dot_by(kernel) -> Callable:
    """The product by a kernel, after what a format says is done to the activation. Its
    rows are split over the mesh axes `over`, inside of `shard_map`."""

    def dot(x, codes, scales, *, over=(), plan=None, **params):
        del plan
        params = _for_parts(kernel, over, params)
        if params["compute"].activations == "int8":
            x, params["x_unit"] = kernel.round_int8(x, over)
        return kernel.dot(x, codes, scales, **params)

    return dot


def _seen(x, compute: Compute):
    """The activation as a kernel gets it: its shape and dtype."""
    dtype = jnp.int8 if compute.activations == "int8" else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _dot_on(kernel) -> Callable:
    """The product by the kernel of a platform, or by XLA's where it has none."""

    def dot(x, codes, scales, *, over=(), plan=None, **params):
        del plan
        params = _for_parts(kernel, over, params)
        seen = _seen(x, params["compute"])
        reason = kernel.why_not(seen, codes, scales, **params)
        by = dot_by(xla if reason else kernel)
        return by(x, codes, scales, over=over, **params)

    return dot


def _for_parts(kernel, over: tuple[str, ...], params: dict) -> dict:
    """The parameters for a part of each row: if that is in int8, some kernels would
    round it again, by what is largest in the part."""
    if kernel is not tpu and over and params["compute"].activations == "int8":
        return params | {"compute": params["compute"].updated(precision="highest")}
    return params


def _lower_by(dot: Callable) -> Callable:
    return mlir.lower_fun(dot, multiple_results=False)


def _lower_on(native: Callable, exported: Callable | None = None) -> Callable:
    """The lowering for a platform, by a product on one device; in what is exported by
    another one, if there is one."""
    portable = dot_by(xla)

    def lower(ctx, *args, plan=None, **params):
        dot = exported if is_exported(ctx) and exported else native
        if is_automatically_partitioned(ctx):
            plan = plan_for(ctx, plan, *ctx.avals_in)
            # The compiler cannot split a kernel over devices; what XLA made it can.
            dot = portable if plan is None else sharded(dot, plan)
        return _lower_by(dot)(ctx, *args, **params)

    return lower


# The kernels of platforms that have their own. XLA's serve on all others.
_kernels = {"cpu": cpu, "gpu": gpu, "tpu": tpu}
lowerings = {
    None: _lower_on(dot_by(xla)),
    # What is exported may run where there is no library of native kernels, or on
    # another GPU.
    "cpu": _lower_on(_dot_on(cpu), exported=dot_by(xla)),
    "gpu": _lower_on(_dot_on(gpu), exported=_dot_on(gpu.portable)),
    "tpu": _lower_on(_dot_on(tpu)),
}


def implementation_on(platform: str) -> Callable:
    """What a product is lowered to on a platform, as a function of raw arrays."""
    kernel = _kernels.get(platform)
    return dot_by(xla) if kernel is None else _dot_on(kernel)


def lowering_of(
    x, codes, scales, *, platform: str, plan=None, devices: int = 1, **params
) -> str:
    """What a product becomes on a platform, in words, and how activations are rounded.
    Only shapes and dtypes count. On so many `devices`, unless the mesh of the operands
    is one with explicit axes, a plan says how it is split."""
    plan = plan_from_types(x, codes, asked=plan) or plan
    if plan is not None and devices > 1:
        shards, over, split = on_each_device(plan, x, codes, scales, **params)
        params = _for_parts(_kernels.get(platform, xla), over, params)
        return lowering_of(*shards, platform=platform, **params) + split
    if devices > 1:
        return xla.describe(_seen(x, params["compute"]), codes, scales, **params) + (
            f", as nothing says how it is split over {devices} devices: call "
            "eqquant.shard_tree"
        )
    operands = _seen(x, params["compute"]), codes, scales
    because = ""
    if platform in _kernels:
        kernel = _kernels[platform]
        reason = kernel.why_not(*operands, **params)
        if reason is None:
            return kernel.describe(*operands, **params)
        because = f", as {reason}"
    return xla.describe(*operands, **params) + because
