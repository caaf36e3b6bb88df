"""Load a checkpoint and print the peak memory. `test_memory.py` runs this program."""

import json
import pathlib
import sys

import eqquant
import jax
import jax.numpy as jnp


ROWS, COLUMNS = 2048, 16384


def peak() -> int:
    """Return the peak resident memory of this process in bytes, including mapped pages
    of files."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def load(path, layers: int, rows: int, dtype):
    weight = jax.ShapeDtypeStruct((rows, COLUMNS), dtype)
    half = layers // 2
    like = {
        "stack": jax.ShapeDtypeStruct((half, rows, COLUMNS), dtype),
        "layers": [weight] * (layers - half),
    }

    def names(path):
        if path == "stack":
            return [f"w{i}" for i in range(half)]
        return f"w{half + int(path.removeprefix('layers.'))}"

    loaded = eqquant.load_quantized(
        path, like, rules={"*": sys.argv[3]}, names=names, ignore=["hole"]
    )
    return jax.block_until_ready(loaded)


if __name__ == "__main__":
    folder, layers = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    dtype = jnp.dtype(sys.argv[4])
    load(folder / "small.safetensors", 4, 64, dtype)  # Fill caches first.
    before = peak()
    loaded = load(folder / "large.safetensors", layers, ROWS, dtype)
    print(json.dumps([before, peak(), eqquant.trees.nbytes(loaded)]))
