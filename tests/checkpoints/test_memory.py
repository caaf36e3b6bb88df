"""Memory of loaded arrays, and peak memory of `load_quantized`."""

import json
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints.files import empty, to_jax
from measured import COLUMNS, ROWS


@pytest.mark.parametrize("rows", [1, 3000])  # 3000 rows use huge pages.
def test_jax_uses_the_memory_without_a_copy(rows):
    array = empty((rows, 1024), np.int8)
    array[...] = np.arange(rows)[:, None] % 100
    expected = array.sum(0, dtype=np.int64)
    on_jax = to_jax(array)
    assert on_jax.unsafe_buffer_pointer() == array.ctypes.data
    del array
    assert (np.asarray(on_jax).sum(0, dtype=np.int64) == expected).all()


def write(path, layers: int, rows: int, rng) -> int:
    """Write a bfloat16 file without eqquant, and return the bytes of one tensor."""
    nbytes = 2 * rows * COLUMNS
    header = {
        f"w{i}": {
            "dtype": "BF16",
            "shape": [rows, COLUMNS],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i in range(layers)
    }
    text = json.dumps(header).encode()
    rows_of_64 = rng.standard_normal((64, COLUMNS)).astype(jnp.bfloat16).tobytes()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(layers * rows // 64):
            file.write(rows_of_64)
    return nbytes


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs proc")
@pytest.mark.parametrize("format, dtype", [("nf4", "bfloat16"), ("int8", "float32")])
def test_peak_memory_is_the_quantized_model_and_two_tensors(
    tmp_path, rng, format, dtype
):
    # The file has 2.1 GB. Half of the layers are one stack: as floats it would exceed
    # the limit, and so would keeping the bytes of the file.
    layers = 8
    write(tmp_path / "small.safetensors", 4, 64, rng)
    large = tmp_path / "large.safetensors"
    tensor = write(large, layers, ROWS, rng) * jnp.dtype(dtype).itemsize // 2
    assert large.stat().st_size > 2 * 2**30
    program = pathlib.Path(__file__).with_name("measured.py")
    out = subprocess.run(
        [sys.executable, program, tmp_path, str(layers), format, dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    large.unlink()
    assert out.returncode == 0, out.stderr
    before, after, quantized = json.loads(out.stdout)
    print(f"{format}: {after - before:,} for {quantized:,} and tensors of {tensor:,}")
    assert after - before <= quantized + 2 * tensor
    # A lower value would mean that nothing was measured.
    assert after - before >= quantized
