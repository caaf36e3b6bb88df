"""Write GGUF files. tests/imports reads them with gguf and llama.cpp."""

from typing import Any

import eqquant
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int4, Int8, NF4, Ternary
from eqquant.checkpoints import read_checkpoint, write_gguf
from eqquant.checkpoints.foreign import TYPES
from eqquant.checkpoints.foreign._gguf import GGUFFile
from eqquant.checkpoints.writers._ggml_pack import pack_blocks
from eqquant.formats import Codebook, DenseTernary, Int6, IntegerScales
from helpers import assert_identical
from test_gguf import DATA


SOURCE = DATA / "gguf.gguf"
PACKED = [t for t in TYPES.values() if t.unpack is not None]


def raw_tensors(path):
    with GGUFFile(path) as file:
        return {
            name: (tensor.type.name, tensor.shape, file.read(tensor).tobytes())
            for name, tensor in file.tensors.items()
        }


@pytest.mark.parametrize("type", PACKED, ids=lambda type: type.name)
def test_packing_inverts_unpacking(type, rng):
    raw = rng.integers(0, 256, (50, type.nbytes)).astype(np.uint8)
    if type.name == "TQ1_0":  # Several bytes stand for the same five digits.
        raw = pack_blocks(type, type.unpack(raw))
    assert (pack_blocks(type, type.unpack(raw)) == raw).all()


def test_round_trip(tmp_path):
    """Tensors, names, order, metadata and the file have equal bytes."""
    arrays = read_checkpoint(SOURCE)
    path = tmp_path / "copy.gguf"
    write_gguf(path, arrays)
    found, expected = raw_tensors(path), raw_tensors(SOURCE)
    assert found == expected
    # The second copy also has the metadata.
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, arrays, source=SOURCE)
    with GGUFFile(whole) as file, GGUFFile(SOURCE) as source:
        assert list(file.tensors) == list(source.tensors)
        assert all(file.raw_pair(key) == source.raw_pair(key) for key in source.pairs)
        assert file.pairs.keys() == source.pairs.keys()
    with GGUFFile(path) as file:
        assert file.pairs.keys() == {"general.quantization_version"}
    again = tmp_path / "again.gguf"
    write_gguf(again, read_checkpoint(whole), source=whole)
    assert again.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_weights_that_are_quantized_here(normal, tmp_path):
    w = normal(4, 512)
    k = {"affine": True, "unsigned": True, "double_quantization": "k"}
    formats = {
        "Q4_0": Int4(64, "float16"),
        "Q4_1": Int4(32, "float16", affine=True, unsigned=True),
        "Q4_K": Int4(32, fit="search", **k),
        "Q6_K": Int6(16, double_quantization="k"),
        "Q8_0": Int8(None, "float16"),
        "TQ1_0": DenseTernary(),
        "TQ2_0": Ternary(None, "float16"),
    }
    model = {name: eqquant.quantize(w, f) for name, f in formats.items()}
    model["BF16"] = w.astype("bfloat16")
    path = tmp_path / "made.gguf"
    write_gguf(path, model, metadata={"general.architecture": "test", "n": [1, -2]})
    with GGUFFile(path) as file:
        assert all(tensor.type.name == name for name, tensor in file.tensors.items())
        assert file.metadata["general.architecture"] == "test"
        assert file.metadata["n"].tolist() == [1, -2]
    for name, found in read_checkpoint(path).items():
        assert_identical(*(eqquant.dequantize_tree(x) for x in (found, model[name])))


@pytest.mark.slow
def test_centred_offsets_become_minima(tmp_path):
    """The minimum of Q4_1 is the value of the lowest level."""
    w = jnp.tile(jnp.arange(32.0) / 8, (2, 1))
    q: Any = eqquant.quantize(w, Int4(32, "float16", affine=True))
    offsets = q.offsets.astype("float32")
    write_gguf(
        tmp_path / "q.gguf", {"w": q.replace(scales=jnp.ones_like(q.scales) / 4)}
    )
    found: Any = read_checkpoint(tmp_path / "q.gguf")["w"]
    assert (found.offsets == offsets - 2).all() and (found.codes == q.codes).all()


@pytest.mark.slow
def test_names_of_a_stack(normal, tmp_path):
    layers = eqquant.quantize(normal(3, 8, 64), Int4(scale_dtype="float16"))
    names = lambda path: [f"blk.{i}.w" for i in range(3)] if path == "layers" else None
    write_gguf(tmp_path / "q.gguf", {"layers": layers, "other": 1.0}, names=names)
    found = read_checkpoint(tmp_path / "q.gguf")
    for i in range(3):
        assert_identical(found[f"blk.{i}.w"], layers[i])


@pytest.mark.parametrize(
    "format, message",
    [
        (NF4(), "no type of GGUF stores"),
        (Int4(), "scales that the float16 of Q4_0 cannot represent"),
        (Int4(16, "float16"), "no type of GGUF stores"),
        (Codebook((-1, 0, 1, 2)), "no type of GGUF stores"),
        (Int6(16, double_quantization="k"), "rows of 320, which blocks of 256 in Q6_K"),
    ],
    ids=repr,
)
def test_what_would_be_lost_is_an_error(format, message, normal, tmp_path):
    path = tmp_path / "q.gguf"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match=f"write_gguf: 'w': has .*{message}"):
        write_gguf(path, {"w": eqquant.quantize(normal(4, 320), format)})
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_other_errors(normal, tmp_path):
    path = tmp_path / "q.gguf"
    q = eqquant.quantize(normal(4, 256), Int6(16, double_quantization="k"))
    with pytest.raises(ValueError, match="'w': has scales that are not integers times"):
        write_gguf(path, {"w": q * 2})
    k: dict[str, Any] = {"affine": True, "unsigned": True, "double_quantization": "k"}
    other: Any = eqquant.quantize(normal(4, 256), Int4(32, **k))
    scales = IntegerScales(other.scales.codes.at[0].set(200), other.scales.units)
    with pytest.raises(
        ValueError, match="'w': has numbers .scales, integers. that Q4_K"
    ):
        write_gguf(path, {"w": other.replace(scales=scales)})
    with pytest.raises(ValueError, match="'w': has the shape"):
        write_gguf(path, {"w": q.T})
    with pytest.raises(ValueError, match="more than 63 bytes"):
        write_gguf(path, {"w" * 64: normal(4)})
    with pytest.raises(ValueError, match="dtype uint32; GGUF has"):
        write_gguf(path, {"w": jnp.zeros(4, "uint32")})
    with pytest.raises(ValueError, match="metadata: 'key' must be a string"):
        write_gguf(path, {"w": normal(4)}, metadata={"key": [1, "a"]})
    with pytest.raises(ValueError, match="metadata: 'key' must be a string"):
        write_gguf(path, {"w": normal(4)}, metadata={"key": 2**40})
    with pytest.raises(ValueError, match="'other' has the shape .* no such tensor"):
        write_gguf(path, {"other": normal(4)}, source=SOURCE)
    with pytest.raises(ValueError, match="the model has no 'Q4_0', which"):
        write_gguf(path, {}, source=SOURCE)
    assert not path.exists()
