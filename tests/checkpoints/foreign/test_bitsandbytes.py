"""Layers that bitsandbytes quantized. `make_bitsandbytes.py` writes the files."""

import json
import pathlib

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int8, NF4
from eqquant.checkpoints.files import Source, write_plain
from helpers import assert_identical, relative, TOLERANCE, unpacked
from safetensors.numpy import save_file


DATA = pathlib.Path(__file__).parent / "data"
# The expected block size of each weight.
BLOCKS = {
    "nf4": 64,
    "nf4_32": 32,
    "nf4_4096": 4096,
    "nf4_nested": 64,
    "nf4_nested_32": 32,
    "nf4_blocks_of_rows": 64,
    "nf4_across_rows": 32,
    "nf4_partial": 32,
}


def tensors(file: str) -> dict[str, np.ndarray]:
    with Source(DATA / file) as source:
        return {name: source.read(name) for name in source.tensors}


@pytest.fixture(scope="module")
def found():
    return eqquant.checkpoints.read_checkpoint(
        DATA / "bitsandbytes_4bit.safetensors", decode=True
    )


@pytest.fixture(scope="module")
def expected():
    return tensors("bitsandbytes_expected.safetensors")


@pytest.mark.parametrize("name", BLOCKS)
def test_nf4_equals_bitsandbytes(name, found, expected):
    q, value = found[f"{name}.weight"], expected[f"{name}.weight"]
    assert q.format == NF4(block_size=BLOCKS[name])
    assert q.dtype == value.dtype and q.shape == value.shape
    assert np.asarray(q.dequantize()).tobytes() == value.tobytes()
    bias = np.asarray(found[f"{name}.bias"])
    assert bias.tobytes() == expected[f"{name}.bias"].tobytes()


def test_names_match(found, expected):
    assert set(found) == {name for name in expected if not name.startswith("int8")}


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
def test_codes_in_another_dtype(storage, found, tmp_path):
    """`quant_storage` of bitsandbytes, which FSDP needs."""
    parts = {
        name: value
        for name, value in tensors("bitsandbytes_4bit.safetensors").items()
        if name.startswith("nf4.weight")
    }
    codes = parts["nf4.weight"].reshape(-1).view(jnp.dtype(storage))
    path = tmp_path / "model.safetensors"
    write_plain(path, {**parts, "nf4.weight": codes}, {})
    got = eqquant.checkpoints.read_checkpoint(path)["nf4.weight"]
    assert_identical(got, found["nf4.weight"])
    write_plain(path, {**parts, "nf4.weight": codes[:-1]}, {})
    with pytest.raises(ValueError, match="'nf4.weight' .* bytes for 3072 4-bit values"):
        eqquant.checkpoints.read_checkpoint(path)
    write_plain(path, {**parts, "nf4.weight": np.zeros(384, np.int32)}, {})
    with pytest.raises(ValueError, match="'nf4.weight' .* must be uint8 .*got int32"):
        eqquant.checkpoints.read_checkpoint(path)


def test_codes_and_scales_equal_the_file(found):
    stored = tensors("bitsandbytes_4bit.safetensors")
    packed = stored["nf4.weight"].reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(24, 128)
    assert (unpacked(found["nf4.weight"]) == codes).all()
    scales = np.asarray(found["nf4.weight"].scales)
    assert scales.tobytes() == stored["nf4.weight.absmax"].tobytes()


@pytest.mark.parametrize("name", ["nf4_far_across_rows", "fp4"])
def test_decoded_weights_equal_bitsandbytes(name, found, expected):
    value = np.asarray(found[f"{name}.weight"])
    assert value.tobytes() == expected[f"{name}.weight"].tobytes()


def write_layer(folder, prefix, file="bitsandbytes_4bit.safetensors", **changes):
    """Write one layer of a file, with some tensors replaced, or removed if `None`."""
    stored = {k: v for k, v in tensors(file).items() if k.startswith(prefix + ".")}
    for name, value in changes.items():
        stored.pop(f"{prefix}.{name}", None)
        if value is not None:
            stored[f"{prefix}.{name}"] = value
    path = folder / "layer.safetensors"
    save_file(stored, path)
    return path


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "nf4_far_across_rows",
            " 64.* 68.* 4",
        ),
        ("fp4", "FP4"),
    ],
)
def test_inexact_weights_raise(name, message, tmp_path):
    path = write_layer(tmp_path, name)
    with pytest.raises(ValueError, match=rf"'{name}\.weight'.*{message}.*decode=True"):
        eqquant.checkpoints.read_checkpoint(path)


