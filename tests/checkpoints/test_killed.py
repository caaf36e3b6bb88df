"""If a save is interrupted, one complete checkpoint is in place."""

import os
import pathlib
import subprocess
import sys
import time

import eqquant
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints import _convert
from eqquant.checkpoints.leaves import _write
from helpers import assert_identical


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run_killed(*arguments) -> list[int]:
    program = pathlib.Path(__file__).with_name("killed.py")
    out = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    return list(map(int, out.stdout.split()))


@needs_fork
@pytest.mark.slow
def test_kills(tmp_path):
    states, steps, pair_steps = run_killed(tmp_path, 20, "--steps")
    # Enough steps to include every kind of change, and more than one final state.
    assert steps > 60 and states > 2 and pair_steps > 40


@needs_fork
@pytest.mark.slow
def test_many_kills(tmp_path):
    (states,) = run_killed(tmp_path, 200)
    assert states > 2


def test_an_error_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    eqquant.save(path, {"w": jnp.ones(3)})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(_write, "_write", full)
    for size in (None, 4):
        with pytest.raises(OSError, match="no space"):
            eqquant.save(
                path, {"a": jnp.ones(3), "b": jnp.ones(3)}, max_shard_size=size
            )
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        assert_identical(eqquant.load(path), {"w": jnp.ones(3)})


@pytest.fixture
def checkpoint(tmp_path, rng):
    weights = {
        f"l{i}": {"weight": rng.standard_normal((16, 64)).astype(np.float32)}
        for i in range(4)
    }
    eqquant.save(tmp_path / "src", weights)
    return tmp_path / "src", weights


@pytest.fixture
def calls(monkeypatch):
    """Count quantizations in `calls`. With `calls.stop`, the third is interrupted."""
    quantize = _convert.quantize_in_pieces

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3 and calls.stop:
            raise KeyboardInterrupt
        return quantize(*args, **kwargs)

    calls = Calls()
    monkeypatch.setattr(_convert, "quantize_in_pieces", counted)
    return calls


class Calls(list):
    stop = False


def test_quantize_checkpoint_resumes(checkpoint, tmp_path, calls):
    src, weights = checkpoint
    dst = tmp_path / "dst"
    kwargs = {"format": "int8", "max_shard_size": 1}
    calls.stop = True
    with pytest.raises(KeyboardInterrupt):
        eqquant.checkpoints.quantize_checkpoint(src, dst, **kwargs)
    finished = {file: file.stat().st_mtime_ns for file in dst.iterdir()}
    assert len(finished) == 2
    with pytest.raises(ValueError, match="found model-"):
        eqquant.load(dst)
    calls.stop = False
    calls.clear()
    eqquant.checkpoints.quantize_checkpoint(src, dst, **kwargs)
    assert len(calls) == 2
    assert all(file.stat().st_mtime_ns == time for file, time in finished.items())
    loaded = eqquant.load(dst)
    for name, layer in weights.items():
        expected = eqquant.quantize(layer["weight"], "int8")
        assert_identical(loaded[name]["weight"], expected)
    # Another format reuses no shards.
    calls.clear()
    eqquant.checkpoints.quantize_checkpoint(src, dst, format="nf4", max_shard_size=1)
    assert len(calls) == 4 and len(list(dst.glob("*-of-*"))) == 4
    assert eqquant.load(dst)["l0"]["weight"].format == eqquant.NF4()


def test_quantize_checkpoint_to_gguf_resumes(checkpoint, tmp_path, calls):
    _, weights = checkpoint
    src = tmp_path / "src.gguf"
    named = {f"{name}.weight": layer["weight"] for name, layer in weights.items()}
    eqquant.checkpoints.write_gguf(src, named)
    kwargs = {"format": eqquant.Int8(32, "float16"), "max_shard_size": 1}
    eqquant.checkpoints.quantize_checkpoint(src, tmp_path / "whole.gguf", **kwargs)
    calls.clear()
    calls.stop, dst = True, tmp_path / "new/dst.gguf"
    with pytest.raises(KeyboardInterrupt):
        eqquant.checkpoints.quantize_checkpoint(src, dst, **kwargs)
    assert not dst.exists()
    calls.stop = False
    calls.clear()
    eqquant.checkpoints.quantize_checkpoint(src, dst, **kwargs)
    assert len(calls) == 3  # The first shard is finished when the second starts.
    assert dst.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert list(dst.parent.iterdir()) == [dst]


@pytest.mark.slow
def test_a_killed_command_resumes(tmp_path, rng):
    """Kill the command after its second shard, then run it again."""
    weights = {
        f"l{i}": {"weight": rng.standard_normal((1024, 2048)).astype(np.float32)}
        for i in range(12)
    }
    eqquant.save(tmp_path / "src", weights)
    dst = tmp_path / "dst"
    arguments = ["quantize", tmp_path / "src", dst, "--max-shard-size", "1"]
    command = [sys.executable, "-m", "eqquant", *map(str, arguments)]
    shards = lambda: sorted(dst.glob("model-*-of-00012.safetensors"))
    with subprocess.Popen(command) as process:
        while len(shards()) < 2:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    finished = {file: file.stat().st_mtime_ns for file in shards()}
    assert 2 <= len(finished) < 12 and not list(dst.glob("*.json"))
    subprocess.run(command, check=True)
    assert len(shards()) == 12 and not list(dst.glob(".*"))
    assert all(file.stat().st_mtime_ns == time for file, time in finished.items())
    loaded = eqquant.load(dst)
    for name, layer in weights.items():
        assert_identical(loaded[name]["weight"], eqquant.quantize(layer["weight"]))
