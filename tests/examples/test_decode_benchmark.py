"""Test the benchmark of language models with a small file, without llama.cpp."""

import importlib
import os

import numpy as np
import pytest
from gguf_models import metadata_of, Tensor, tensors_of, write


def q8_0(name, array):
    """Return a tensor of a file: matrices in Q8_0 where blocks fit, and float32."""
    if array.ndim < 2 or array.shape[-1] % 32:
        return Tensor(name, array.shape, 0, array.nbytes, lambda: array)
    blocks = array.reshape(-1, 32)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(blocks / np.float32(scales)).astype(np.int8)
    data = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], -1)
    return Tensor(name, array.shape, 8, data.nbytes, lambda: data)


@pytest.mark.slow
def test_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "small.gguf"
    tensors = [q8_0(*item) for item in tensors_of("llama3").items()]
    write(path, metadata_of("llama3"), tensors)
    script = importlib.import_module("decode")
    gguf = importlib.import_module("_decode_gguf")
    here = {k: v for k, v in gguf.VARIANTS.items() if v[0] == "eqquant"}
    monkeypatch.setattr(gguf, "VARIANTS", here)
    monkeypatch.setattr(gguf, "DECODE", ((1, 0), (1, 5), (3, 5)))
    threads = str(len(os.sched_getaffinity(0)))
    options = ["--gguf", str(path), "--folder", str(tmp_path), "--threads", threads]
    options += ["--rounds", "2", "--steps", "2", "--markdown"]
    monkeypatch.setattr("sys.argv", ["decode.py", *options])
    script.main()
    print(capsys.readouterr().out)
    lines = [x for x in capsys.readouterr().out.splitlines() if x[:1] == "|"]
    head, _, *rows = [[cell.strip() for cell in x.split("|")[1:-1]] for x in lines]
    assert [row[0] for row in rows] == list(here)
    assert [x for x in head if "decode" in x] == [
        "decode: context 0: tokens/s",
        "decode: context 5: tokens/s",
        "decode: 3 sequences, context 5: tokens/s",
    ]
    for row in rows:
        for title, cell in zip(head[1:], row[1:], strict=True):
            if title == "x llama.cpp":
                assert cell in ("-", "nan")
            else:
                assert float(cell.split()[0]) > 0
