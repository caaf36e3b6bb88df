"""Files for other libraries: their layouts, and errors.

`test_written_files.py` and `test_mlx.py` in `tests/imports` read such files with the
libraries themselves. A decoder of its documented layout stands in for MLX here.
"""

import json

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Int3, Int4, Int8
from eqquant.checkpoints import (
    quantize_in_tiles,
    quantize_with_zero_points,
    read_checkpoint,
    write_compressed_tensors,
    write_gptq,
    write_mlx,
)
from eqquant.checkpoints.files import ShardWriter
from eqquant.checkpoints.writers import MLX, write_arrays
from eqquant.formats import Int5, Int6
from safetensors.numpy import load_file


SHORT = {"scale_dtype": "bfloat16"}


def weight(rows=64, columns=256, dtype="float32"):
    return jax.random.normal(jax.random.key(0), (rows, columns)).astype(dtype)


def values(q, dtype="float32"):
    return np.asarray(q.with_dtype("float32").dequantize().astype(dtype))


#
# Values
#


def packed(*formats):
    return [eqquant.quantize(weight(), format) for format in formats]


ARRAYS = {
    write_compressed_tensors: [
        *packed("int8", "int4", "int3", Int5(), Int6(), "fp8", "mxfp4"),
        eqquant.quantize(weight(), "nvfp4", axis=(0, 1)),
        eqquant.quantize(weight(), "int8", activations="int8"),
        quantize_with_zero_points(weight(), 4),
        quantize_with_zero_points(weight(), 8),
        quantize_in_tiles(weight()),
    ],
    write_gptq: [
        *packed(Int4(**SHORT)),
        *packed(Int8(block_size=64, **SHORT)),
        *packed(Int3(block_size=32)),
        quantize_with_zero_points(weight(), 2),
        quantize_with_zero_points(weight(), 8),
    ],
    write_mlx: [
        *packed(*(f(block_size=64, **SHORT) for f in (eqquant.Int2, Int3, Int4, Int5))),
        *packed(Int6(block_size=128, **SHORT), Int8(block_size=32, **SHORT), "mxfp4"),
        eqquant.quantize(weight(), Int4(affine=True, **SHORT)),
        quantize_with_zero_points(weight(), 6),
        eqquant.quantize(weight(), Int4(affine=True, unsigned=True, **SHORT)),
    ],
}
CASES = [(writer, q) for writer, arrays in ARRAYS.items() for q in arrays]


@pytest.mark.parametrize(
    "write, q",
    CASES,
    ids=lambda x: getattr(x, "__name__", repr(getattr(x, "format", x))),
)
def test_reading_gives_the_same_values(write, q, tmp_path):
    plain = {"b.weight": weight()[:4], "a.bias": weight()[0].astype("bfloat16")}
    write(tmp_path, {"a.weight": q, **plain})
    found = read_checkpoint(tmp_path)
    assert found.keys() == {"a.weight", *plain}
    read = found["a.weight"]
    assert read.format.bits == q.format.bits and read.format.name == q.format.name
    np.testing.assert_array_equal(values(read, read.dtype), values(q, read.dtype))
    for name, array in plain.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def mlx_values(tensors, prefix, settings):
    """Decode MLX's layout one code at a time, from a stream of bits."""
    bits, group = settings["bits"], settings["group_size"]
    stream = np.unpackbits(
        tensors[f"{prefix}.weight"].view(np.uint8), axis=1, bitorder="little"
    )
    codes = stream.reshape(len(stream), -1, bits).astype(np.int64)
    codes = (codes << np.arange(bits)).sum(-1)
    scales, *rest = (tensors.get(f"{prefix}.{name}") for name in ("scales", "biases"))
    if settings["mode"] == "mxfp4":
        e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        levels = np.where(codes & 8, -1, 1) * e2m1[codes & 7]
        return levels * np.repeat(2.0 ** (scales.astype(int) - 127), group, 1)
    scales, biases = (np.repeat(np.float64(x), group, 1) for x in (scales, *rest))
    return codes * scales + biases


def test_mlx_layout(tmp_path):
    arrays = {f"l{i}": q for i, q in enumerate(ARRAYS[write_mlx])}
    write_mlx(tmp_path, {f"{name}.weight": q for name, q in arrays.items()})
    config = json.loads((tmp_path / "config.json").read_text())["quantization"]
    tensors = load_file(tmp_path / "model.safetensors")
    common = {k: v for k, v in config.items() if not isinstance(v, dict)}
    for name, q in arrays.items():
        found = mlx_values(tensors, name, common | config.get(name, {}))
        # 16-bit scales make the products and sums exact in float64 and float32.
        np.testing.assert_array_equal(found, values(q))
        assert tensors[f"{name}.weight"].dtype == np.uint32


