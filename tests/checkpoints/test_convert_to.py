"""Conversion of checkpoints for other libraries."""

import pathlib
import re
from typing import Any

import eqquant
import jax
import numpy as np
import pytest
from eqquant import Int4, Int8
from eqquant.checkpoints import convert_checkpoint, main, read_checkpoint
from eqquant.checkpoints._convert_to import LIBRARIES, TARGETS
from eqquant.checkpoints.files import ShardWriter


INT4 = Int4(scale_dtype="float16")
DATA = pathlib.Path(__file__).parent / "foreign/data"


def weight(dtype="float32"):
    return jax.random.normal(jax.random.key(0), (32, 128)).astype(dtype)


def values(q):
    if not eqquant.is_quantized(q):
        return np.asarray(q)
    return np.asarray(q.with_dtype("float32").dequantize())


@pytest.mark.parametrize("source", ["gptq_zeros", "gptq_awq"])
@pytest.mark.parametrize("to", ["compressed-tensors", "mlx", "gptq"])
def test_codes_and_scales_are_kept(source, to, tmp_path):
    report = convert_checkpoint(DATA / source, tmp_path, to)
    assert all(found.is_exact for found in report.values())
    assert (tmp_path / "config.json").exists()
    before, after = read_checkpoint(DATA / source), read_checkpoint(tmp_path)
    assert before.keys() == after.keys() == report.keys()
    assert sum(map(eqquant.is_quantized, after.values())) == 7
    for name, array in before.items():
        np.testing.assert_array_equal(values(after[name]), values(array), name)


def test_floats_equal_the_decoded_values(tmp_path):
    convert_checkpoint(DATA / "gptq_zeros", tmp_path, "safetensors")
    expected = read_checkpoint(DATA / "gptq_zeros")
    for name, array in read_checkpoint(tmp_path).items():
        assert not eqquant.is_quantized(array)
        np.testing.assert_array_equal(array, eqquant.dequantize(expected[name]))


@pytest.fixture
def ours(tmp_path):
    """A checkpoint with a weight that GPTQ holds, and one that it does not."""
    model = {
        "a": {"weight": eqquant.quantize(weight(), Int4(scale_dtype="float16"))},
        "b": {"weight": eqquant.quantize(weight(), "nf4"), "bias": weight()[0]},
    }
    eqquant.save(tmp_path / "ours", model)
    return tmp_path / "ours", model


def test_requantized_weights_are_reported(ours, tmp_path, capsys):
    path, model = ours
    to = str(tmp_path / "gptq")
    assert main(["convert", str(path), to, "--to", "gptq"]) == 1
    error = capsys.readouterr().err
    assert "'b.weight'" in error and "NF4" in error and "--requantize" in error
    assert not list((tmp_path / "gptq").glob("*"))

    options = ["--requantize", "int4:scale_dtype=float16"]
    assert main(["convert", str(path), to, "--to", "gptq", *options]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[-1] for line in out.splitlines()}
    assert lines["a.weight"] == lines["b.bias"] == "exact"
    assert lines["b.weight"] == "requantized" and "2 of 3 exact" in out
    found = read_checkpoint(to)
    np.testing.assert_array_equal(found["a.weight"].codes, model["a"]["weight"].codes)
    floats = model["b"]["weight"].dequantize()
    again = eqquant.quantize(floats, Int4(scale_dtype="float16"))
    np.testing.assert_array_equal(found["b.weight"].codes, again.codes)


def test_weights_that_eqquant_cannot_hold(tmp_path):
    """A file of GPTQ in the order of activations is decoded, and quantized again."""
    with pytest.raises(ValueError, match="desc_act.*--requantize"):
        convert_checkpoint(DATA / "gptq_ordered", tmp_path, "mlx")
    format = Int4(scale_dtype="bfloat16")
    report = convert_checkpoint(
        DATA / "gptq_ordered", tmp_path, "mlx", requantize=format
    )
    assert sum(not found.is_exact for found in report.values()) == 7


def test_rotated_weights_are_requantized(tmp_path):
    rules = {"a.*": "int8"}
    model = {"a": {"weight": weight()}}
    model = eqquant.quantize_tree(model, None, rules=rules, rotate=True)
    eqquant.save(tmp_path / "ours", model)
    with pytest.raises(ValueError, match="'a.weight'.*RotatedArray.*--requantize"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "ct", "compressed-tensors")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("to", ["compressed-tensors", "gptq", "mlx", "safetensors"])
