"""Compare files with the libraries that write and read them.

These libraries are not dependencies of the tests: `make test-imports` installs them.
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
def test_committed_files_equal_new_files(script, tmp_path):
    path = FOREIGN / f"make_{script}.py"
    subprocess.run([sys.executable, path, tmp_path], check=True, timeout=600)
    made = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    committed = {p.relative_to(DATA) for p in DATA.rglob("*") if p.is_file()}
    assert made == {p for p in committed if p.parts[0].startswith(script)}
    for name in made:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes(), name


def test_gptqmodel_files_are_read_bit_for_bit(tmp_path):
    """Write new files, because the codes of GPTQModel depend on the order of sums on a
    machine."""
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


def test_sizes_of_ggml_types():
    for code, kind in TYPES.items():
        known = gguf.GGMLQuantizationType(code)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (kind.block, kind.nbytes)


# bitsandbytes disables its AVX-512 kernel for blocks of 4096 or more.
@pytest.mark.parametrize("block", [32, 64, 128, 4096])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bitsandbytes_reads_written_files(block, dtype, tmp_path):
    from safetensors.torch import load_file

    w = jax.random.normal(jax.random.key(0), (8, 4096)).astype(dtype)
    q = eqquant.quantize(w, eqquant.NF4(block_size=block))
    nested = eqquant.quantize(
        w, eqquant.NF4(block_size=block, double_quantization=True)
    )
    path = tmp_path / "model.safetensors"
    eqquant.checkpoints.write_bitsandbytes(
        path, {"a.weight": q, "b.weight": nested, "a.bias": w[:, 0]}
    )
    tensors = load_file(path)
    x = torch.linspace(-1, 1, 4096)[None].to(getattr(torch, dtype))
    for name, array in (("a", q), ("b", nested)):
        prefix = f"{name}.weight"
        state = {
            key.removeprefix(f"{prefix}."): value
            for key, value in tensors.items()
            if key.startswith(f"{prefix}.")
        }
        weight = bitsandbytes.nn.Params4bit.from_prequantized(
            tensors[prefix], state, device="cpu"
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


def test_gguf_reads_written_files(tmp_path):
    """The gguf library decodes random blocks of each type like eqquant, and reads the
    written file like the file that llama.cpp wrote."""
    path, source = tmp_path / "made.gguf", DATA / "gguf.gguf"
    arrays = eqquant.checkpoints.read_checkpoint(source)
    w = jax.random.normal(jax.random.key(0), (8, 512))
    k = {"affine": True, "unsigned": True, "double_quantization": "k"}
    formats = {
        "Q2_K": eqquant.Int2(16, **k),
        "Q4_K": eqquant.Int4(32, fit="search", **k),
        "Q5_K": eqquant.formats.Int5(32, **k),
        "Q6_K": eqquant.formats.Int6(16, double_quantization="k"),
        "Q3_K": eqquant.Int3(16, double_quantization="k"),
        "TQ1_0": eqquant.formats.DenseTernary(),
    }
    ours = {f"new {name}": eqquant.quantize(w, f) for name, f in formats.items()}
    metadata = {"general.architecture": "llama", "words": ["a", "b"], "x": 0.5}
    eqquant.checkpoints.write_gguf(path, arrays | ours, metadata=metadata)
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == "llama"
    assert reader.get_field("words").contents() == ["a", "b"]
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found.keys() == arrays.keys() | ours.keys()
    for tensor in gguf.GGUFReader(source).tensors:
        other = found[tensor.name]
        assert other.tensor_type == tensor.tensor_type
        np.testing.assert_array_equal(other.data, tensor.data)
    for name, q in ours.items():
        assert found[name].tensor_type.name == name.removeprefix("new ")
        values = gguf.dequantize(found[name].data, found[name].tensor_type)
        np.testing.assert_array_equal(values, q.dequantize())


@pytest.mark.parametrize(
    "kind", [t for t in TYPES.values() if t.unpack is not None], ids=lambda t: t.name
)
def test_random_blocks_decode_like_gguf(kind, rng):
    raw = rng.integers(0, 256, (64, kind.nbytes)).astype(np.uint8)
    known = gguf.GGMLQuantizationType[kind.name]
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, known)
        np.testing.assert_array_equal(kind.decode(kind.unpack(raw)), expected)


@pytest.mark.parametrize(
    "name",
    ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"],
)
def test_types_without_a_format_are_decoded_on_request(name, tmp_path, rng):
    kind = gguf.GGMLQuantizationType[name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (4, 3 * nbytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
        found = eqquant.checkpoints.read_checkpoint(tmp_path / "q.gguf", decode=True)
    assert found["w"].shape == (4, 3 * block)
    np.testing.assert_array_equal(found["w"], expected)