def test_nvfp4_of_mlx_has_no_factor(tmp_path):
    q = eqquant.quantize(weight(), "nvfp4", axis=(0, 1))
    with pytest.raises(ValueError, match="'a.weight'.*factor.*MXFP4"):
        write_mlx(tmp_path, {"a.weight": q})
    plain = eqx.tree_at(lambda q: q.scales.units, q, jnp.ones((1,)))
    write_mlx(tmp_path, {"a.weight": plain})
    found = read_checkpoint(tmp_path)["a.weight"]
    np.testing.assert_array_equal(values(found), values(plain))


#
# Names, shards, and the folder of the original model
#


def test_stacks_become_layers(tmp_path):
    stack = jax.vmap(lambda w: eqquant.quantize(w, "int8"))(
        weight(192).reshape(3, 64, 256)
    )
    names = lambda path: [f"h.{i}.weight" for i in range(3)]
    write_compressed_tensors(tmp_path, {"stack": stack}, names=names)
    found = read_checkpoint(tmp_path)
    for i in range(3):
        np.testing.assert_array_equal(values(found[f"h.{i}.weight"]), values(stack[i]))


def test_shards_equal_one_file(tmp_path):
    model = {f"{i}.weight": eqquant.quantize(weight() * i, "int8") for i in range(1, 5)}
    write_compressed_tensors(tmp_path / "one", model)
    write_compressed_tensors(tmp_path / "many", model, max_shard_size=40_000)
    assert len(list((tmp_path / "many").glob("model-*-of-00002.safetensors"))) == 2
    assert not list((tmp_path / "many").glob(".*"))
    one, many = (read_checkpoint(tmp_path / name) for name in ("one", "many"))
    assert list(one) == list(many)
    for name in one:
        np.testing.assert_array_equal(values(one[name]), values(many[name]))
    # One file replaces the shards.
    write_compressed_tensors(tmp_path / "many", {"a.weight": weight()})
    assert list(read_checkpoint(tmp_path / "many")) == ["a.weight"]


