"""The only file that depends on the version of JAX.

It holds every private or version-dependent piece of JAX that eqquant uses. Each was
tried on JAX 0.10.2, 0.11.2 and 0.12.0, unless a comment gives other versions.
"""

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, mlir


def config(name: str) -> Any:
    """Return the value of an option of JAX. Type checkers do not find these options."""
    return getattr(jax.config, name)


def is_traced(x) -> bool:
    """Return whether `x` is a tracer."""
    return isinstance(x, getattr(jax, "core").Tracer)  # noqa: B009


# Traces that are over. JAX has a field for this, but does not set it.
_finished: weakref.WeakSet = weakref.WeakSet()


def finish(tracers) -> None:
    """Record that the traces of `tracers` are over."""
    _finished.update(x._trace for x in tracers)


def is_stale(x) -> bool:
    """Return whether `x` is a tracer that leaked from a finished trace."""
    return is_traced(x) and x._trace in _finished


def zero_tangent(x):
    """Return the symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


#
# Calls that rebuild an array from its leaves
#


def _caller_of_unflatten() -> Any:
    """Return the frame in which JAX rebuilds the array that calls the caller; None if
    the array was made otherwise."""
    # Equinox generates `unflatten`. Checks of types add frames below it.
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_code.co_name == "unflatten" or frame.f_back is None:
            break
        frame = frame.f_back
    return frame.f_back if frame.f_code.co_name == "unflatten" else None


def mapped_leaves() -> list[list]:
    """Return the leaves of each argument of the `jax.tree.map` that is rebuilding the
    array in it that calls this function. Otherwise return an empty list."""
    frame = _caller_of_unflatten()
    if frame is None:
        return []
    found = frame.f_locals
    if frame.f_code.co_name == "tree_map":
        return found.get("all_leaves", [])
    if frame.f_code.co_name == "tree_map_with_path":  # Paths come first.
        return [list(x) for x in found.get("all_keypath_leaves", [])[1:]]
    return []


def is_psum() -> bool:
    """Return whether `lax.psum` is rebuilding the array in it that calls this
    function."""
    frame = _caller_of_unflatten()
    caller = None if frame is None else frame.f_back
    return caller is not None and "psum" in caller.f_code.co_name


def unmapped(x: Any) -> Any:
    """Return the value of all rows of a tracer of `vmap`. Return other values.

    If it is known, mapped axes come first.
    """
    from jax._src.interpreters.batching import BatchTracer

    if not isinstance(x, BatchTracer):
        return x
    value, axis = unmapped(x.val), x.batch_dim
    if not isinstance(axis, int) or is_traced(value):
        return value
    outer = value.ndim - x.val.ndim
    return jnp.moveaxis(value, axis + outer, outer) if axis else value


def equation_of(x: Any) -> Any:
    """Return the equation of a tracer of `jit`, or None."""
    return getattr(x, "parent", None)


def vmapped_axes(parts: Callable[[], list]) -> tuple[str, list] | None:
    """Return the axis that `vmap` maps of each part of an array, or None for a part
    that is not mapped, and the name of the argument of `vmap` with these axes.

    Return None unless `vmap` is rebuilding an argument or a result of its function, and
    the array in it has called this function.
    """
    frame = _caller_of_unflatten()
    if frame is None or frame.f_code.co_name != "tree_unflatten":
        return None
    frame = frame.f_back
    assert frame is not None
    caller = frame.f_code.co_name
    if caller == "flatten_fun_for_vmap":
        return "in_axes", _axes_of_arguments(parts())
    if caller == "vmap_f":
        return "out_axes", _axes_of_results(parts(), frame.f_locals)
    return None


def _axes_of_arguments(parts: list) -> list:
    from jax._src import core
    from jax._src.interpreters.batching import BatchTracer

    trace = core.trace_ctx.trace  # Of this `vmap`, not of an outer one.
    is_mapped = lambda x: isinstance(x, BatchTracer) and x._trace is trace
    return [x.batch_dim if is_mapped(x) else None for x in parts]


def _axes_of_results(parts: list, found: Mapping) -> list:
    from jax._src.api_util import flatten_axes

    results = [id(x) for x in found.get("out_flat", ())]
    if any(id(x) not in results for x in parts):
        return []
    axes = flatten_axes("vmap out_axes", found["out_tree"](), found["out_axes"])
    axes = [axes[results.index(id(x))] for x in parts]
    both = zip(axes, parts, strict=True)
    return [axis % x.ndim if isinstance(axis, int) else None for axis, x in both]


#
# Manual axes inside shard_map
#


def varying_axes(x) -> frozenset:
    """Return the mesh axes over which `x` varies in `shard_map(check_vma=True)`."""
    aval = jax.typeof(x)
    manual = getattr(aval, "mat", None)  # Since 0.10.2; `vma` before.
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", frozenset()))


def match_varying(*args):
    """Cast the arguments to vary over the same mesh axes.

    `jax.lax` does this for its own primitives. Without it, the transpose of a product
    misses a psum.
    """
    axes = frozenset().union(*map(varying_axes, args))
    return tuple(as_varying(x, axes) for x in args)


def as_varying(x, axes: frozenset):
    """Cast `x` to vary over at least these mesh axes."""
    missing = tuple(axes - varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


#
# Meshes with explicit axes
#


def has_explicit_axes() -> bool:
    """Return whether the mesh in context has an explicit axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def mapped_mesh_axes() -> frozenset[str]:
    """Return the explicit mesh axes that split the mapped axis of an outer `vmap`."""
    from jax._src import core

    return frozenset(core.get_axis_env().explicit_mesh_axis_names)


