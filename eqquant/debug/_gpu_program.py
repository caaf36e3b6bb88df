"""A compiled GPU program: its kernels, launches and resources."""

import dataclasses
import functools as ft
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable

import jax


@dataclasses.dataclass(frozen=True)
class GPUKernel:
    """A kernel of a compiled program.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        weight = eqquant.quantize(weight, "nf4")
        x = jax.ShapeDtypeStruct((8, 256), "bfloat16")

        def show():
            program = eqquant.debug.compile_for_gpu(lambda x, w: x @ w.T, x, weight)
            for kernel in program.kernels:
                print(kernel.name, kernel.shared)
                print(kernel.sass)
        ```

    **Fields:**

    - `name`: the name of its entry point.
    - `architecture`: the target of the assembler, such as `"sm_90a"`.
    - `ptx`: the PTX module that contains the kernel.

    The properties `registers`, `spilled`, `shared` and `sass` run NVIDIA's `ptxas` and
    `nvdisasm`. They raise a `RuntimeError` if these are not installed.
    """

    name: str
    architecture: str
    ptx: str = dataclasses.field(repr=False)

    @ft.cached_property
    def _assembled(self) -> tuple[str, str]:
        """The messages of `ptxas`, and the output of `nvdisasm`."""
        with tempfile.TemporaryDirectory(prefix="eqquant-") as folder:
            source, binary = (pathlib.Path(folder, x) for x in ("k.ptx", "k.cubin"))
            source.write_text(self.ptx)
            architecture = f"-arch={self.architecture}"
            messages = _run("ptxas", architecture, "-v", source, "-o", binary).stderr
            return messages, _run("nvdisasm", "-c", "-hex", binary).stdout

    def _resource(self, pattern: str) -> int:
        found = re.search(pattern, self._assembled[0])
        return int(found[1]) if found else 0

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self._resource(r"Used (\d+) registers")

    @property
    def spilled(self) -> int:
        """Bytes of register spills per thread."""
        return self._resource(r"(\d+) bytes spill stores")

    @property
    def shared(self) -> int:
        """Bytes of static shared memory. A launch can add dynamic shared memory."""
        return self._resource(r"(\d+) bytes smem")

    @property
    def sass(self) -> str:
        """The machine code as text, with the encoding of each instruction."""
        return self._assembled[1]


@dataclasses.dataclass(frozen=True)
class GPUProgram:
    """The result of [`eqquant.debug.compile_for_gpu`][].

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        weight = eqquant.quantize(weight, "nf4")
        x = jax.ShapeDtypeStruct((8, 256), "bfloat16")

        def show():
            program = eqquant.debug.compile_for_gpu(lambda x, w: x @ w.T, x, weight)
            for launch in program.launches:
                print(launch)
            print(program.compiled.memory_analysis())
        ```

    **Fields:**

    - `compiled`: a `jax.stages.Compiled`, which cannot be called. Its
        `memory_analysis()` returns the memory that the program needs.
    - `chip`: the chip that the program was compiled for.
    - `launches`: the operations that the program runs on the chip, one per line, in
        order.
    - `kernels`: an [`eqquant.debug.GPUKernel`][] for each kernel that was compiled for
        the program. Kernels of libraries such as cuBLAS are not included.
    """

    compiled: jax.stages.Compiled = dataclasses.field(repr=False)
    chip: str
    launches: str = dataclasses.field(repr=False)
    kernels: tuple[GPUKernel, ...]

    @property
    def num_launches(self) -> int:
        """The number of kernels and copies. The body of a loop counts once."""
        pattern = r"^\s*\d+: k(?!While|CommandBuffer|DynamicSlice)"
        return len(re.findall(pattern, self.launches, re.M))

    def as_text(self) -> str:
        """Return the optimised HLO."""
        return self.compiled.as_text() or ""


def kernels_in(modules: Iterable[str], architecture: str) -> tuple[GPUKernel, ...]:
    """Return a kernel for each entry point of each PTX module."""
    return tuple(
        GPUKernel(name, architecture, module)
        for module in modules
        for name in re.findall(r"\.entry\s+([\w$]+)", module)
    )


def without_repetition(launches: str) -> str:
    """Remove the second copy of the launches, in which XLA groups some of them."""
    lines = launches.splitlines()
    again = [i for i, line in enumerate(lines) if i and line == lines[0]]
    grouped = [i for i, line in enumerate(lines) if line.startswith("000: kCommand")]
    return "\n".join(lines[: min([*again, *grouped, len(lines)])])


def _run(tool: str, *args) -> subprocess.CompletedProcess:
    command = [_find(tool), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done


def _find(tool: str) -> str:
    """Return the path of a tool: from NVIDIA's wheels, otherwise from `PATH`."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(pathlib.Path(root).glob(f"*/bin/{tool}")):
            return str(path)
    if path := shutil.which(tool):
        return path
    raise RuntimeError(f"{tool} is not installed: pip install 'eqquant[gpu-compiler]'")