def test_an_interrupted_conversion_continues(to, tmp_path, monkeypatch):
    """The second call packs only the weights without a finished file. All files equal
    the files of an uninterrupted call."""
    options: dict[str, Any] = {"max_shard_size": 12_000}
    whole = convert_checkpoint(DATA / "gptq_zeros", tmp_path / "whole", to, **options)
    count = sum(x.before != x.after for x in whole.values())
    options["resume"] = True
    packed, at_most = [], 5
    pack = LIBRARIES[to].pack

    def interrupted(self, name, q):
        if len(packed) == at_most:
            raise KeyboardInterrupt
        packed.append(name)
        return pack(self, name, q)

    monkeypatch.setattr(LIBRARIES[to], "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(DATA / "gptq_zeros", tmp_path / "parts", to, **options)
    assert not list((tmp_path / "parts").glob("*.safetensors"))
    at_most = 100
    report = convert_checkpoint(DATA / "gptq_zeros", tmp_path / "parts", to, **options)
    assert 5 < len(packed) < 5 + count
    assert report == whole and list(report) == list(whole)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_other_arguments_do_not_continue(ours, tmp_path, monkeypatch):
    """Weights in finished files of another conversion are not mixed with new ones."""
    path, _ = ours
    options: dict[str, Any] = {"max_shard_size": 1000, "resume": True}
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            format = Int4(scale_dtype="float16")
            convert_checkpoint(path, tmp_path, "mlx", requantize=format, **options)
    assert list(tmp_path.glob(".unfinished-*"))
    format = Int8(block_size=64, scale_dtype="bfloat16")
    convert_checkpoint(path, tmp_path, "mlx", requantize=format, **options)
    found = read_checkpoint(tmp_path)["b.weight"]
    assert isinstance(found, eqquant.QuantizedArray) and found.format.bits == 8
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("damaged", ["0.json", "0.safetensors"])
def test_damaged_files_are_written_again(damaged, ours, tmp_path, monkeypatch):
    """A machine that loses power may leave short files."""
    path, _ = ours
    options: dict[str, Any] = {"max_shard_size": 1000, "resume": True}
    options["requantize"] = Int8(block_size=64, scale_dtype="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert_checkpoint(path, tmp_path / "parts", "mlx", **options)
    (found,) = tmp_path.glob(f"parts/.unfinished-*/{damaged}")
    found.write_bytes(found.read_bytes()[:-5])
    convert_checkpoint(path, tmp_path / "parts", "mlx", **options)
    convert_checkpoint(path, tmp_path / "whole", "mlx", **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_shards_of_an_earlier_conversion_are_removed(ours, tmp_path):
    """Some libraries read all shards in a folder."""
    path, _ = ours
    other = tmp_path / "model-of-mine.safetensors"
    other.touch()
    options: dict[str, Any] = {"requantize": Int4(32, "bfloat16")}
    for size, count in ((100, 3), (1, 3), (10**9, 1)):
        convert_checkpoint(path, tmp_path, "mlx", max_shard_size=size, **options)
        shards = {*tmp_path.glob("*.safetensors")} - {other}
        assert len(shards) >= count if size < 10**9 else len(shards) == 1
        names = {re.sub(r".*-of-", "", shard.name) for shard in shards}
        assert len(names) == 1
    assert other.exists()


def test_wrong_arguments(ours, tmp_path):
    path, _ = ours
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="expected a folder, but .*file is a file"):
        convert_checkpoint(path, tmp_path / "file", "mlx")
    with pytest.raises(ValueError, match="GGUF is one file, but .* is a folder"):
        convert_checkpoint(path, tmp_path, "gguf")
    with pytest.raises(ValueError, match="max_shard_size must be a positive integer"):
        convert_checkpoint(path, tmp_path / "x", "mlx", max_shard_size=0)
    with pytest.raises(ValueError, match="was requantized, and then has the format"):
        convert_checkpoint(path, tmp_path / "x", "mlx", requantize="nf4")
    with pytest.raises(ValueError, match="to must be one of .*gptq.*got 'vllm'"):
        convert_checkpoint(path, tmp_path / "x", "vllm")
    with pytest.raises(ValueError, match="must be different"):
        convert_checkpoint(path, path, "mlx")
    with pytest.raises(ValueError, match="resume must be False for GGUF"):
        convert_checkpoint(path, tmp_path / "x.gguf", "gguf", resume=True)


def test_gguf(tmp_path):
    model = {"a": eqquant.quantize(weight(), Int4(scale_dtype="float16"))}
    model["b"] = eqquant.quantize(weight(), "nf4")
    eqquant.save(tmp_path / "ours", model)
    with pytest.raises(ValueError, match="'b'.*--requantize"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "a.gguf", "gguf")
    report = convert_checkpoint(
        tmp_path / "ours", tmp_path / "a.gguf", "gguf", requantize=model["a"].format
    )
    assert report["a"].after == "Q4_0" and not report["b"].is_exact
    found = read_checkpoint(tmp_path / "a.gguf")
    np.testing.assert_array_equal(values(found["a"]), values(model["a"]))
    again = tmp_path / "again.gguf"
    assert main(["convert", str(tmp_path / "a.gguf"), str(again), "--to", "gguf"]) == 0
    np.testing.assert_array_equal(
        values(read_checkpoint(again)["b"]), values(found["b"])
    )


@pytest.mark.parametrize("to", TARGETS)
def test_progress_is_shown(to, ours, tmp_path, capsys):
    pytest.importorskip("tqdm")
    how = {"requantize": "nf4" if to == "bitsandbytes" else INT4, "progress": True}
    convert_checkpoint(ours[0], tmp_path / f"{to}.file", to, **how)
    shown = capsys.readouterr().err
    titles = ["checking", "writing"] if to == "gguf" else ["converting"]
    for title in titles:
        assert re.search(rf"{title}: 100%.*3/3", shown)
