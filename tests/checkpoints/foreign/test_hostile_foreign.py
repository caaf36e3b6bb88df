"""Damaged and malicious files of other libraries raise a `ValueError`."""

import pathlib
import shutil
import struct

import eqquant
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from eqquant.checkpoints.foreign._gguf import GGUFFile
from helpers import slow


DATA = pathlib.Path(__file__).parent / "data"


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return u64(len(raw)) + raw


def tensor(name="w", sizes=(32,), kind=0, offset=0, axes=None):
    axes = len(sizes) if axes is None else axes
    return text(name) + u32(axes) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


def pair(key="k", kind=4, value=bytes(4)):
    return text(key) + u32(kind) + value


ALIGN = "general.alignment"
SHAPE = "comfy.gguf.orig_shape."
F32 = 0
BYTES = bytes(128)  # 32 float32 numbers.


def gguf(pairs=(), tensors=None, data=BYTES, *, version=3, magic=b"GGUF", **n):
    tensors = [tensor()] if tensors is None else tensors
    head = magic + u32(version)
    head += u64(n.get("num_tensors", len(tensors))) + u64(
        n.get("num_pairs", len(pairs))
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def read(tmp_path, raw):
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    return eqquant.checkpoints.read_checkpoint(path)


def test_the_unchanged_file_loads(tmp_path):
    pairs = [pair(), pair("s", 8, text("x")), pair("a", 9, u32(8) + u64(1) + text("y"))]
    found = read(tmp_path, gguf(pairs))
    assert found["w"].shape == (32,) and not found["w"].any()


huge = 2**64 - 1
nested = b"".join(u32(9) + u64(1) for _ in range(40)) + u32(0) + u64(0)
CASES = {
    "no more than magic": (b"GGUF", "end beyond"),
    "version 1": (gguf(version=1), "version 1 of GGUF"),
    "version 4": (gguf(version=4), "version 4 of GGUF"),
    "big-endian": (gguf(version=3 << 24), "version 3, big-endian"),
    "more tensors than fit": (gguf(num_tensors=huge), f"{huge} tensors"),
    "fewer tensors": (
        gguf(tensors=[tensor(), tensor("v")], num_tensors=3),
        "would end at",
    ),
    "more pairs than fit": (gguf(num_pairs=huge), f"{huge} key-value pairs"),
    "a long string": (gguf([pair("s", 8, u64(huge))]), "end beyond"),
    "a long name": (gguf(tensors=[u64(huge)] * 4, num_tensors=1), "end beyond"),
    "a long array": (
        gguf([pair("a", 9, u32(4) + u64(2**61))]),
        f"{2**61} values of 'a'",
    ),
    "a long array of strings": (
        gguf([pair("a", 9, u32(8) + u64(2**61))]),
        f"{2**61} values of 'a'",
    ),
    "arrays in arrays": (gguf([pair("a", 9, nested)]), "'a' .* 4"),
    "arrays of an unknown type": (
        gguf([pair("a", 9, u32(99) + u64(1) + b"x")]),
        "unknown type 99",
    ),
    "an unknown type of value": (gguf([pair("k", 13)]), "unknown type 13"),
    "an invalid bool": (gguf([pair("k", 7, b"\x02")]), "a bool of 2"),
    "a string that is not UTF-8": (gguf([pair("s", 8, text(b"\xff"))]), "UTF-8"),
    "a key that is not UTF-8": (gguf([pair(b"\xff")]), "UTF-8"),
    "a name that is not UTF-8": (gguf(tensors=[tensor(b"\xc3")]), "UTF-8"),
    "a duplicate key": (gguf([pair(), pair()]), "'k'"),
    "a duplicate tensor": (gguf(tensors=[tensor()] * 2), "two tensors .*'w'"),
    "many axes": (gguf(tensors=[tensor(axes=5)]), "5 axes"),
    "very many axes": (gguf(tensors=[tensor(axes=2**32 - 1)]), "axes"),
    "an unknown type": (gguf(tensors=[tensor(kind=4)]), "unknown type 4"),
    "a huge shape": (gguf(tensors=[tensor(sizes=(2**40, 2**40))]), "has the shape"),
    "a large shape": (gguf(tensors=[tensor(sizes=(2**40,))]), "would end at byte"),
    "an empty axis": (gguf(tensors=[tensor(sizes=(0, huge))]), "'w' .* no elements"),
    "a shape of other elements": (
        gguf([pair(f"{SHAPE}w", 9, u32(5) + u64(2) + u32(4) + u32(9))]),
        "orig_shape.w' must be a shape of 32 elements, got array",
    ),
    "a negative shape": (
        gguf([pair(f"{SHAPE}w", 9, u32(5) + u64(2) + u32(2**32 - 4) * 2)]),
        "orig_shape.w' must",
    ),
    "a shape of text": (gguf([pair(f"{SHAPE}w", 8, text("8"))]), "orig_shape.w' must"),
    "rows that blocks do not divide": (
        gguf(tensors=[tensor(sizes=(33,), kind=8)]),
        " 33 .* 32 in Q8_0",
    ),
    "an offset beyond the file": (gguf(tensors=[tensor(offset=32)]), "would end at"),
    "a huge offset": (gguf(tensors=[tensor(offset=2**64 - 32)]), "would end at"),
    "an offset between": (gguf(tensors=[tensor(offset=8)]), "'w' is at 8.* 32"),
    "tensors that overlap": (
        gguf(tensors=[tensor(), tensor("v", sizes=(8,), offset=32)]),
        "'v'",
    ),
    "an alignment of 0": (gguf([pair(ALIGN, 4, u32(0))]), "general.alignment .*got 0"),
    "an alignment of 24": (
        gguf([pair(ALIGN, 4, u32(24))]),
        "general.alignment .*got 24",
    ),
    "an alignment of text": (
        gguf([pair(ALIGN, 8, text("8"))]),
        "general.alignment .*got '8'",
    ),
    "one of several files": (gguf([pair("split.count", 4, u32(3))]), "one of 3 "),
    "truncated": (gguf(data=BYTES[:-1]), "'w' .*byte 192.*191"),
}


@pytest.mark.parametrize("case", CASES)
def test_malicious_gguf(case, tmp_path):
    raw, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, raw)