def _type_of(x) -> Any:
    """Return the type of a value; a type is returned unchanged."""
    is_type = hasattr(x, "to_tangent_aval") and not isinstance(x, jax.Array)
    return x if is_type else jax.typeof(x)


def spec_of(x) -> tuple:
    """Return the `PartitionSpec` entry of each axis of `x`."""
    aval = _type_of(x)
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def type_of_first(x):
    """Return the type of `x[0]`, even if `x` is empty."""
    aval: Any = jax.typeof(x)
    spec = jax.sharding.PartitionSpec(*spec_of(x)[1:])
    return aval.update(shape=x.shape[1:], sharding=aval.sharding.update(spec=spec))


def explicit_mesh_of(x):
    """Return the mesh of `x` if that has an explicit axis; otherwise None."""
    mesh = _type_of(x).sharding.mesh
    return mesh if jax.sharding.AxisType.Explicit in mesh.axis_types else None


def manual_axes_in_context() -> frozenset[str]:
    """Return the mesh axes that an outer `shard_map` has made manual."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def is_manual(x) -> bool:
    """Return whether `x` is the local shard of one device, inside of `shard_map`."""
    mesh = _type_of(x).sharding.mesh
    return not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)


def num_devices_of(x) -> int:
    """Return the number of devices of an array, or of the sharding of its struct."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.mesh.size
    return getattr(sharding, "num_devices", 1)


def parts_of(mesh, entry) -> int:
    """Return the number of shards that an entry of a `PartitionSpec` makes."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def by_compiler(fn: Callable, mesh, out_specs) -> Callable:
    """Let the compiler choose the shardings inside of `fn`.

    The arguments are sharded explicitly over `mesh`, and the results by `out_specs`.
    """

    def call(*args):
        with jax.sharding.use_abstract_mesh(mesh):
            split: Any = jax.sharding.auto_axes(fn, out_sharding=out_specs)
            return split(*args)

    return call


#
# Jaxprs
#


def open_jaxpr(jaxpr) -> tuple[Any, list]:
    """Return an open jaxpr and its constants. JAX 0.11 merged the two classes."""
    if hasattr(jaxpr, "jaxpr"):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, list(getattr(jaxpr, "consts", ()))


def subjaxprs(params: dict):
    """Yield the jaxprs in the parameters of an equation, with their constants."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns") and hasattr(inner, "invars"):
                yield item


