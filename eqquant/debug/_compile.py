"""Compiling for a TPU without one."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


_topologies = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "TPU7x": "TPU7x:2x2x1",
}
# So that libtpu does not look for the machine that it would run on.
_libtpu_environment = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def compile_for_tpu(
    fn: Callable, *args: Any, chip: str = "v5e", devices: int = 1
) -> jax.stages.Compiled:
    """Compile a function for a TPU, without one: by the real compiler, ahead of time.

    What it refuses it would refuse on the chip. The result cannot be called here, but
    `.as_text()` shows the kernels in it, and `.memory_analysis()` its memory.

    Needs libtpu, on Linux: `pip install libtpu`.

    **Arguments:**

    - `fn`: a function. Over several devices it sees them as a mesh with one axis,
        `"devices"`, in its context, as `jax.shard_map` needs it.
    - `*args`: its arguments, or anything with a `shape` and a `dtype`; on several
        devices each one has a copy.
    - `chip`: `"v4"`, `"v5e"`, `"v5p"`, `"v6e"` or `"TPU7x"`.
    - `devices`: how many.

    **Returns:**

    A `jax.stages.Compiled`.

    **Raises:**

    `ValueError` for an unknown chip, `RuntimeError` without libtpu.
    """
    if chip not in _topologies:
        raise ValueError(
            f"compile_for_tpu: chip must be one of {tuple(_topologies)}, got {chip!r}."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(
            "compile_for_tpu needs libtpu, which is the compiler: pip install libtpu"
        )
    for name, value in _libtpu_environment.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=_topologies[chip]
    )
    mesh = Mesh(np.array(topology.devices[:devices]), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec())
    dynamic, static = eqx.partition(args, lambda x: hasattr(x, "shape"))
    dynamic = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), dynamic
    )

    def call(dynamic):
        return fn(*eqx.combine(dynamic, static))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(call).trace(dynamic).lower(lowering_platforms=("tpu",))
        return lowered.compile()
