"""The only file that knows the version of JAX.

Every private or version-dependent piece of JAX that eqquant uses is here, with the
versions on which it was tried: 0.10.2, 0.11.2, 0.12.0 (unless said otherwise).
"""

import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, mlir


def config(name: str) -> Any:
    """An option of JAX, which type checkers do not see."""
    return getattr(jax.config, name)


def is_traced(x) -> bool:
    return isinstance(x, getattr(jax, "core").Tracer)  # noqa: B009


# JAX has a mark of its own, which it does not set.
_finished: weakref.WeakSet = weakref.WeakSet()


def finish(tracers) -> None:
    """Note that what `tracers` are part of is no longer traced."""
    _finished.update(x._trace for x in tracers)


def is_stale(x) -> bool:
    """Whether no value can come of `x`, a tracer of what is no longer traced."""
    return is_traced(x) and x._trace in _finished


def zero_tangent(x):
    """The symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


#
# Manual axes inside shard_map
#


def varying_axes(x) -> frozenset:
    """The mesh axes over which `x` varies inside `shard_map(check_vma=True)`."""
    aval = jax.typeof(x)
    manual = getattr(aval, "mat", None)  # From 0.10.2; `vma` before.
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", frozenset()))


def match_varying(*args):
    """Cast the arguments to vary over the same axes, as lax does for its own
    primitives: otherwise the transpose of a product misses a psum."""
    axes = frozenset().union(*map(varying_axes, args))

    missing = [tuple(axes - varying_axes(x)) for x in args]
    return tuple(
        lax.pcast(x, names, to="varying") if names else x
        for x, names in zip(args, missing, strict=True)
    )


#
# Meshes with explicit axes
#


def has_explicit_axes() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def mapped_mesh_axes() -> frozenset[str]:
    """The explicit axes that split what a `jax.vmap` around maps over."""
    from jax._src import core

    return frozenset(core.get_axis_env().explicit_mesh_axis_names)


def _type_of(x) -> Any:
    """Of a value, or itself."""
    is_type = hasattr(x, "to_tangent_aval") and not isinstance(x, jax.Array)
    return x if is_type else jax.typeof(x)


def spec_of(x) -> tuple:
    """How `x` is split, one entry for each of its axes."""
    aval = _type_of(x)
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def explicit_mesh_of(x):
    """The mesh over which `x` is explicitly split, if it is."""
    mesh = _type_of(x).sharding.mesh
    return mesh if jax.sharding.AxisType.Explicit in mesh.axis_types else None


def manual_axes_in_context() -> frozenset[str]:
    """The mesh axes that a `shard_map` around has split by hand."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def is_manual(x) -> bool:
    """Whether `x` is what one device has, inside of `shard_map`."""
    mesh = _type_of(x).sharding.mesh
    return not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)


def num_devices_of(x) -> int:
    """On how many devices an array is, or is to be."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.mesh.size
    return getattr(sharding, "num_devices", 1)


def parts_of(mesh, entry) -> int:
    """In how many parts an entry of a `PartitionSpec` splits an axis."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def by_compiler(fn: Callable, mesh, out_specs) -> Callable:
    """`fn` on arrays that are explicitly split over a mesh, with results that are split
    by `out_specs`. How what is in between is split is left to the compiler."""

    def call(*args):
        with jax.sharding.use_abstract_mesh(mesh):
            split: Any = jax.sharding.auto_axes(fn, out_sharding=out_specs)
            return split(*args)

    return call


#
# Jaxprs
#


def open_jaxpr(jaxpr) -> tuple[Any, list]:
    """The jaxpr and its constants. From 0.11 on the two are one class."""
    if hasattr(jaxpr, "jaxpr"):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, list(getattr(jaxpr, "consts", ()))


def subjaxprs(params: dict):
    """The jaxprs among the parameters of an equation, with their constants."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns") and hasattr(inner, "invars"):
                yield item


def bind_equation(eqn, args) -> list:
    """Evaluate one equation as JAX's own interpreter does, custom derivative rules
    kept."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def frames_of(eqn) -> list[str]:
    """The frames in which an equation was traced, as `file:line (function)`, without
    those of JAX, the innermost first. Empty if they are not known."""
    try:
        from jax._src import source_info_util

        return source_info_util.summarize(eqn.source_info, 100).splitlines()[::-1]
    except Exception:
        return []


Literal = jex_core.Literal


#
# Parameters of the control-flow primitives
#


def split_scan(params: dict, args: list) -> tuple[list, list, list]:
    """The arguments of a scan: constants, carry, scanned-over."""
    if "num_consts" in params:
        n, m = params["num_consts"], params["num_consts"] + params["num_carry"]
        return args[:n], args[n:m], args[m:]
    groups = params["ft_in"].update(list(args)).unpack()  # From 0.11.
    consts, carry, xs = (list(group.vals) for group in groups)
    return consts, carry, xs


def called_jaxpr(params: dict):
    """That of a call. `eval_jaxpr` had another name for it before 0.11."""
    return params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]


