"""Checkpoints in pieces, as several processes write them.

Eight devices stand for the devices of two processes. `tests/sharding` starts real
processes.
"""

import json

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints import _save
from eqquant.checkpoints.files import _safetensors, Piece, Source
from eqquant.checkpoints.leaves._leaf import Leaf, Part
from eqquant.checkpoints.leaves._processes import AllProcesses
from eqquant.checkpoints.leaves._write import write_leaves
from helpers import slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


def mesh_of(*shape):
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, ("d", "m")[-len(shape) :], axis_types=kinds)


class OneOfTwo(AllProcesses):
    def __init__(self, index):
        self.index = index

    def run_in_all(self, step):
        return step()

    def share_token(self, token):
        return "0123456789abcdef"

    def spans(self, array):
        return isinstance(array, jax.Array) and len(array.devices()) > 1

    def owner(self, device):
        return device.id // 4


@pytest.fixture
def save_from_two(monkeypatch):
    def save(path, tree, **kwargs):
        for index in (1, 0):  # Process 0 waits for process 1.
            with monkeypatch.context() as patch:
                process = OneOfTwo(index)
                patch.setattr(_save, "processes_of", lambda *_, p=process: p)
                eqquant.save(path, tree, **kwargs)

    return save


@pytest.fixture
def tree(normal):
    mesh = mesh_of(2, 4)
    double = eqquant.NF4(double_quantization=True)
    tree = {
        "w": eqquant.quantize(normal(16, 256), "nf4"),
        "d": eqquant.quantize(normal(8, 64), double),
        "b": normal(8, dtype=jnp.bfloat16),
        "f": normal(8).astype("float8_e3m4"),
        "k": jax.random.split(jax.random.key(0), 4),
    }
    rules = {"w": P("m", "d"), "d": P(("d", "m")), "[bf]": P("m"), "k": P("d")}
    split = eqquant.shard_tree(tree, mesh, rules=rules, batch="d")
    return {**split, "step": 3, "here": np.arange(3), "none": jnp.zeros((0, 4))}


def raw(tree):
    """Return comparable data. JAX cannot compare arrays on different meshes."""

    def raw_leaf(x):
        if not hasattr(x, "dtype"):
            return x
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if is_key else x
        return type(x), x.dtype, x.shape, np.asarray(data).tobytes()

    return jax.tree.structure(tree), list(map(raw_leaf, jax.tree.leaves(tree)))


def without_plan(tree):
    drop = lambda x: x.with_plan(None) if hasattr(x, "with_plan") else x
    is_array = lambda x: isinstance(x, eqquant.QuantizedArray)
    return jax.tree.map(drop, tree, is_leaf=is_array)


