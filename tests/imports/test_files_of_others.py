"""Files that other libraries write, and files for them, beside these libraries.

They are not among what the tests install: `make test-imports` runs these.
"""

import pathlib
import subprocess
import sys

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints.foreign._ggml import TYPES
from safetensors.numpy import load_file


gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
bitsandbytes = pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")

FOREIGN = pathlib.Path(__file__).parents[1] / "checkpoints/foreign"
DATA = FOREIGN / "data"


@pytest.mark.parametrize(
    "script", ["gguf", "bitsandbytes", "bitnet", "compressed_tensors"]
)
def test_the_files_that_are_committed_are_what_the_libraries_write(script, tmp_path):
    path = FOREIGN / f"make_{script}.py"
    subprocess.run([sys.executable, path, tmp_path], check=True, timeout=600)
    made = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    committed = {p.relative_to(DATA) for p in DATA.rglob("*") if p.is_file()}
    assert made == {p for p in committed if p.parts[0].startswith(script)}
    for name in made:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name


def test_what_gptqmodel_writes_is_read_bit_for_bit(tmp_path):
    """Not compared with the files that are committed: its codes depend on the order in
    which a machine adds."""
    pytest.importorskip("gptqmodel")
    path = FOREIGN / "make_gptq.py"
    subprocess.run([sys.executable, path, tmp_path], check=True, timeout=1200)
    made = sorted(place.name for place in tmp_path.iterdir())
    assert made == sorted(place.name for place in DATA.glob("gptq_*"))
    for name in made:
        expected = load_file(tmp_path / name / "expected.safetensors")
        found = eqquant.checkpoints.read_checkpoint(
            tmp_path / name / "model.safetensors", decode=True
        )
        for key in expected.keys() - {"tokens", "logits"}:
            weight = found[key]
            if eqquant.is_quantized(weight):
                weight = weight.dequantize()
            assert weight.dtype == expected[key].dtype
            np.testing.assert_array_equal(np.asarray(weight), expected[key])


def test_the_types_of_ggml_have_these_sizes():
    for code, kind in TYPES.items():
        known = gguf.GGMLQuantizationType(code)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (kind.block, kind.nbytes)


# Of 4096 and more the kernel of bitsandbytes for AVX-512 is not used by itself.
@pytest.mark.parametrize("block", [32, 64, 128, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bitsandbytes_reads_what_is_written_for_it(block, dtype, tmp_path):
    from safetensors.torch import load_file

    w = jax.random.normal(jax.random.key(0), (8, 4096)).astype(dtype)
    q = eqquant.quantize(w, eqquant.NF4(block_size=block))
    twice = eqquant.quantize(w, eqquant.NF4(block_size=block, double_quantization=True))
    path = tmp_path / "model.safetensors"
    eqquant.checkpoints.write_bitsandbytes(
        path, {"a.weight": q, "b.weight": twice, "a.bias": w[:, 0]}
    )
    tensors = load_file(path)
    x = torch.linspace(-1, 1, 4096)[None].to(getattr(torch, dtype))
    for name, array in (("a", q), ("b", twice)):
        prefix = f"{name}.weight"
        beside = {
            key.removeprefix(f"{prefix}."): value
            for key, value in tensors.items()
            if key.startswith(f"{prefix}.")
        }
        weight = bitsandbytes.nn.Params4bit.from_prequantized(
            tensors[prefix], beside, device="cpu"
        )
        assert weight.quant_state.shape == (8, 4096)
        decoded = bitsandbytes.functional.dequantize_4bit(
            weight.data, weight.quant_state
        )
        expected = np.asarray(array.dequantize().astype(jnp.float32))
        assert decoded.dtype == x.dtype
        assert decoded.float().numpy().tobytes() == expected.tobytes()
        layer = bitsandbytes.nn.Linear4bit(4096, 8, bias=False, quant_type="nf4")
        layer.weight = weight
        y = layer(x).detach().float().numpy()
        reference = x.float().numpy().astype(np.float64) @ expected.T
        # bitsandbytes multiplies in the dtype of the activation, or in bfloat16.
        assert np.linalg.norm(y - reference) < 2e-2 * np.linalg.norm(reference)
    assert torch.equal(tensors["a.bias"].float(), torch.tensor(np.float32(w[:, 0])))