def outcome(path):
    """Return the bytes of all arrays, or `None` for an error."""
    try:
        found = eqquant.checkpoints.read_checkpoint(path, decode=True)
    except ValueError as error:
        assert str(error).startswith(str(path)), error
        return None
    return {
        name: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(array)]
        for name, array in found.items()
    }


@hypothesis.given(data=st.data())
def test_truncated_gguf(tmp_path_factory, data):
    raw = (DATA / "gguf.gguf").read_bytes()
    length = data.draw(st.integers(0, len(raw) - 1))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(raw[:length])
    with GGUFFile(DATA / "gguf.gguf") as file:
        end = max(tensor.stop for tensor in file.tensors.values())
    if length < end:
        # Without its magic number it is not even recognised as GGUF.
        assert outcome(path) is None


def flip_bits(data, raw: bytearray, count: int) -> None:
    """Flip one to three bits in the first `count` bytes."""
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * count - 1))
        raw[bit // 8] ^= 1 << bit % 8


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_flipped_bits_in_a_gguf_header(tmp_path_factory, data):
    raw = bytearray(gguf([pair(), pair("s", 8, text("x"))], [tensor(kind=0)]))
    header = len(raw) - len(BYTES)
    flip_bits(data, raw, header)
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(raw)
    # Reading raises an error of eqquant, or returns arrays no larger than the data.
    for parts in (outcome(path) or {}).values():
        assert sum(map(len, parts)) <= 8 * len(BYTES)


NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
NUMBERS |= {10: "Q", 11: "q", 12: "d"}
TENSORS = {"F32": (0, 32, 128), "Q8_0": (8, 64, 68), "Q4_K": (12, 256, 144)}
TENSORS |= {"Q6_K": (14, 256, 210), "MXFP4": (39, 64, 34), "TQ1_0": (34, 256, 54)}


def with_everything(rng):
    """Return a small valid file with all kinds of values and several types, and the
    length of its header."""
    values = {kind: struct.pack(f"<{code}", 1) for kind, code in NUMBERS.items()}
    pairs = [pair(f"number {kind}", kind, value) for kind, value in values.items()]
    pairs += [
        pair(f"array {kind}", 9, u32(kind) + u64(3) + value * 3)
        for kind, value in values.items()
    ]
    strings = u32(8) + u64(2) + text("a") + text("\N{GREEK SMALL LETTER ALPHA}")
    pairs += [pair("strings", 9, strings), pair("text", 8, text("word"))]
    pairs += [pair("nested", 9, u32(9) + u64(1) + strings)]
    pairs += [pair(ALIGN, 4, u32(32)), pair("split.count", 2, b"\x01\x00")]
    pairs += [pair(f"{SHAPE}F32", 9, u32(5) + u64(2) + u32(4) + u32(8))]
    tensors, data = [], b""
    for name, (kind, size, nbytes) in TENSORS.items():
        tensors.append(tensor(name, (size,), kind, len(data)))
        values = rng.integers(0, 100, nbytes).astype(np.uint8).tobytes()
        data += values + bytes(-nbytes % 32)
    whole = gguf(pairs, tensors, data)
    return whole, len(whole) - len(data)


def damage(raw: bytearray, header: int, rng) -> None:
    """Damage a file in one of six ways."""
    at = int(rng.integers(header))
    extremes = [0, 1, 7, 9, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    match rng.integers(6):
        case 0:
            del raw[int(rng.integers(len(raw))) :]
        case 1:
            for bit in rng.integers(0, 8 * header, rng.integers(1, 9)):
                raw[bit // 8] ^= 1 << bit % 8
        case 2:
            for bit in rng.integers(0, 8 * len(raw), rng.integers(1, 9)):
                raw[bit // 8] ^= 1 << bit % 8
        case 3:
            size = int(rng.choice([4, 8]))
            value = int(rng.choice(np.array(extremes, np.uint64))) % 256**size
            raw[at : at + size] = value.to_bytes(
                size, str(rng.choice(["little", "big"]))
            )
        case 4:
            del raw[at : at + int(rng.integers(1, 64))]
        case 5:
            raw[at:at] = raw[at : at + int(rng.integers(1, 64))]


@pytest.mark.parametrize("count", [300, slow(10_000)])
def test_damaged_gguf(count, tmp_path, rng):
    """A damaged file loads completely, within the size of the file, or raises a
    `ValueError` that starts with its path."""
    whole, header = with_everything(rng)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    assert outcome(path).keys() == TENSORS.keys()
    errors = 0
    for _ in range(count):
        raw = bytearray(whole)
        damage(raw, header, rng)
        path.write_bytes(raw)
        if not raw.startswith(b"GGUF"):
            continue
        found = outcome(path)
        errors += found is None
        for parts in (found or {}).values():
            assert sum(map(len, parts)) <= 8 * len(whole)
    assert errors > count / 3  # Flipped bits of a weight are no error.


@pytest.mark.parametrize("value", [(9, u32(4) + u64(2) + bytes(8)), (8, text("x"))])
@pytest.mark.parametrize("key", [ALIGN, "split.count"])
def test_metadata_of_another_type(key, value, tmp_path):
    with pytest.raises(ValueError, match=rf"file.gguf: .*{key}"):
        read(tmp_path, gguf([pair(key, *value)]))


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(data=st.data())
def test_flipped_bits_in_a_real_gguf_header(tmp_path_factory, data):
    raw = bytearray((DATA / "gguf.gguf").read_bytes())
    with GGUFFile(DATA / "gguf.gguf") as file:
        header = min(tensor.start for tensor in file.tensors.values())
    flip_bits(data, raw, header)
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(raw)
    outcome(path)


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
@pytest.mark.parametrize(
    "name", ["bitsandbytes_int8", slow("compressed_tensors"), slow("gptq")]
)
def test_flipped_bits_in_a_header(tmp_path_factory, name, data):
    file = "gptq_zeros/model" if name == "gptq" else name
    original = (DATA / f"{file}.safetensors").read_bytes()
    raw = bytearray(original)
    header = 8 + int.from_bytes(raw[:8], "little")
    flip_bits(data, raw, header)
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(raw)
    if name == "gptq":
        shutil.copy(DATA / "gptq_zeros/config.json", path.parent)
    outcome(path)


def flip_state(data, text: bytes) -> bytes:
    raw = bytearray(text)
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(raw) - 1))
        raw[bit // 8] ^= 1 << bit % 8
    return bytes(raw)


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_flipped_bits_in_a_quant_state(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "state.safetensors"
    q = eqquant.quantize(jax.numpy.ones((2, 64)), "nf4")
    eqquant.checkpoints.write_bitsandbytes(path, {"w": q})
    raw = path.read_bytes()
    start = raw.rindex(b'{"quant_type"')
    stop = raw.index(b"}", start) + 1
    path.write_bytes(raw[:start] + flip_state(data, raw[start:stop]) + raw[stop:])
    after = outcome(path)
    assert after is None or after.keys() == {"w"}


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match="none"):
        eqquant.checkpoints.read_checkpoint(tmp_path)
    for path in (tmp_path / "nothing", tmp_path / "nothing.gguf"):
        with pytest.raises(FileNotFoundError, match="nothing"):
            eqquant.checkpoints.read_checkpoint(path)
    (tmp_path / "other.safetensors").write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ValueError, match="other.safetensors"):
        eqquant.checkpoints.read_checkpoint(tmp_path)
