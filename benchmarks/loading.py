"""Time the loading of large files, and measure its peak memory.

    python benchmarks/loading.py
    python benchmarks/loading.py --gigabytes 4 --only Q4_K nf4

A file holds the matrices of language models with random values, one tensor for each
matrix, or one stack in files of eqquant. They are loaded into stacks. The file is in
the page cache, and each round is a process of its own. Columns:

- "file MB" and "model MB": bytes of the file, and of codes and scales in memory.
- "s" and "CPU s": from the path to the finished arrays, without imports. The fastest
  round, and the range over all rounds.
- "MB beyond the model": the peak memory of the process (VmHWM, which contains mapped
  pages of files), less the memory before loading, less the model. The largest round.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from _gguf import Tensor, write
from _tables import add_output_options, output, print_table


# The number of the type in ggml, the values and bytes of a block, and the positions of
# its float16 scales.
GGUF = {
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
    "Q8_0": (8, 32, 34, (0,)),
}
CASES = [*GGUF, "nf4", "bfloat16"]
# Rows and columns of matrices in a layer.
MATRICES = {"up": (5632, 2048), "down": (2048, 5632), "query": (2048, 2048)}
WEIGHTS = sum(rows * columns for rows, columns in MATRICES.values())


def name_of(layer: int, matrix: str) -> str:
    return f"blk.{layer}.{matrix}.weight"


def write_gguf(path: pathlib.Path, kind: str, layers: int) -> None:
    number, block, nbytes, scales = GGUF[kind]
    rng = np.random.default_rng(0)

    def tensor(name: str, rows: int, columns: int) -> Tensor:
        count = rows * columns // block

        def data() -> np.ndarray:
            blocks = rng.integers(0, 256, (count, nbytes), np.uint8)
            for start in scales:
                values = rng.uniform(0.01, 0.02, (count, 1)).astype("<f2")
                blocks[:, start : start + 2] = values.view(np.uint8)
            if kind == "Q8_0":  # No quantizer writes -128.
                codes = blocks[:, 2:]
                codes[codes == 128] = 0
            return blocks

        return Tensor(name, (rows, columns), number, count * nbytes, data)

    tensors = (
        tensor(name_of(layer, matrix), *shape)
        for layer in range(layers)
        for matrix, shape in MATRICES.items()
    )
    write(path, {"general.architecture": "none"}, tensors)


def write_safetensors(path: pathlib.Path, kind: str, layers: int) -> None:
    import eqquant
    import jax
    import jax.numpy as jnp
    from safetensors.flax import save_file

    rng = np.random.default_rng(0)

    def layer(shape) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    if kind == "bfloat16":
        items = MATRICES.items()
        arrays = {
            name_of(i, m): jnp.asarray(layer(shape), jnp.bfloat16)
            for i in range(layers)
            for m, shape in items
        }
        save_file(arrays, path)
        return
    stacks = {}
    for matrix, shape in MATRICES.items():
        parts = [eqquant.quantize(layer(shape), kind) for _ in range(layers)]
        stacks[matrix] = jax.tree.map(lambda *parts: np.stack(parts), *parts)
    eqquant.save(path, stacks)


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def load_once(path: pathlib.Path, layers: int) -> list[float]:
    """Load a file, and return the seconds, CPU seconds, bytes of the model and bytes of
    additional peak memory."""
    import eqquant
    import jax

    dtype = "bfloat16" if path.stem == "bfloat16" else "float32"
    is_stack = path.stem == "nf4"
    like = {
        matrix: jax.ShapeDtypeStruct((layers, *shape), dtype)
        for matrix, shape in MATRICES.items()
    }
    names = lambda m: m if is_stack else [name_of(i, m) for i in range(layers)]
    jax.block_until_ready(jax.numpy.zeros(1))
    before, clock = peak(), (time.perf_counter(), time.process_time())
    loaded = eqquant.load_quantized(path, like, None, names=names, progress=False)
    jax.block_until_ready(loaded)
    seconds = time.perf_counter() - clock[0], time.process_time() - clock[1]
    nbytes = eqquant.trees.nbytes(loaded)
    return [*seconds, nbytes, peak() - before - nbytes]


def start(path: pathlib.Path, layers: int) -> list[float]:
    command = [sys.executable, __file__, "--once", str(path), str(layers)]
    # Libraries of other platforms would count as memory.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[-1])
    return json.loads(ran.stdout.splitlines()[-1])


HEAD = ["", "file MB", "model MB", "s", "CPU s", "MB beyond the model"]


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    yield HEAD
    bits = {kind: 8 * nbytes / block for kind, (_, block, nbytes, _) in GGUF.items()}
    bits |= {"nf4": 4.5, "bfloat16": 16}
    for kind in options.only:
        layers = max(2, round(8e9 * options.gigabytes / bits[kind] / WEIGHTS))
        ending = ".gguf" if kind in GGUF else ".safetensors"
        path = options.folder / f"{kind}{ending}"
        if not path.exists():
            make = write_gguf if kind in GGUF else write_safetensors
            make(path, kind, layers)
        path.read_bytes()  # Now it is in the page cache.
        runs = [start(path, layers) for _ in range(options.rounds)]
        seconds, cpu, (nbytes, *_), extra = zip(*runs, strict=True)
        spread = lambda x: f"{min(x):.2f} ({min(x):.2f} to {max(x):.2f})"
        megabytes = lambda x: f"{x / 1e6:.0f}"
        sizes = megabytes(path.stat().st_size), megabytes(nbytes)
        yield [kind, *sizes, spread(seconds), spread(cpu), megabytes(max(extra))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the loading of files.")
    parser.add_argument("--gigabytes", type=float, default=1.1, help="of each file")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=pathlib.Path, help="keep files here")
    add_output_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, output(options):
        options.folder = options.folder or pathlib.Path(folder)
        print_table(list(rows(options)), options.markdown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        print(json.dumps(load_once(pathlib.Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
