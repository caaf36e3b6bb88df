"""JAX beyond its public interface, and small tools that JAX lacks.

Exports version-dependent pieces of JAX, loops that XLA:CPU does not fuse, row-wise
primitives, threads without a tracing context, the compiler for GPUs, run-time type
checks, texts of errors, and warnings. Only `_compat.py` depends on the version of JAX.
Imports no other folder.
"""

from ._apart import apart
from ._arithmetic import arithmetic_of
from ._compat import (
    as_varying,
    bind_equation,
    by_compiler,
    called_jaxpr,
    config,
    custom_jvp_rule,
    custom_vjp_rules,
    device_kind,
    explicit_mesh_of,
    finish,
    gpu_capability,
    gpu_cores,
    has_explicit_axes,
    is_automatically_partitioned,
    is_exported,
    is_manual,
    is_psum,
    is_stale,
    is_traced,
    Literal,
    manual_axes_in_context,
    mapped_leaves,
    mapped_mesh_axes,
    match_varying,
    mosaic_gpu_kernel,
    mosaic_gpu_load,
    num_devices,
    num_devices_of,
    open_jaxpr,
    parts_of,
    platform_of,
    register_product,
    shard_map_manual_axes,
    spec_of,
    split_scan,
    subjaxprs,
    type_of_first,
    unmapped,
    varying_axes,
    vmapped_axes,
    zero_of,
    zero_tangent,
)
from ._dtypes import wide_dtype
from ._eager import define_impl
from ._gpu import GPU, gpu_device, gpus, has_gpu_compiler
from ._messages import check_one_of, counted, given, is_class_of, not_accepted, wrong
from ._pipeline import pipeline
from ._rowwise import rowwise
from ._typing import typed
from ._warn import source_of, warn