def shard_map_manual_axes(params: dict):
    if "newly_manual_axes" in params:  # From 0.10.2.
        return params["newly_manual_axes"]
    return params["manual_axes"]


def zero_of(var):
    """The symbolic zero that is a tangent, or a cotangent, of a variable of a jaxpr."""
    return SymbolicZero(var.aval.to_tangent_aval())


def _as_rule_takes(tangents, params: dict) -> list:
    """Tangents of which some are symbolic zeros, which few rules take."""
    if params["symbolic_zeros"]:
        return list(tangents)
    return [_instantiate(t) if isinstance(t, SymbolicZero) else t for t in tangents]


def _instantiate(zero):
    if zero.dtype == jax.dtypes.float0:
        return np.zeros(zero.shape, zero.dtype)
    return jnp.zeros(zero.shape, zero.dtype)


def custom_jvp_rule(eqn) -> Callable:
    """`rule(primals, tangents) -> (primals_out, tangents_out)`, all flat. A tangent may
    be a `SymbolicZero`."""
    params = eqn.primitive.get_bind_params(eqn.params)
    _, jvp = params["subfuns"]

    def rule(primals, tangents):
        out = list(jvp.call_wrapped(*primals, *_as_rule_takes(tangents, params)))
        return out[: len(out) // 2], out[len(out) // 2 :]

    return rule


def custom_vjp_rules(eqn) -> tuple[Callable, Callable]:
    """The flat forward and backward rules of a `custom_vjp_call`.

    `forward(perturbed, *args) -> (outputs, residuals)`, where `perturbed` says of each
    argument whether it is differentiated; `backward(residuals, cotangents) ->` a
    cotangent for each argument, or None. The cotangents may be `SymbolicZero`.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    _, fwd, bwd = params["subfuns"]

    def forward(perturbed, *args):
        pairs = [z for pair in zip(args, perturbed, strict=True) for z in pair]
        flat = list(fwd.call_wrapped(*pairs))
        _, residual_tree, forwarded = params["out_trees"]()
        new = residual_tree.num_leaves - sum(i is not None for i in forwarded)
        fresh = iter(flat[:new])
        residuals = [next(fresh) if i is None else args[i] for i in forwarded]
        return flat[new:], residuals

    def backward(residuals, cotangents):
        cotangents = _as_rule_takes(cotangents, params)
        out = list(bwd.call_wrapped(*residuals, *cotangents))
        if out and isinstance(out[0], list | tuple):  # From 0.11: (cotangents, aux).
            out = list(out[0])
        return [None if isinstance(c, ad.Zero) else c for c in out]

    return forward, backward


#
# Lowering
#


def device_kind() -> str:
    """Of what is compiled for: the devices of the mesh in context, as when compiling
    ahead of time, or the default one."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described.device_kind
    return jax.devices()[0].device_kind


def platform_of(array: Any) -> str:
    """Of an array's devices, such as `"cpu"` or `"gpu"`; if it is traced, of what is
    compiled for."""
    if not is_traced(array):
        return next(iter(array.devices())).platform
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = getattr(described, "platform", None) or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def gpu_capability() -> tuple[str, str | None]:
    """What is compiled for, as `device_kind` says, and if that is a GPU of NVIDIA's
    which is here, its compute capability, such as `"9.0"`."""
    kind = device_kind()
    for device in jax.devices():
        if device.platform == "gpu" and device.device_kind == kind:
            capability = str(getattr(device, "compute_capability", ""))
            return kind, capability if capability[:1].isdigit() else None
    return kind, None


def gpu_cores() -> int | None:
    """Of a GPU that is here, if JAX knows."""
    for device in jax.devices():
        if device.platform == "gpu":
            return getattr(device, "core_count", None)
    return None


def mosaic_gpu_kernel(body, out, scratch, *, interpret: bool, **options):
    """`plgpu.kernel`, which calls its arguments otherwise before 0.10.2; without a GPU
    if `interpret`."""
    # Not every jaxlib has Mosaic for GPUs.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    names = "out_type", "scratch_types"
    if names[0] not in inspect.signature(plgpu.kernel).parameters:
        names = "out_shape", "scratch_shapes"
    options |= dict(zip(names, (out, scratch), strict=True))
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        options["interpret"] = InterpretGPUParams()
    return plgpu.kernel(body, **options)


def is_automatically_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the compiler, rather than shard_map, splits this program over devices."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices != 1
    if isinstance(axes, mlir.SPMDAxisContext):
        manual = axes.manual_axes | set(axes.mesh.manual_axes)
        return manual != frozenset(axes.mesh.axis_names)
    return False


def num_devices(ctx: mlir.LoweringRuleContext) -> int:
    """For how many devices this program is."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        return axes.mesh.size
    return getattr(axes, "num_devices", 1)


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether this program is lowered by `jax.export`, to run elsewhere."""
    return ctx.module_context.lowering_parameters.for_export
