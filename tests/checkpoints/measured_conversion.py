"""Convert a checkpoint, and print the peak memory, the bytes of a tensor in float32,
and the bytes of the file. `test_memory.py` runs this program."""

import json
import pathlib
import sys

import eqquant
import jax
import jax.numpy as jnp
from measured import peak


COUNT, ROWS, COLUMNS = 32, 2048, 2048
FORMATS = {
    "bitsandbytes": eqquant.NF4(),
    "gguf": eqquant.Int4(block_size=32, scale_dtype="float16"),
}


def write(path: pathlib.Path, count: int, format: eqquant.formats.Format) -> None:
    weight = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS), jnp.bfloat16)
    q = eqquant.quantize(weight, format)
    eqquant.save(path, {f"l{i}": {"weight": q} for i in range(count)})


if __name__ == "__main__":
    folder, to = pathlib.Path(sys.argv[1]), sys.argv[2]
    common = eqquant.Int4(block_size=128, scale_dtype="bfloat16")
    convert = eqquant.checkpoints.convert_checkpoint
    sizes = []
    for name, count in (("small", 2), ("large", COUNT)):  # The first fills caches.
        path = folder / f"{name}.safetensors"
        write(path, count, FORMATS.get(to, common))
        target = folder / (f"{name}.gguf" if to == "gguf" else name)
        # Reset the peak.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        convert(path, target, to, progress=False)
        sizes = [peak() - before, 4 * ROWS * COLUMNS, path.stat().st_size]
    print(json.dumps(sizes))
