"""Ahead-of-time compilation for TPUs and GPUs that are not present."""

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jax import check_one_of, gpu_device, gpus, has_gpu_compiler, typed
from ._gpu_program import GPUProgram, kernels_in, without_repetition


_topologies = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "TPU7x": "TPU7x:2x2x1",
}
# Otherwise libtpu tries to contact the TPU's host.
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
    """Compile a function for a TPU ahead of time, with the real compiler.

    No TPU is needed. Errors are the same as on the chip. The result cannot be called,
    but `.as_text()` shows its kernels, and `.memory_analysis()` its memory.

    Requires libtpu, on Linux: `pip install libtpu`.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        weight = eqquant.quantize(weight, "nf4")
        x = jax.ShapeDtypeStruct((8, 256), "bfloat16")

        def show():
            compiled = eqquant.debug.compile_for_tpu(lambda x, w: x @ w.T, x, weight)
            print(compiled.memory_analysis())
        ```

    **Arguments:**

    - `fn`: a function. With several devices, the mesh in context has one axis,
        `"devices"`, for `jax.shard_map`.
    - `*args`: its arguments, or objects with a `shape` and a `dtype`. With several
        devices they are replicated.
    - `chip`: `"v4"`, `"v5e"`, `"v5p"`, `"v6e"` or `"TPU7x"`.
    - `devices`: the number of devices.

    **Returns:**

    A `jax.stages.Compiled`.

    **Raises:**

    `ValueError` for an unknown chip, `RuntimeError` without libtpu.
    """
    check_one_of("compile_for_tpu", "chip", chip, _topologies)
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
def compile_for_gpu(
    fn: Callable,
    *args: Any,
    chip: str = "h100",
    options: Mapping[str, Any] | None = None,
) -> GPUProgram:
    """Compile a function for an NVIDIA GPU ahead of time, with the real compiler.

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

    No GPU is needed. The program cannot be called. On a GPU, XLA autotunes: it times
    several kernels for a product and keeps the fastest. Without a GPU it takes the
    first, so tiles, and the use of cuBLAS, may differ.

    Requires JAX's CUDA plugin, and NVIDIA's assembler and disassembler, on Linux:
    `pip install 'eqquant[gpu-compiler]'`. The plugin must match the version of JAX. Set
    `JAX_PLATFORMS=cpu` on a machine without a GPU.

    **Arguments:**

    - `fn`: a function.
    - `*args`: its arguments, or objects with a `shape` and a `dtype`.
    - `chip`: `"a100"`, `"rtx4090"`, `"h100"` or `"h200"`.
    - `options`: options of XLA's compiler. `{"xla_gpu_enable_triton_gemm": False}`
        compiles float products to calls of cuBLAS.

    **Returns:**

    A [`eqquant.debug.GPUProgram`][].

    **Raises:**

    `ValueError` for an unknown chip. `RuntimeError` without the compiler, or if other
    code in this process compiled one of the Mosaic kernels before.
    """
    check_one_of("compile_for_gpu", "chip", chip, gpus)
    if not has_gpu_compiler():
        raise RuntimeError(
            "compile_for_gpu needs JAX's plugin for CUDA, which is the compiler: "
            "pip install 'eqquant[gpu-compiler]'"
        )
    with tempfile.TemporaryDirectory(prefix="eqquant-") as folder:
        with _in_environment("MOSAIC_GPU_DUMP_TO", folder):
            compiled = _compile(
                fn,
                args,
                "cuda",
                [gpu_device(chip)],
                # Since JAX 0.11, PTX is written only for a selected emitter.
                {**(options or {}), "xla_dump_to": folder, "xla_dump_emitter_re": ".*"},
            )
        files = sorted(pathlib.Path(folder).iterdir())
        launches = [f.read_text() for f in files if "thunk_sequence" in f.name]
        modules = [f.read_text() for f in files if f.suffix == ".ptx"]
    mosaic = [text for text in modules if _mosaic_entry in text]
    ptx = [text for text in modules if _mosaic_entry not in text]
    ptx += _mosaic_kernels_in(compiled.as_text() or "", mosaic)
    return GPUProgram(
        compiled,
        chip=chip,
        launches=without_repetition("".join(launches)),
        kernels=kernels_in(ptx, gpus[chip].architecture),
    )


@contextlib.contextmanager
def _in_environment(name: str, value: str):
    """Set an environment variable. Mosaic reads its dump folder from one, and ignores
    the compiler options of XLA."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


_mosaic_entry = "_mosaic_gpu_kernel("
_ptx_of_mosaic_kernel: dict[str, str] = {}


def _mosaic_kernels_in(program: str, new: list[str]) -> list[str]:
    """Return the PTX of each Mosaic kernel in a program.

    Mosaic compiles a kernel, and writes its PTX, once per process. The program refers
    to a kernel by its hash.

    **Arguments:**

    - `program`: the optimised HLO.
    - `new`: the PTX that Mosaic wrote while it compiled this program.

    **Raises:**

    `RuntimeError` if the number of unknown hashes is not the length of `new`.
    """
    hashes = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', program)
    hashes = list(dict.fromkeys(hashes))
    unknown = [key for key in hashes if key not in _ptx_of_mosaic_kernel]
    if len(unknown) != len(new):
        raise RuntimeError(
            f"compile_for_gpu: the program contains {len(unknown)} new Mosaic kernels, "
            f"but Mosaic wrote the PTX of {len(new)}. It writes each kernel once per "
            "process. Call compile_for_gpu in a process that did not run or compile "
            "this kernel before."
        )
    _ptx_of_mosaic_kernel.update(zip(unknown, new, strict=True))
    return [_ptx_of_mosaic_kernel[key] for key in hashes]


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