def original(folder):
    folder.mkdir()
    tensors = {"a.weight": weight(), "b.weight": weight(4), "c.inv_freq": weight(1)[0]}
    with ShardWriter(folder, None, {}) as writer:
        write_arrays(MLX(), writer, tensors.items(), None, "")
    (folder / "config.json").write_text('{"hidden_size": 256, "quantization": 1}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_source_gives_names_and_other_files(tmp_path):
    source, target = original(tmp_path / "source"), tmp_path / "target"
    model = {"a.weight": eqquant.quantize(weight(), "int8"), "b.weight": weight(4)}
    write_compressed_tensors(target, model, source=source)
    assert read_checkpoint(target).keys() == {"a.weight", "b.weight", "c.inv_freq"}
    config = json.loads((target / "config.json").read_text())
    assert config["hidden_size"] == 256 and "quantization" not in config
    quantization = config["quantization_config"]
    assert quantization["config_groups"]["group_0"]["targets"] == ["a"]
    assert quantization["ignore"] == ["b"]
    assert (target / "tokenizer.json").exists()
    with pytest.raises(ValueError, match=r"'d.weight'.*no such tensor.*`names`"):
        write_compressed_tensors(target, {"d.weight": weight()}, source=source)
    with pytest.raises(ValueError, match=r"'a.weight'.*\(4, 256\).*as \(64, 256\)"):
        write_compressed_tensors(target, {"a.weight": weight(4)}, source=source)
    # Errors leave the folder as it was.
    assert read_checkpoint(target).keys() == {"a.weight", "b.weight", "c.inv_freq"}


#
# Errors
#

int4 = eqquant.quantize(weight(), Int4(**SHORT))
WRONG = {
    "format": ("a.weight", eqquant.quantize(weight(), "nf4"), r"NF4\(.*Quantize"),
    "axis": ("a.weight", eqquant.quantize(weight(), "int4", axis=0), "transpose"),
    "offsets": (
        "a.weight",
        eqquant.quantize(weight(), Int4(affine=True)),
        "quantize_with_zero_points|affine=False",
    ),
    "partial blocks": (
        "a.weight",
        eqquant.quantize(weight(64, 80), Int4(**SHORT)),
        "80, which blocks of 32 do not divide.*block_size",
    ),
    "stack": ("a.weight", eqquant.quantize(weight()[None], "int8"), "list of names"),
    "name": ("embedding", int4, "'.weight'.*Rename"),
    "adapter": (
        "a.weight",
        eqquant.lora_tree([int4], rank=2, key=jax.random.key(0))[0],
        "LoraArray.*Merge",
    ),
}


@pytest.mark.parametrize("write", ARRAYS)
@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_array_and_the_way_out(write, case, tmp_path):
    name, array, message = WRONG[case]
    with pytest.raises(
        (TypeError, ValueError), match=f"{write.__name__}: '{name}'.*({message})"
    ):
        write(tmp_path, {name: array})
    assert not list(tmp_path.iterdir())


def test_rounded_products_are_refused(tmp_path):
    """MLX computes `code * scale + bias`, which float32 scales of 24 bits round."""
    q = eqquant.quantize(weight(), Int4(block_size=32))
    with pytest.raises(ValueError, match="would change by up to .*MLX.*bfloat16"):
        write_mlx(tmp_path, {"a.weight": q})
    with pytest.raises(ValueError, match="float16 or bfloat16.*scale_dtype"):
        write_gptq(tmp_path, {"a.weight": q})


def test_gptq_has_one_kind_of_weight(tmp_path):
    other = eqquant.quantize(weight(), Int3(block_size=32))
    with pytest.raises(ValueError, match="same bits.*write_compressed_tensors"):
        write_gptq(tmp_path, {"a.weight": int4, "b.weight": other})


def test_two_arrays_of_one_name(tmp_path):
    with pytest.raises(ValueError, match="'a' would name two arrays.*`names`"):
        write_mlx(tmp_path, [weight(), weight()], names=lambda path: "a")


def test_tiles_of_fp8(tmp_path):
    q = eqquant.quantize(weight(160), eqquant.FP8(block_size=128))
    with pytest.raises(ValueError, match="tile of 128 rows.*block_size=None"):
        write_compressed_tensors(tmp_path, {"a.weight": q})
    scales = [jnp.broadcast_to(s.max(0), s.shape) for s in jnp.split(q.scales, [128])]
    q = eqquant.quantize(weight(160), q.format, scales=jnp.concatenate(scales))
    write_compressed_tensors(tmp_path, {"a.weight": q}, activations="fp8")
    assert load_shapes(tmp_path)["a.weight_scale"] == (2, 2)
    np.testing.assert_array_equal(
        values(read_checkpoint(tmp_path)["a.weight"]), values(q)
    )


def load_shapes(folder):
    with eqquant.checkpoints.files.Source(folder) as source:
        return {name: tensor.shape for name, tensor in source.tensors.items()}


@pytest.mark.parametrize("shape", [(256, 256), (300, 128), (3, 130, 200), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_scale_for_each_tile(shape, dtype):
    w = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    w = w.at[..., :128, :128].multiply(100)
    q = quantize_in_tiles(w)
    assert q.format == eqquant.FP8(block_size=128) and q.dtype == dtype
    *_, rows, columns = shape
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            tile = np.asarray(w[..., i : i + 128, j : j + 128], np.float32)
            largest = np.abs(tile).max((-2, -1), keepdims=True)
            scales = np.asarray(q.scales[..., i : i + 128, j // 128, None])
            np.testing.assert_allclose(
                scales, np.broadcast_to(largest / 448, scales.shape), rtol=1e-6
            )
    # Half a step of a float with 3 mantissa bits, and the rounding to the dtype.
    error = np.abs(values(q) - np.asarray(w, np.float32))
    steps = {"float32": 2**-4, "bfloat16": 2**-4 + 2**-8}[dtype]
    subnormal = np.asarray(q.scales, np.float32).max() * 2**-10
    assert (error <= np.abs(np.asarray(w, np.float32)) * steps + subnormal).all()
    assert (values(quantize_in_tiles(w * 0)) == 0).all()
    with pytest.raises(TypeError, match="array"):
        quantize_in_tiles(w.reshape(-1))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_points_are_nearest(bits, dtype):
    w = weight(8, 96, dtype)
    q = quantize_with_zero_points(w, bits, block_size=32)
    zeros = np.asarray(q.offsets / q.scales)
    assert q.dtype == dtype and np.array_equal(zeros, zeros.round())
    scales = np.asarray(q.scales, np.float64).repeat(32, 1)
    error = np.abs(values(q).astype(np.float64) - np.asarray(w, np.float64))
    # Half a step, and the rounding of the scale to 8 bits over up to 2**bits steps.
    assert (error <= scales * (0.5 + 2.0 ** (bits - 8) + 1e-6)).all()
    with pytest.raises(ValueError, match="block_size must divide"):
        quantize_with_zero_points(w, bits, block_size=40)
    with pytest.raises(ValueError, match="must be finite"):
        quantize_with_zero_points(w.at[0, 0].set(jnp.nan), bits, block_size=32)
