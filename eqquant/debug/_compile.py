"""Compiling for a TPU, or a GPU, without one."""

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jax import gpu_device, gpus, has_gpu_compiler, typed
from ._gpu_program import GPUProgram, kernels_in, once


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


@typed
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
    return _compile(fn, args, "tpu", topology.devices[:devices])


@typed
def compile_for_gpu(fn: Callable, *args: Any, chip: str = "h100") -> GPUProgram:
    """Compile a function for an NVIDIA GPU, without one: by the real compiler, ahead of
    time.

    !!! Example

        ```python
        import eqquant
        import jax
        import jax.numpy as jnp


        def show():
            x = jnp.ones((8, 512))
            w = eqquant.quantize(jax.random.normal(jax.random.key(0), (512, 512)))
            program = eqquant.debug.compile_for_gpu(lambda x, w: x @ w.T, x, w)
            for kernel in program.kernels:
                print(kernel.name, kernel.registers, kernel.spilled)
        ```

    The program cannot be called here. On a GPU, XLA also tries several kernels for a
    product and keeps the fastest. Without one it takes the first, so tiles, and whether
    cuBLAS computes a product, may differ there.

    Needs JAX's plugin for CUDA, and NVIDIA's assembler and disassembler, on Linux:
    `pip install 'eqquant[gpu-compiler]'`. The plugin is of one version of JAX; set
    `JAX_PLATFORMS=cpu` where there is no GPU.

    **Arguments:**

    - `fn`: a function.
    - `*args`: its arguments, or anything with a `shape` and a `dtype`.
    - `chip`: `"a100"`, `"rtx4090"`, `"h100"` or `"h200"`.

    **Returns:**

    A [`eqquant.debug.GPUProgram`][].

    **Raises:**

    `ValueError` for an unknown chip, `RuntimeError` without the compiler, or if a
    kernel of Mosaic was compiled in this process before, but not by this function.
    """
    if chip not in gpus:
        raise ValueError(
            f"compile_for_gpu: chip must be one of {tuple(gpus)}, got {chip!r}."
        )
    if not has_gpu_compiler():
        raise RuntimeError(
            "compile_for_gpu needs JAX's plugin for CUDA, which is the compiler: "
            "pip install 'eqquant[gpu-compiler]'"
        )
    with tempfile.TemporaryDirectory(prefix="eqquant-") as folder:
        with _in_environment("MOSAIC_GPU_DUMP_TO", folder):
            compiled = _compile(
                fn, args, "cuda", [gpu_device(chip)], {"xla_dump_to": folder}
            )
        files = sorted(pathlib.Path(folder).iterdir())
        thunks = [f.read_text() for f in files if "thunk_sequence" in f.name]
        ptx = [f for f in files if f.suffix == ".ptx"]
        mosaic = [f.read_text() for f in ptx if _of_mosaic in f.read_text()]
        ptx = [f.read_text() for f in ptx if _of_mosaic not in f.read_text()]
        ptx += _all_of_mosaic(compiled.as_text() or "", mosaic)
    return GPUProgram(
        compiled,
        chip=chip,
        launches=once("".join(thunks)),
        kernels=kernels_in(ptx, gpus[chip].architecture),
    )


@contextlib.contextmanager
def _in_environment(name: str, value: str):
    """Kernels of Mosaic are written where a variable says, not where XLA is told."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


_of_mosaic = "_mosaic_gpu_kernel("
_compiled_by_mosaic: dict[str, str] = {}


def _all_of_mosaic(program: str, new: list[str]) -> list[str]:
    """PTX of the kernels of Mosaic in a program: it compiles each once in a process,
    and writes it then. A program names them by what they are made of.

    **Raises:**

    `RuntimeError` if not as many are written as are not known.
    """
    names = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', program)
    names = list(dict.fromkeys(names))
    unknown = [name for name in names if name not in _compiled_by_mosaic]
    if len(unknown) != len(new):
        raise RuntimeError(
            f"compile_for_gpu: the program has {len(unknown)} kernels of Mosaic that "
            f"are not known yet, and Mosaic wrote {len(new)}. It writes a kernel once "
            "in a process: compile this one in a process that did not run or compile "
            "it before."
        )
    _compiled_by_mosaic.update(zip(unknown, new, strict=True))
    return [_compiled_by_mosaic[name] for name in names]


def _compile(
    fn: Callable, args: tuple, platform: str, devices: Any, options: Any = None
) -> jax.stages.Compiled:
    mesh = Mesh(np.array(devices), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec())
    dynamic, static = eqx.partition(args, lambda x: hasattr(x, "shape"))
    dynamic = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), dynamic
    )

    def call(dynamic):
        return fn(*eqx.combine(dynamic, static))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(call).trace(dynamic).lower(lowering_platforms=(platform,))
        return lowered.compile(compiler_options=options)