@pytest.mark.parametrize("max_size", [None, slow(500)])
def test_load_onto_other_meshes(tmp_path, save_from_two, tree, max_size):
    save_from_two(tmp_path, tree, max_shard_size=max_size)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    assert "w.codes[4:8,64:128]" in index["weight_map"]
    assert len(set(index["weight_map"].values())) == (2 if max_size is None else 4)
    assert raw(eqquant.load(tmp_path, tree)) == raw(tree)
    plain = without_plan(tree)
    for mesh, rules in [
        (mesh_of(1, 8), {"w": P("m"), "b": P("m"), "[dkf]": None}),
        (mesh_of(4, 2), {"w": P("m", "d"), "d": P("d"), "f": P("d"), "[bk]": None}),
    ]:
        split = {name: tree[name] for name in "wdbfk"}
        split = eqx.filter_eval_shape(lambda split=split: split) if max_size else split
        split = eqquant.shard_tree(split, mesh, rules=rules, batch="d")
        loaded = eqquant.load(tmp_path, tree | split)
        assert raw(without_plan(loaded)) == raw(plain)
        for name, like in split.items():
            for a, b in zip(*map(jax.tree.leaves, (loaded[name], like)), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    # Without `like`, arrays load onto one device.
    assert raw(eqquant.load(tmp_path)["w"]) == raw(plain["w"])
    assert raw(eqquant.load(tmp_path)["k"]) == raw(plain["k"])


def test_reads_only_the_needed_bytes(tmp_path, save_from_two, monkeypatch, normal):
    w = jax.device_put(normal(64, 96), NamedSharding(mesh_of(2, 4), P("d", "m")))
    save_from_two(tmp_path / "pieces", {"w": w})
    eqquant.save(tmp_path / "whole", {"w": w})
    read = []
    read_chunk = _safetensors.TensorFile._read_chunk
    count = lambda file, raw, *args: (
        read.append(raw.nbytes) or read_chunk(file, raw, *args)
    )
    monkeypatch.setattr(_safetensors.TensorFile, "_read_chunk", count)
    monkeypatch.setattr(_safetensors, "CHUNK", 256)  # Smaller than a row.
    places = [(slice(3, 40), slice(20, 30)), (slice(30, 31), slice(0, 96))]
    for name, expected in [("pieces", w.nbytes * 6 / 8), ("whole", w.nbytes)]:
        read.clear()
        with Source(tmp_path / name) as source:
            for place, found in zip(
                places, source.read_slices("w", places), strict=True
            ):
                np.testing.assert_array_equal(found, w[place])
        assert sum(read) == expected and max(read) <= 256
    # Without a checksum, only a part of the piece is read.
    with Source(tmp_path / "whole") as source:
        (file,) = source.files
        file.checksums = {}
        read.clear()
        out = np.empty((1, 96), np.float32)
        file.read_slices("w", [((slice(5, 6), slice(0, 96)), out)])
        np.testing.assert_array_equal(out, w[5:6])
        assert sum(read) == 96 * 4
    # Damage in another piece is not detected. `load` reads all pieces and detects it.
    (_, last) = sorted((tmp_path / "pieces").glob("*-of-*"))
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    with Source(tmp_path / "pieces") as source:
        source.read_slices("w", places[1:])
    with pytest.raises(ValueError, match="CRC-32"):
        eqquant.load(tmp_path / "pieces")


SHAPE = (4, 6)
INVALID = {
    "a gap": [((0, 0), (2, 6), SHAPE)],
    "an overlap": [((0, 0), (3, 6), SHAPE), ((2, 0), (2, 6), SHAPE)],
    "duplicate pieces": [((0, 0), (4, 6), SHAPE), ((0, 0), (4, 6), SHAPE)],
    "no grid": [
        ((0, 0), (4, 3), SHAPE),
        ((0, 3), (2, 3), SHAPE),
        ((3, 3), (1, 3), SHAPE),
    ],
    "not from the start": [((2, 0), (2, 6), SHAPE)],
    "two shapes": [((0, 0), (4, 6), SHAPE), ((0, 0), (4, 6), (8, 6))],
    "out of bounds": [((2, 0), (4, 6), SHAPE)],
    "other axes": [((0,), (4, 6), SHAPE)],
    "huge": [((0, 0), (4, 6), (2**62, 2**62))],
    "empty": [((0, 0), (0, 6), SHAPE)],
    "no axes": [((), (), ())],
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_pieces(tmp_path, name):
    f32 = np.dtype("f4")
    parts = tuple(
        Part(
            f"w{i}",
            f32,
            shape,
            lambda n=shape: np.zeros(n, f32),
            0,
            Piece("w", whole_shape, start),
        )
        for i, (start, shape, whole_shape) in enumerate(INVALID[name])
    )
    path = tmp_path / "model.safetensors"
    write_leaves(path, [Leaf("w", {}, parts)], {})
    with pytest.raises(ValueError, match="pieces: 'w0'|pieces of 'w'"):
        eqquant.load(path)
    whole = Part("w", f32, SHAPE, lambda: np.zeros(SHAPE, f32))
    piece = Part(
        "w[", f32, SHAPE, lambda: np.zeros(SHAPE, f32), 0, Piece("w", SHAPE, (0, 0))
    )
    write_leaves(path, [Leaf("w", {}, (whole, piece))], {})
    with pytest.raises(ValueError, match="'w' .*pieces"):
        eqquant.load(path)