def bind_equation(eqn, args) -> list:
    """Evaluate one equation like JAX's own interpreter, and keep custom derivatives."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def frames_of(eqn) -> list[str]:
    """Return the stack frames in which an equation was traced.

    Each is `file:line (function)`, the innermost first. Frames inside of JAX are left
    out. The list is empty if the equation has no source information.
    """
    try:
        from jax._src import source_info_util

        return source_info_util.summarize(eqn.source_info, 100).splitlines()[::-1]
    except Exception:
        return []


Literal = jex_core.Literal


#
# Policies of `jax.checkpoint`
#


def register_product(primitive, dimension_numbers: Callable[[Any], tuple]) -> None:
    """Let policies decide about a product as about a dense product of its first two
    operands, and as about an array with the name of the primitive.

    `dimension_numbers(eqn)` returns this parameter of `lax.dot_general_p`.
    """
    from jax._src.ad_checkpoint import name_p
    from jax._src.interpreters import partial_eval as pe

    def rule(policy, unknown, available, eqn):
        """Return the equations before the gradient and in it, whether the result is
        unknown before and available in it, and the variables to save."""
        both = zip(eqn.invars, available, strict=True)
        needed = [x for x, has in both if not has and not isinstance(x, Literal)]
        if any(unknown):
            return None, eqn, [True], [True], needed
        avals = [x.aval for x in eqn.invars[:2]]
        params = {
            "dimension_numbers": dimension_numbers(eqn),
            "precision": None,
            "preferred_element_type": None,
            "out_sharding": None,
        }
        answers = [
            policy(lax.dot_general_p, *avals, **params),
            policy(name_p, eqn.outvars[0].aval, name=primitive.name),
        ]
        if any(x is True or isinstance(x, pe.SaveableType) for x in answers):
            return eqn, None, [False], [False], []
        for x in answers:
            if isinstance(x, pe.Offloadable):
                before, after, saved = _offloaded(eqn, x.src, x.dst)
                return before, after, [False], [True], [saved]
        return eqn, eqn, [False], [True], needed

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def _offloaded(eqn, source: str, target: str) -> tuple:
    """Return an equation that also copies the result to another memory, an equation
    that copies it back, and the variable of the copy."""
    space = {"pinned_host": jax.memory.Space.Host}
    place = [space.get(kind, jax.memory.Space.Device) for kind in (target, source)]

    def evaluate(*args):
        (out,) = bind_equation(eqn, args)
        return out, jax.device_put(out, place[0])

    traced = jax.make_jaxpr(jax.jit(evaluate))(*(x.aval for x in eqn.invars))
    before = traced.eqns[0]
    _, copy = before.outvars
    traced = jax.make_jaxpr(lambda x: jax.device_put(x, place[1]))(copy.aval)
    before = before.replace(invars=eqn.invars, outvars=[*eqn.outvars, copy])
    return before, traced.eqns[0].replace(invars=[copy], outvars=eqn.outvars), copy


#
# Parameters of the control-flow primitives
#


def split_scan(params: dict, args: list) -> tuple[list, list, list]:
    """Split the arguments of a scan into constants, carry and scanned inputs."""
    if "num_consts" in params:
        n, m = params["num_consts"], params["num_consts"] + params["num_carry"]
        return args[:n], args[n:m], args[m:]
    groups = params["ft_in"].update(list(args)).unpack()  # Since 0.11.
    consts, carry, xs = (list(group.vals) for group in groups)
    return consts, carry, xs


def called_jaxpr(params: dict):
    """Return the jaxpr of a call. JAX 0.11 renamed the parameter."""
    return params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]


def shard_map_manual_axes(params: dict):
    """Return the mesh axes that a `shard_map` equation makes manual."""
    if "newly_manual_axes" in params:  # Since 0.10.2.
        return params["newly_manual_axes"]
    return params["manual_axes"]


def zero_of(var):
    """Return the symbolic zero tangent (or cotangent) of a variable of a jaxpr."""
    return SymbolicZero(var.aval.to_tangent_aval())


def _tangents_for_rule(tangents, params: dict) -> list:
    """Replace symbolic zeros by arrays, unless the rule accepts symbolic zeros."""
    if params["symbolic_zeros"]:
        return list(tangents)
    return [_instantiate(t) if isinstance(t, SymbolicZero) else t for t in tangents]


def _instantiate(zero):
    if zero.dtype == jax.dtypes.float0:
        return np.zeros(zero.shape, zero.dtype)
    return jnp.zeros(zero.shape, zero.dtype)


def custom_jvp_rule(eqn) -> Callable:
    """Return the rule of a `custom_jvp_call`, on flat lists.

    It is `rule(primals, tangents) -> (primals_out, tangents_out)`. A tangent may be a
    `SymbolicZero`.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    _, jvp = params["subfuns"]

    def rule(primals, tangents):
        out = list(jvp.call_wrapped(*primals, *_tangents_for_rule(tangents, params)))
        return out[: len(out) // 2], out[len(out) // 2 :]

    return rule


def custom_vjp_rules(eqn) -> tuple[Callable, Callable]:
    """Return the forward and backward rules of a `custom_vjp_call`, on flat lists.

    They are `forward(perturbed, *args) -> (outputs, residuals)`, where `perturbed` has
    a bool for each argument (whether it is differentiated), and
    `backward(residuals, cotangents)`, which returns a cotangent or None for each
    argument. The cotangents may be `SymbolicZero`.
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
        cotangents = _tangents_for_rule(cotangents, params)
        out = list(bwd.call_wrapped(*residuals, *cotangents))
        if out and isinstance(out[0], list | tuple):  # Since 0.11: (cotangents, aux).
            out = list(out[0])
        return [None if isinstance(c, ad.Zero) else c for c in out]

    return forward, backward


#
# Lowering
#


def device_kind() -> str:
    """Return the kind of device that a program is compiled for.

    That is the device of the mesh in context, for ahead-of-time compilation, or else
    the default device.
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described.device_kind
    return jax.devices()[0].device_kind


def platform_of(array: Any) -> str:
    """Return the platform of an array, such as `"cpu"` or `"gpu"`.

    For a tracer that is the platform that the program is compiled for.
    """
    if not is_traced(array):
        return next(iter(array.devices())).platform
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = getattr(described, "platform", None) or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def gpu_capability() -> tuple[str, str | None]:
    """Return the device kind and the compute capability, such as `"9.0"`.

    The capability is None unless an NVIDIA GPU of that kind is present.
    """
    kind = device_kind()
    for device in jax.devices():
        if device.platform == "gpu" and device.device_kind == kind:
            capability = str(getattr(device, "compute_capability", ""))
            return kind, capability if capability[:1].isdigit() else None
    return kind, None


def gpu_cores() -> int | None:
    """Return the number of cores (SMs) of the GPU that is present, or None."""
    for device in jax.devices():
        if device.platform == "gpu":
            return getattr(device, "core_count", None)
    return None


def mosaic_gpu_kernel(body, out, scratch, *, interpret: bool, **options):
    """Call `plgpu.kernel`, in the interpreter if `interpret`.

    JAX 0.10.2 renamed two of its arguments.
    """
    # Imported here because some builds of jaxlib lack Mosaic GPU.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    names = "out_type", "scratch_types"
    if names[0] not in inspect.signature(plgpu.kernel).parameters:
        names = "out_shape", "scratch_shapes"
    options |= dict(zip(names, (out, scratch), strict=True))
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        options["interpret"] = InterpretGPUParams()
    return plgpu.kernel(body, **options)


def mosaic_gpu_load(ref, **options):
    """Call Mosaic's `plgpu.load` for a whole reference.

    Before JAX 0.11, it required an index, and JAX 0.12 removed the index.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = index is not None and index.default is index.empty
    return plgpu.load(ref, *[()] * needed, **options)


def is_automatically_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether the compiler, not `shard_map`, partitions this program."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices != 1
    if isinstance(axes, mlir.SPMDAxisContext):
        manual = axes.manual_axes | set(axes.mesh.manual_axes)
        return manual != frozenset(axes.mesh.axis_names)
    return False


def num_devices(ctx: mlir.LoweringRuleContext) -> int:
    """Return the number of devices that this program is lowered for."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):
        return axes.mesh.size
    return getattr(axes, "num_devices", 1)


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether `jax.export` lowers this program, which may run elsewhere."""
    return ctx.module_context.lowering_parameters.for_export
