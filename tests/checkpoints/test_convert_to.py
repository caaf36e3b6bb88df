"""Conversion of checkpoints for other libraries."""

import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import eqquant
import jax
import numpy as np
import pytest
from eqquant import Int4, Int8
from eqquant.checkpoints import convert_checkpoint, main, read_checkpoint
from eqquant.checkpoints._convert_gguf import GGUFLibrary
from eqquant.checkpoints._convert_to import LIBRARIES, TARGETS


INT4 = Int4(scale_dtype="float16")
DATA = pathlib.Path(__file__).parent / "foreign/data"


def weight(dtype="float32"):
    return jax.random.normal(jax.random.key(0), (32, 128)).astype(dtype)


def values(q):
    if not eqquant.is_quantized(q):
        return np.asarray(q)
    return np.asarray(q.with_dtype("float32").dequantize())


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def contents(path):
    if path.is_file():
        return {"": path.read_bytes()}
    return {file.name: file.read_bytes() for file in path.iterdir()}


AGAIN = dict.fromkeys(TARGETS, INT4) | {"bitsandbytes": "nf4"}


@pytest.mark.parametrize("to", TARGETS)
def test_an_interrupted_conversion_continues(to, tmp_path, monkeypatch):
    """The second call packs only the weights without a finished file. All files equal
    the files of an uninterrupted call."""
    options: dict[str, Any] = {"max_shard_size": 12_000}
    if to in ("gguf", "bitsandbytes"):
        options["requantize"] = AGAIN[to]
    whole = convert_checkpoint(DATA / "gptq_zeros", tmp_path / "whole", to, **options)
    count = sum(x.before != x.after for x in whole.values())
    options["resume"] = True
    packed, at_most = set(), 5
    library = LIBRARIES.get(to, GGUFLibrary)
    pack = library.pack

    def interrupted(self, name, q):
        if len(packed) == at_most:
            raise KeyboardInterrupt
        packed.add(name)
        return pack(self, name, q)

    monkeypatch.setattr(library, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(DATA / "gptq_zeros", tmp_path / "parts", to, **options)
    hidden = tmp_path if to == "gguf" else tmp_path / "parts"
    assert [x.name.split("-")[0] for x in hidden.glob(".*")] == [
        ".parts.unfinished" if to == "gguf" else ".unfinished"
    ]
    assert not list((tmp_path / "parts").glob("*.safetensors"))
    at_most, before = 100, set(packed)
    packed.clear()
    report = convert_checkpoint(DATA / "gptq_zeros", tmp_path / "parts", to, **options)
    assert len(before | packed) == count and len(before - packed) > 0
    assert report == whole and list(report) == list(whole)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert not list(hidden.glob(".*"))


@pytest.mark.parametrize("to", TARGETS)
def test_an_interruption_after_the_last_weight(to, ours, tmp_path):
    """All shards are finished then: no empty shard follows."""
    path, _ = ours
    options: dict[str, Any] = {"requantize": AGAIN[to], "max_shard_size": 1000}
    convert_checkpoint(path, tmp_path / "whole", to, **options)
    options["resume"] = True
    unfinished(path, tmp_path / "parts", to, **options)
    convert_checkpoint(path, tmp_path / "parts", to, **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def stop_at(replace, names):
    """Return a function that raises an error instead of renaming a finished file."""

    def stopped(source, target):
        if pathlib.Path(target).name.split("-of-")[0] in names:
            raise KeyboardInterrupt
        replace(source, target)

    return stopped


INT8 = {"mlx": Int8(64, "bfloat16"), "gguf": Int8(32, "float16")}


def unfinished(path, target, to, **options) -> pathlib.Path:
    """Stop a conversion after its last weight. Return the hidden folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", stop_at(os.replace, {target.name, "model-00001"}))
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(path, target, to, **options)
    (hidden,) = target.parent.rglob(".*unfinished-*")
    assert len(list(hidden.glob("*.json"))) > 1
    return hidden


@pytest.mark.parametrize("to", ["mlx", "gguf"])
def test_other_arguments_do_not_continue(to, ours, tmp_path):
    """Weights in finished files of another conversion are not mixed with new ones."""
    path, _ = ours
    target = tmp_path / "new/target"
    options: dict[str, Any] = {"max_shard_size": 1000, "resume": True}
    unfinished(path, target, to, requantize=INT4, **options)
    convert_checkpoint(path, target, to, requantize=INT8[to], **options)
    found = read_checkpoint(target)["b.weight"]
    assert isinstance(found, eqquant.QuantizedArray) and found.format.bits == 8
    assert not list((tmp_path / "new").rglob(".*"))


@pytest.mark.parametrize("to", ["mlx", "gguf"])
def test_another_source_does_not_continue(to, ours, tmp_path):
    """The source has another file with the same size and the same times."""
    path, model = ours
    target = tmp_path / "new/target"
    options: dict[str, Any] = {"max_shard_size": 1000, "resume": True}
    options["requantize"] = INT8[to]
    unfinished(path, target, to, **options)
    (file,) = path.glob("*.safetensors")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    model["b"]["bias"] = model["b"]["bias"] + 1
    eqquant.save(path, model)
    os.utime(file, ns=times)
    convert_checkpoint(path, target, to, **options)
    found = read_checkpoint(target)["b.bias"]
    np.testing.assert_array_equal(found, model["b"]["bias"])


@pytest.mark.parametrize("to", ["mlx", "gguf"])
@pytest.mark.parametrize("damaged", ["0.json", "0.safetensors", "one byte"])
def test_damaged_files_are_written_again(damaged, to, ours, tmp_path):
    """A machine that loses power may leave short files, and a disk may be damaged."""
    path, _ = ours
    options: dict[str, Any] = {"max_shard_size": 1000, "resume": True}
    options["requantize"] = INT8[to]
    hidden = unfinished(path, tmp_path / "new/parts", to, **options)
    file = hidden / ("0.safetensors" if damaged == "one byte" else damaged)
    raw = bytearray(file.read_bytes())
    if damaged == "one byte":
        raw[-1] ^= 1
    else:
        del raw[-5:]
    file.write_bytes(raw)
    convert_checkpoint(path, tmp_path / "new/parts", to, **options)
    convert_checkpoint(path, tmp_path / "whole", to, **options)
    assert contents(tmp_path / "new/parts") == contents(tmp_path / "whole")


def test_unfinished_gguf_files_in_one_folder(ours, tmp_path):
    """A conversion leaves the unfinished files of other targets alone."""
    path, _ = ours
    options: dict[str, Any] = {"max_shard_size": 1000, "resume": True}
    options["requantize"] = INT8["gguf"]
    hidden = unfinished(path, tmp_path / "new/a.gguf", "gguf", **options)
    for name in ("b.gguf", "a"):
        convert_checkpoint(path, tmp_path / "new" / name, "gguf", **options)
        assert hidden.exists()
    convert_checkpoint(path, tmp_path / "new/a.gguf", "gguf", **options)
    assert {file.name for file in hidden.parent.iterdir()} == {"a", "a.gguf", "b.gguf"}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["gptq", "gguf"])
def test_a_killed_conversion_continues(to, tmp_path):
    """Kill the command after its second shard, then run it again."""
    w = jax.random.normal(jax.random.key(0), (1024, 2048))
    q = eqquant.quantize(w, INT4)
    model = {f"l{i}": {"weight": q * 2.0**i} for i in range(12)}
    eqquant.save(tmp_path / "src", model)

    def command(target):
        arguments = ["convert", tmp_path / "src", tmp_path / target, "--to", to]
        more = ["--resume", "--max-shard-size", "1"]
        return [sys.executable, "-m", "eqquant", *map(str, arguments), *more]

    notes = lambda: list(tmp_path.rglob(".*unfinished-*/*.json"))
    with subprocess.Popen(command("parts")) as process:
        while len(notes()) < 2:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    finished = {file: file.stat().st_mtime_ns for file in notes()}
    assert 2 <= len(finished) < 12
    with subprocess.Popen(command("parts")) as process:
        while len(now := notes()) <= len(finished) and process.poll() is None:
            time.sleep(0.001)
        process.kill()  # Again, while it continues.
    if process.returncode:
        for file in now:
            assert (
                finished.get(file, file.stat().st_mtime_ns) == file.stat().st_mtime_ns
            )
    subprocess.run(command("parts"), check=True)
    subprocess.run(command("whole"), check=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert {x.name for x in tmp_path.iterdir()} == {"src", "parts", "whole"}


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
    with pytest.raises(ValueError, match="src and dst must be different"):
        convert_checkpoint(
            path / "model.safetensors", path / "model.safetensors", "gguf"
        )
    long = tmp_path / "long"
    eqquant.save(long, {"n" * 64: weight()})
    with pytest.raises(ValueError, match="more than 63 bytes"):
        convert_checkpoint(long, tmp_path / "x.gguf", "gguf")


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
    how = {"requantize": AGAIN[to], "progress": True}
    convert_checkpoint(ours[0], tmp_path / f"{to}.file", to, **how)
    shown = capsys.readouterr().err
    assert re.search(r"converting: 100%.*3/3", shown)
