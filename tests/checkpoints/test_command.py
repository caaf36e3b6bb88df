"""The command line, `eqquant` or `python -m eqquant`."""

import importlib
import pathlib
import runpy
import sys
import tomllib

import eqquant
import numpy as np
import pytest
from eqquant.checkpoints import describe_checkpoint, main, read_checkpoint
from eqquant.kernels import cpu
from helpers import assert_identical
from safetensors.numpy import load_file


ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def src(tmp_path, rng):
    weights = {
        name: {"weight": rng.standard_normal((16, 64)).astype(np.float32)}
        for name in ("up", "down", "head")
    }
    eqquant.save(tmp_path / "src.safetensors", weights, metadata={"by": "a test"})
    return tmp_path / "src.safetensors", weights


def test_quantize_inspect_verify(src, tmp_path, capsys):
    path, weights = src
    dst = tmp_path / "dst.safetensors"
    rules = [
        "--rule",
        "up.*=nf4:block_size=32,scale_dtype=bfloat16",
        "--rule",
        "d*=none",
    ]
    assert main(["quantize", str(path), str(dst), "--format", "int8", *rules]) == 0
    before, after = capsys.readouterr().out.splitlines()
    assert f"{path.stat().st_size:,} bytes" in before
    ratio = path.stat().st_size / dst.stat().st_size
    assert f"{dst.stat().st_size:,} bytes" in after and f"{ratio:.2f}x" in after
    loaded = eqquant.load(dst)
    up = eqquant.NF4(block_size=32, scale_dtype="bfloat16")
    for name, format in (("up", up), ("head", "int8")):
        expected = eqquant.quantize(weights[name]["weight"], format)
        assert_identical(loaded[name]["weight"], expected)
    assert np.array_equal(loaded["down"]["weight"], weights["down"]["weight"])

    assert main(["inspect", str(dst)]) == 0
    out = capsys.readouterr().out
    assert "3 tensors" in out and "by: a test" in out and "total" in out
    lines = [line.split() for line in out.splitlines() if ".weight" in line]
    assert {line[0]: line[2] for line in lines} == {
        "down.weight": "float32",
        "head.weight": "Int8(block_size=None)",
        "up.weight": "NF4(block_size=32,",
    }

    assert main(["verify", str(dst)]) == 0
    assert "checksums match" in capsys.readouterr().out
    data = bytearray(dst.read_bytes())
    data[-1] ^= 1
    dst.write_bytes(data)
    assert main(["inspect", str(dst)]) == 0  # `inspect` reads no tensor.
    assert main(["verify", str(dst)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "CRC-32" in err


def test_a_replaced_checkpoint_is_printed(src, tmp_path, capsys):
    dst = str(tmp_path / "dst.safetensors")
    assert main(["quantize", str(src[0]), dst, "--format", "int8"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["quantize", str(src[0]), dst, "--format", "nf4"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"eqquant: replaced {dst}: 3 tensors")
    assert err.endswith("with Int8(block_size=None)\n")


def test_errors_are_one_line(src, tmp_path, capsys):
    path = str(src[0])
    dst = str(tmp_path / "out")
    for arguments, message in (
        (["verify", dst], "no such file"),
        (["quantize", path, dst, "--rule", "x"], "PATTERN=FORMAT"),
        (["quantize", path, dst, "--format", "int7"], "int7"),
        (["quantize", path, dst, "--format", "nf4:block=3"], "'block'"),
        (["quantize", path, path], "src and dst"),
        (["quantize", path, dst, "--max-shard-size", "0"], "max_shard_size"),
    ):
        assert main(arguments) == 1
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1 and err.startswith("eqquant: ")
    for arguments in (["nothing"], ["verify"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2


def test_without_arguments_it_prints_help(capsys):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in ("quantize", "inspect", "verify", "--version"))


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"eqquant {eqquant.__version__}\n"


def test_console_script():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["eqquant"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_python_dash_m(src, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eqquant", "verify", str(src[0])])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("eqquant", run_name="__main__")
    assert stopped.value.code == 0
    assert "3 tensors" in capsys.readouterr().out


GGUF = pathlib.Path(__file__).parent / "foreign" / "data" / "gguf.gguf"


def test_gguf(tmp_path, capsys):
    assert main(["inspect", str(GGUF)]) == 0
    out = capsys.readouterr().out
    assert "general.architecture: llama\n" in out and "tokens: ['a', 'b', " in out
    for type, expected in (
        ("Q4_0", ["2", "1,216", "684", "4.50", "exact"]),
        ("Q4_K", ["1", "1,024", "576", "4.50", "exact"]),
    ):
        (line,) = (x for x in out.splitlines() if x.startswith(f"{type} ") and "," in x)
        assert line.split(maxsplit=5)[1:] == expected
    assert main(["verify", str(GGUF)]) == 0
    assert "complete; no checksums" in capsys.readouterr().out

    dst = tmp_path / "small.safetensors"
    rules = ["--rule", "Q4_*=int8", "--format", "none"]
    with pytest.warns(UserWarning, match="gguf.gguf is already quantized, in IQ4_NL,"):
        assert main(["quantize", str(GGUF), str(dst), *rules]) == 0
    found = eqquant.load(dst)
    decoded = load_file(GGUF.with_name("gguf_expected.safetensors"))
    for name in ("Q4_0", "Q4_K"):
        assert_identical(found[name], eqquant.quantize(decoded[name], "int8"))
    assert np.asarray(found["Q8_0"]).tobytes() == decoded["Q8_0"].tobytes()
    metadata = eqquant.checkpoints.load_metadata(dst)
    assert metadata["llama.block_count"] == "1" and "tokens" not in metadata
    kept = dst.with_name("small.metadata.gguf")
    assert metadata_of(kept) == metadata_of(GGUF)


def metadata_of(path):
    found = eqquant.checkpoints.describe_checkpoint(path).metadata
    return repr({k: v for k, v in found.items() if k != "general.quantization_version"})


@pytest.mark.slow
def test_from_gguf_to_gguf(tmp_path, capsys):
    dst = tmp_path / "small.gguf"
    k = "affine=true,unsigned=true,double_quantization=k"
    rules = [f"--rule=F32=int4:{k}", "--rule=F16=int8:scale_dtype=float16"]
    command = ["quantize", str(GGUF), str(dst), "--format", "none"]
    with pytest.warns(UserWarning, match="already quantized"):
        assert main([*command, *rules, "--min-size", "1"]) == 0
    assert metadata_of(dst) == metadata_of(GGUF)
    before, after = (read_checkpoint(path) for path in (GGUF, dst))
    assert before.keys() == after.keys()
    for name in before.keys() - {"F32", "F16"}:
        assert_identical(after[name], before[name])
    types = {n: t.type for n, t in describe_checkpoint(dst).tensors.items()}
    assert (types["F32"], types["F16"]) == ("Q4_K", "Q8_0")
    assert after["F32"].format.is_k_quant
    # The default format is no type of GGUF.
    assert main(["quantize", str(GGUF), str(dst), "--rule=*=nf4"]) == 1
    assert "NF4(block_size=64), which no type of GGUF" in capsys.readouterr().err
    assert main(["quantize", str(GGUF.with_name("bitnet_bitlinear")), str(dst)]) == 1
    assert "src must be a GGUF file if dst is one" in capsys.readouterr().err


def test_other_kinds(tmp_path, capsys):
    path = str(GGUF.with_name("bitsandbytes_4bit.safetensors"))
    for command in ("inspect", "verify"):
        assert main([command, path]) == 0
    assert "nf4 in blocks of 64" in capsys.readouterr().out
    assert eqquant.checkpoints.describe_checkpoint(path).kind == "safetensors"
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(GGUF.read_bytes()[:-100])
    for command in ("inspect", "verify"):
        assert main([command, str(damaged)]) == 1
        assert "damaged.gguf: 'BF16' of the shape" in capsys.readouterr().err


def test_the_command_prints_the_rules_for_kernels(capsys):
    assert main(["kernels", "--all"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(cpu.status()) and cpu.describe_rules() in out
    assert main(["kernels"]) == 0
    rules, _, limits = capsys.readouterr().out.partition("Limits within kernels:\n\n")
    assert set(rules.splitlines()[3:]) <= {"", *cpu.describe_rules().splitlines()}
    assert limits.rstrip() == cpu.describe_limits()
