"""Damaged and malicious files raise errors, and never load as wrong numbers."""

import json
import os
import shutil
import zlib

import eqquant
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_identical
from hypothesis import given, settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def saved(folder):
    """Return the bytes of a file with several kinds of leaves, and its tree."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((3, 70)), jnp.float32)
    q = eqquant.quantize(w, eqquant.NF4(double_quantization=True))
    tree = {
        "q": q,
        "i": eqquant.quantize(w, "int8"),
        "t": eqquant.quantize(w, "ternary"),
        "w": w,
        "step": 3,
    }
    eqquant.save(folder / "whole.safetensors", tree, metadata={"note": "é"})
    return (folder / "whole.safetensors").read_bytes(), tree


def load(folder, data, **kwargs):
    path = folder / "damaged.safetensors"
    path.write_bytes(data)
    return eqquant.load(path, **kwargs)


def split_file(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_file(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_metadata_may_be_null(folder):
    header = {"__metadata__": None, "a": entry()}
    assert load(folder, join_file(header, bytes(8)))["a"].tolist() == [0, 0]


@pytest.mark.slow
@settings(max_examples=50)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_changed_bit_is_detected(folder, saved, at, bit):
    data = bytearray(saved[0])
    data[int(at * len(data))] ^= 1 << bit
    with pytest.raises(ValueError):
        load(folder, bytes(data))


@pytest.mark.slow
def test_every_changed_byte_is_detected(folder, saved):
    # Test every byte of the header. One checksum covers all later bytes.
    header = 8 + int.from_bytes(saved[0][:8], "little")
    for i in (*range(header), *range(header, len(saved[0]), 5)):
        data = bytearray(saved[0])
        data[i] ^= 1 << 5 * i % 8  # Vary the position of the bit.
        with pytest.raises(ValueError):
            load(folder, bytes(data))


@given(length=st.floats(0, 1, exclude_max=True), more=st.binary(max_size=9))
def test_other_lengths_are_rejected(folder, saved, length, more):
    data = saved[0]
    with pytest.raises(ValueError):
        load(folder, data[: int(length * len(data))])
    if more:
        with pytest.raises(ValueError):
            load(folder, data + more)


@given(data=st.binary(max_size=64))
def test_random_bytes(folder, data):
    for content in (data, join_file(data)):
        with pytest.raises(ValueError):
            load(folder, content)


def test_the_unchanged_file_loads(folder, saved):
    assert_identical(load(folder, saved[0]), saved[1])


HEADERS = {
    "a gap": {"a": entry(offsets=(0, 8)), "b": entry(offsets=(16, 24))},
    "an overlap": {"a": entry(offsets=(0, 8)), "b": entry(offsets=(4, 12))},
    "the same bytes": {"a": entry(offsets=(0, 8)), "b": entry(offsets=(0, 8))},
    "out of the file": {"a": entry(offsets=(0, 80), shape=(20,))},
    "backwards": {"a": entry(offsets=(8, 0))},
    "negative": {"a": entry(shape=(-2,), offsets=(0, -8))},
    "too short": {"a": entry(shape=(3,), offsets=(0, 12))},
    "huge": {"a": entry(shape=(2**62, 2**62), offsets=(0, 24))},
    "huge and empty": {"a": entry(shape=(2**63, 0), offsets=(0, 0))},
    "floats in a shape": {"a": entry(shape=(6.0,), offsets=(0, 24))},
    "bools in a shape": {"a": entry(shape=(True, 6), offsets=(0, 24))},
    "many axes": {"a": entry(shape=(1,) * 33 + (6,), offsets=(0, 24))},
    "another size": {"a": entry(shape=(5,), offsets=(0, 24))},
    "an unknown dtype": {"a": entry(dtype="Q4", offsets=(0, 24))},
    "no dtype": {"a": {"shape": [6], "data_offsets": [0, 24]}},
    "an extra key": {"a": entry(shape=(6,), offsets=(0, 24)) | {"x": 1}},
    "a list": [1],
    "metadata of numbers": {"__metadata__": {"a": 1}, "a": entry("U8", (24,), (0, 24))},
    "a duplicate key": b'{"a":{"dtype":"U8","shape":[24],"data_offsets":[0,24]},'
    b'"a":{"dtype":"U8","shape":[24],"data_offsets":[0,24]}}',
    "not UTF-8": b'{"\xff":{"dtype":"U8","shape":[24],"data_offsets":[0,24]}}',
    "deep": b'{"a":' * 100_000,
    "NaN": b'{"a":NaN}',
    "long digits": b'{"a":' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_invalid_headers(folder, name):
    with pytest.raises(ValueError, match="damaged.safetensors: "):
        load(folder, join_file(HEADERS[name], bytes(24)))


def test_invalid_lengths_of_headers(folder):
    for length in (2**63, 2**64 - 1, 100_000_001, 9):
        with pytest.raises(ValueError, match="header"):
            load(folder, length.to_bytes(8, "little") + b"{}")


def test_invalid_bools(folder):
    with pytest.raises(ValueError, match="'a' .*0 and 1"):
        load(folder, join_file({"a": entry("BOOL", (2,), (0, 2))}, b"\x01\x02"))


#
# Invalid files with valid checksums
#


def forge(data, change):
    """Return the file with a changed layout and matching checksums."""
    header, body = split_file(data)
    about = header["__metadata__"]
    layout = json.loads(about["eqquant"])
    change(layout, header)
    about["eqquant"] = json.dumps(layout)
    about["eqquant.checksum"] = "0" * 8
    text = json.dumps(header, separators=(",", ":")).encode()
    crc = f"{zlib.crc32(text):08x}"
    zeros = b'"eqquant.checksum":"00000000"'
    return join_file(text.replace(zeros, zeros.replace(b"0" * 8, crc.encode())), body)


def set_static(path, name, value):
    return lambda layout, _: layout["records"][path]["static"].update({name: value})


def set_field(name, value):
    def change(layout, _):
        layout["records"]["i"]["static"]["format"]["format"]["fields"][name] = value

    return change


def set_record(path, record):
    return lambda layout, _: layout["records"].update({path: record})


FORGED = {
    "version": (lambda manifest, _: manifest.update(version=2), "version .* 2"),
    "version of another type": (lambda x, _: x.update(version=True), "version .* True"),
    "an extra key of the manifest": (
        lambda manifest, _: manifest.update(extra=1),
        "manifest .*'extra'",
    ),
    "records": (lambda manifest, _: manifest.update(records=[]), "records"),
    "no checksums": (lambda manifest, _: manifest.update(checksums={}), "checksums"),
    "kind": (set_record("q", {"is": "os.system", "static": {}}), "os.system"),
    "no static": (set_record("q", {"is": "QuantizedArray"}), "static"),
    "unknown format": (
        set_static("q", "format", {"format": {"name": "x", "fields": {}}}),
        "format .*'x'",
    ),
    "not a format": (set_static("q", "format", 3), "format cannot be 3"),
    "other format": (
        set_static("i", "format", {"format": {"name": "nf4", "fields": {}}}),
        "codes of NF4.* uint8",
    ),
    "unknown field": (set_field("shell", "rm"), "Int8.*'shell'"),
    "type of a field": (set_field("scale_dtype", 7), "scale_dtype"),
    "block size": (set_field("block_size", 35), "scales .*70"),
    "block size below one": (set_field("block_size", 0), "block_size must be"),
    "dtype of scales": (set_field("scale_dtype", "int8"), "scale_dtype must be"),
    "dtype": (
        set_static("q", "dtype", {"dtype": "int32"}),
        "dtype .*int32",
    ),
    "dtype of nothing": (
        set_static("q", "dtype", {"dtype": "object"}),
        "object",
    ),
    "a float out of range": (
        set_record("step", {"is": "float", "value": "0x1p99999"}),
        "step: ",
    ),
    "deep": (set_static("q", "axes", json.loads("[" * 900 + "]" * 900)), "q: "),
    "dtype as text": (set_static("q", "dtype", "float32"), "dtype cannot be"),
    "axes": (set_static("q", "axes", [0]), "axes"),
    "duplicate axes": (set_static("q", "axes", [-1, -1]), "axes"),
    "no axes": (set_static("q", "axes", []), "axes"),
    "inner": (set_static("q", "inner", [7]), r"inner .*\(7,\)"),
    "padding": (set_static("q", "padding", 100), "size of|padding"),
    "negative padding": (set_static("q", "padding", -2), "padding .*-2"),
    "padding of another type": (set_static("q", "padding", 2.0), "padding .*2.0"),
    "a part is a number": (set_record("q.codes", {"is": "int", "value": 1}), "tensor"),
    "a number": (set_record("step", {"is": "int", "value": "3"}), "'3'"),
    "a float": (set_record("step", {"is": "float", "value": "0x"}), "step: "),
    "a key": (set_record("w", {"is": "key", "impl": "threefry2x32"}), "w: "),
    "a dtype": (set_record("w", {"is": "array", "dtype": "object"}), "object"),
    "a narrow dtype": (
        set_record("w", {"is": "array", "dtype": "float8_e4m3"}),
        "uint8",
    ),
    "in itself": (
        set_record("q.scales", {"is": "QuantizedArray", "static": {}}),
        "static",
    ),
    "shard": (lambda manifest, _: manifest.update(shard={"number": 1}), "shard"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_manifests(folder, saved, name):
    change, message = FORGED[name]
    data = forge(saved[0], change)
    with pytest.raises(ValueError, match=message):
        load(folder, data)


@pytest.mark.parametrize("path, code", [("i", 0x80), ("t", 0x02), ("t", 0x80)])
def test_unused_codes(folder, saved, path, code):
    header, body = split_file(saved[0])
    start, stop = header[f"{path}.codes"]["data_offsets"]
    body = bytearray(body)
    body[stop - 1] = code
    crc = f"{zlib.crc32(body[start:stop]):08x}"

    def change(layout, _):
        layout["checksums"][f"{path}.codes"] = crc

    data = forge(saved[0], change)
    with pytest.raises(ValueError, match=f"{path}: codes "):
        load(folder, data[: -len(body)] + bytes(body))


def test_scales_may_have_any_value(folder, normal):
    q = eqquant.quantize(normal(2, 64), "nf4")
    q = q.replace(scales=q.scales.at[0].set(jnp.nan).at[1].set(-1.0))
    eqquant.save(folder / "nan.safetensors", q)
    assert_identical(eqquant.load(folder / "nan.safetensors"), q)


#
# Shards
#


@pytest.fixture
def shards(tmp_path):
    tree = {f"w{i}": jnp.arange(10.0) + i for i in range(3)}
    eqquant.save(tmp_path, tree, max_shard_size=40)
    return tmp_path


def change_index(folder, change):
    index = folder / "model.safetensors.index.json"
    parsed = json.loads(index.read_bytes())
    change(parsed)
    index.write_text(json.dumps(parsed))


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a/b.safetensors",
        "..",
        "x.bin",
        3,
        "a\\b.safetensors",
        ".x.safetensors",
    ],
)
def test_shards_must_be_in_the_folder(shards, name):
    shutil.copy(next(shards.glob("*-00001-*")), shards.parent / "x.safetensors")
    change_index(shards, lambda x: x["weight_map"].update(w0=name))
    with pytest.raises(ValueError, match="weight_map: 'w0'"):
        eqquant.load(shards)


def test_shards_must_match_the_index(shards):
    first, second, third = sorted(shards.glob("*-of-*"))
    second_bytes = second.read_bytes()

    def rejects(message):
        with pytest.raises(ValueError, match=message):
            eqquant.load(shards)

    second.unlink()
    rejects("-00002-of-00003.safetensors")
    second.write_bytes(first.read_bytes())
    rejects("'w0'")
    second.write_bytes(second_bytes)
    other = shards / "other"
    eqquant.save(other, {f"w{i}": jnp.zeros(10) for i in range(3)}, max_shard_size=40)
    second.write_bytes(sorted(other.glob("*-of-*"))[1].read_bytes())
    rejects("-00002-of-00003.safetensors")
    second.write_bytes(second_bytes)
    index = (shards / "model.safetensors.index.json").read_text()
    change_index(shards, lambda x: x["weight_map"].pop("w2"))
    rejects("shards 1 to 2, ")
    change_index(shards, lambda x: x["weight_map"].update(w2=first.name))
    rejects("shards 1 to 2, ")
    (shards / "model.safetensors.index.json").write_text(index)
    change_index(shards, lambda x: x["weight_map"].update(w9=third.name))
    rejects("weight_map.*'w9'")
    change_index(shards, lambda x: x["metadata"].pop("eqquant"))
    rejects("-00001-of-00003.safetensors")
    change_index(shards, lambda x: x.pop("weight_map"))
    rejects("weight_map")
    assert os.listdir(shards)


@settings(max_examples=100)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_changed_bits_of_an_index(folder, at, bit):
    """Loading returns the saved tree or raises. Some bits are insignificant, for
    example in white space."""
    tree = {f"w{i}": jnp.arange(10.0) + i for i in range(3)}
    place = folder / "sharded"
    if not place.exists():
        eqquant.save(place, tree, max_shard_size=40)
        shutil.copy(place / "model.safetensors.index.json", folder / "index")
    data = bytearray((folder / "index").read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    (place / "model.safetensors.index.json").write_bytes(data)
    try:
        loaded = eqquant.load(place)
    except ValueError:
        return
    assert_identical(loaded, tree)