def test_int8(expected, normal):
    found = eqquant.checkpoints.read_checkpoint(DATA / "bitsandbytes_int8.safetensors")
    stored = tensors("bitsandbytes_int8.safetensors")
    assert set(found) == {"int8.weight", "int8.bias"}
    q, value = found["int8.weight"], expected["int8.weight"]
    assert q.format == Int8()
    assert np.asarray(q.codes).tobytes() == stored["int8.weight"].tobytes()
    np.testing.assert_array_equal(q.scales[:, 0], stored["int8.SCB"] / np.float32(127))
    # eqquant rounds twice, bitsandbytes three times.
    np.testing.assert_allclose(q.dequantize(), value, rtol=5 * 2.0**-24, atol=0)
    x = normal(5, 64)
    assert relative(x @ q.T, np.float64(x) @ value.T) < TOLERANCE["high"]


def test_products(found, expected, normal):
    x = normal(5, 128)
    for name in ("nf4", "nf4_nested_32"):
        q, value = found[f"{name}.weight"], expected[f"{name}.weight"]
        y = jax.jit(lambda x, q: x @ q.T)(x, q)
        assert relative(y, np.float64(x) @ value.T) < TOLERANCE["high"]


def changed_state(name, **changes):
    key = f"weight.quant_state.bitsandbytes__{'fp4' if name == 'fp4' else 'nf4'}"
    stored = tensors("bitsandbytes_4bit.safetensors")[f"{name}.{key}"]
    state = {**json.loads(stored.tobytes()), **changes}
    state = {k: v for k, v in state.items() if v is not None}
    return {key: np.frombuffer(json.dumps(state).encode(), np.uint8)}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"blocksize": 32},
            "must have 96 of float32 in 'nf4.weight.absmax', but has 48",
        ),
        ({"blocksize": 63}, "blocksize 63"),
        ({"blocksize": True}, "blocksize True"),
        ({"shape": [24, 127]}, "must have|has 1536 bytes for 3048"),
        ({"shape": [2**40, 2**40]}, "has 1536 bytes"),
        ({"shape": "24"}, "shape '24'"),
        ({"shape": [-24, -128]}, "shape -24"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"dtype": ["float32"]}, r"dtype \['float32'\]"),
        ({"quant_type": "fp4"}, "quant_type 'fp4'"),
        ({"nested_blocksize": 256}, "nested_absmax and nested_blocksize"),
    ],
)
def test_invalid_states(changes, message, tmp_path):
    path = write_layer(tmp_path, "nf4", **changed_state("nf4", **changes))
    for decode in (False, True):
        with pytest.raises(ValueError, match=message):
            eqquant.checkpoints.read_checkpoint(path, decode=decode)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"nested_offset": "0"}, "nested_offset '0'"),
        ({"nested_offset": 10**400}, "nested_offset 10"),
        ({"nested_blocksize": 0}, "nested_blocksize 0"),
        ({"nested_blocksize": 64}, "5 of float32"),
        ({"nested_dtype": "float16"}, "nested_dtype 'float16'"),
        ({"nested_blocksize": None}, "nested_absmax and nested_blocksize"),
    ],
)
def test_invalid_nested_states(changes, message, tmp_path):
    path = write_layer(tmp_path, "nf4_nested", **changed_state("nf4_nested", **changes))
    with pytest.raises(ValueError, match=message):
        eqquant.checkpoints.read_checkpoint(path)


def test_blocks_longer_than_the_weight(found, tmp_path):
    path = write_layer(
        tmp_path, "nf4_4096", **changed_state("nf4_4096", blocksize=2**62)
    )
    again = eqquant.checkpoints.read_checkpoint(path)["nf4_4096.weight"]
    assert again.format.block_size == 4096
    assert (again.dequantize() == found["nf4_4096.weight"].dequantize()).all()
    name = "nf4_nested_32"
    path = write_layer(tmp_path, name, **changed_state(name, nested_blocksize=2**62))
    again = eqquant.checkpoints.read_checkpoint(path)[f"{name}.weight"]
    assert (again.scales == found[f"{name}.weight"].scales).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight.absmax": None}, "'nf4.weight.absmax'"),
        (
            {"weight.quant_map": np.zeros(15, np.float32)},
            "16 of float32 in .*quant_map",
        ),
        ({"weight.absmax": np.zeros(48, np.float64)}, "48 of float32 in .*absmax"),
        ({"weight": None}, "needs 'nf4.weight'"),
        ({"weight": np.zeros((1536, 1), np.int32)}, "'nf4.weight' .*uint8"),
        ({"weight": np.zeros((1535, 1), np.uint8)}, "has 1535 bytes"),
        (
            {"weight.quant_state.bitsandbytes__nf4": np.zeros(9, np.uint8)},
            "JSON",
        ),
        ({"weight.quant_state.bitsandbytes__af4": np.zeros(9, np.uint8)}, "type 'af4'"),
    ],
)
def test_invalid_parts(changes, message, tmp_path):
    path = write_layer(tmp_path, "nf4", **changes)
    with pytest.raises(ValueError, match=message):
        eqquant.checkpoints.read_checkpoint(path)


