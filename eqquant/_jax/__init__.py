"""JAX beyond its public interface, and small tools that JAX lacks.

Exports version-dependent pieces of JAX, loops that XLA:CPU does not fuse, row-wise
primitives, threads without a tracing context, the compiler for GPUs, run-time type
checks, texts of errors, and warnings. Only `_compat.py` depends on the version of JAX.
Imports no other folder.
"""

from ._apart import apart as apart
from ._compat import (
    bind_equation as bind_equation,
    by_compiler as by_compiler,
    called_jaxpr as called_jaxpr,
    config as config,
    custom_jvp_rule as custom_jvp_rule,
    custom_vjp_rules as custom_vjp_rules,
    device_kind as device_kind,
    explicit_mesh_of as explicit_mesh_of,
    finish as finish,
    gpu_capability as gpu_capability,
    gpu_cores as gpu_cores,
    has_explicit_axes as has_explicit_axes,
    is_automatically_partitioned as is_automatically_partitioned,
    is_exported as is_exported,
    is_manual as is_manual,
    is_stale as is_stale,
    is_traced as is_traced,
    Literal as Literal,
    manual_axes_in_context as manual_axes_in_context,
    mapped_mesh_axes as mapped_mesh_axes,
    match_varying as match_varying,
    mosaic_gpu_kernel as mosaic_gpu_kernel,
    num_devices as num_devices,
    num_devices_of as num_devices_of,
    open_jaxpr as open_jaxpr,
    parts_of as parts_of,
    platform_of as platform_of,
    register_product as register_product,
    shard_map_manual_axes as shard_map_manual_axes,
    spec_of as spec_of,
    split_scan as split_scan,
    subjaxprs as subjaxprs,
    type_of_first as type_of_first,
    vmapped_axes as vmapped_axes,
    zero_of as zero_of,
    zero_tangent as zero_tangent,
)
from ._dtypes import wide_dtype as wide_dtype
from ._eager import define_impl as define_impl
from ._gpu import (
    GPU as GPU,
    gpu_device as gpu_device,
    gpus as gpus,
    has_gpu_compiler as has_gpu_compiler,
)
from ._messages import (
    given as given,
    is_class_of as is_class_of,
    not_accepted as not_accepted,
    wrong as wrong,
)
from ._pipeline import pipeline as pipeline
from ._rowwise import rowwise as rowwise
from ._typing import typed as typed
from ._warn import source_of as source_of, warn as warn