def test_another_quant_map(tmp_path):
    table = np.linspace(-1, 1, 16, dtype=np.float32)
    path = write_layer(tmp_path, "nf4", **{"weight.quant_map": table})
    with pytest.raises(ValueError, match="quant_map"):
        eqquant.checkpoints.read_checkpoint(path)
    value = eqquant.checkpoints.read_checkpoint(path, decode=True)["nf4.weight"]
    assert abs(float(jnp.max(value)) - 4) < 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight_format": np.array(2, np.uint8)}, "weight_format"),
        ({"SCB": np.ones(11, np.float32)}, r"'SCB' .*\(12,\), got .*\(11,\)"),
        ({"SCB": np.ones(12, np.float16)}, "'SCB' .*float32.*float16"),
        ({"weight": None}, "'int8.weight' .*needs 'weight'"),
        ({"weight": np.ones((12, 64), np.uint8)}, "'weight' .*int8.*uint8"),
        ({"weight": np.full((12, 64), -128, np.int8)}, "integers from -128"),
    ],
)
def test_invalid_parts_of_int8(changes, message, tmp_path):
    path = write_layer(tmp_path, "int8", "bitsandbytes_int8.safetensors", **changes)
    with pytest.raises(ValueError, match=message):
        eqquant.checkpoints.read_checkpoint(path)


def test_older_int8_files_lack_weight_format(tmp_path):
    file = "bitsandbytes_int8.safetensors"
    path = write_layer(tmp_path, "int8", file, weight_format=None, bias=None)
    assert set(eqquant.checkpoints.read_checkpoint(path)) == {"int8.weight"}


#
# Writing
#


@pytest.mark.parametrize("name", ["nf4", "nf4_32", "nf4_4096", "nf4_nested"])
def test_written_files_equal_bitsandbytes(name, found, tmp_path):
    weight = f"{name}.weight"
    path = tmp_path / "written.safetensors"
    eqquant.checkpoints.write_bitsandbytes(
        path, {k: found[k] for k in (weight, f"{name}.bias")}
    )
    with Source(path) as source:
        written = {key: source.read(key) for key in source.tensors}
        assert source.metadata == {"format": "pt"}
    stored = tensors("bitsandbytes_4bit.safetensors")
    same = {weight, f"{weight}.quant_map", f"{name}.bias"}
    if name != "nf4_nested":  # Nested scales are written as floats.
        same.add(f"{weight}.absmax")
    for key in same:
        assert written[key].dtype == stored[key].dtype
        assert written[key].shape == stored[key].shape
        assert written[key].tobytes() == stored[key].tobytes()
    state = f"{weight}.quant_state.bitsandbytes__nf4"
    expected = json.loads(stored[state].tobytes())
    expected = {k: v for k, v in expected.items() if "nested" not in k}
    assert json.loads(written[state].tobytes()) == expected
    again = eqquant.checkpoints.read_checkpoint(path)
    assert (again[weight].codes == found[weight].codes).all()
    assert (again[weight].scales == found[weight].scales).all()


@pytest.mark.slow
def test_round_trip_of_other_nf4(normal, tmp_path):
    path = tmp_path / "written.safetensors"
    w = normal(3, 2, 128)
    arrays = {
        "channels": eqquant.quantize(w, NF4(block_size=None)),
        "bfloat16": eqquant.quantize(w, NF4(scale_dtype="bfloat16")),
        "nested": eqquant.quantize(w, NF4(double_quantization=True)),
        "half": eqquant.quantize(w.astype(jnp.float16), NF4()),
        "plain": w,
    }
    eqquant.checkpoints.write_bitsandbytes(path, arrays)
    again = eqquant.checkpoints.read_checkpoint(path)
    assert list(again) == list(arrays) or set(again) == set(arrays)
    for name, array in arrays.items():
        expected = eqquant.dequantize(array)
        assert again[name].dtype == expected.dtype
        np.testing.assert_array_equal(eqquant.dequantize(again[name]), expected)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda w: eqquant.quantize(w, "int8"), "Int8.*NF4"),
        (lambda w: eqquant.quantize(w, "nf4", axis=0), r"axes \(-2,\)"),
        (lambda w: eqquant.quantize(w[:, :100], "nf4"), " 100.* 64"),
        (
            lambda w: eqquant.quantize(w[:, :100], NF4(block_size=None)),
            "block size of 100",
        ),
        (lambda w: eqquant.quantize(w[0], "nf4"), r"shape \(128,\)"),
        (lambda w: np.ones(2, np.complex128), "complex128"),
    ],
)
def test_unsupported_arrays(make, message, normal, tmp_path):
    path = tmp_path / "written.safetensors"
    with pytest.raises(ValueError, match=message):
        eqquant.checkpoints.write_bitsandbytes(path, {"w": make(normal(64, 128))})
    assert not list(tmp_path.iterdir())


def test_duplicate_names(normal, tmp_path):
    q = eqquant.quantize(normal(2, 64), "nf4")
    with pytest.raises(ValueError, match=r"arrays: 'w\.absmax'"):
        eqquant.checkpoints.write_bitsandbytes(
            tmp_path / "x", {"w": q, "w.absmax": q.scales}
        )
