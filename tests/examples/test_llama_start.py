"""The start of examples/llama/generate.py: compiled programs, and the empty cache."""

import functools as ft
import os
import pathlib
import subprocess
import sys
from concurrent.futures import Future

import eqquant
import jax
import jax.numpy as jnp
import pytest
from gguf_models import metadata_of, tensors_of, write_gguf
from helpers import FORMATS, slow


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

from generate import Generator  # noqa: E402 # pyright: ignore
from load import load_model, open_model  # noqa: E402 # pyright: ignore
from program_cache import keep_programs  # noqa: E402 # pyright: ignore


def folder_of_programs() -> str:
    return getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009


@pytest.mark.slow
def test_import_leaves_out_pallas():
    code = "import sys, generate; print('jax.experimental.pallas' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=EXAMPLE,
    )
    assert ran.stdout == "False\n"


def test_program_cache_is_in_the_folder_of_the_user(monkeypatch, tmp_path):
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update(names[0], "chosen")
        keep_programs()
        assert folder_of_programs() == "chosen"
        jax.config.update(names[0], None)
        keep_programs()
        found = pathlib.Path(folder_of_programs())
        assert found.is_relative_to(tmp_path / "eqquant")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_old_programs_are_deleted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = folder_of_programs()
    folder = tmp_path / "eqquant" / "programs"
    for day in range(5):
        path = folder / f"version{day % 2}" / f"{day}-cache"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (day * 86400, day * 86400))
    other = tmp_path / "other"
    other.write_bytes(bytes(100))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_programs(limit=250)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert {path.name for path in folder.rglob("*-cache")} == {"3-cache", "4-cache"}
    assert other.exists()


@pytest.mark.parametrize("format", [None, slow("int8")])
def test_programs_are_compiled_before_weights_arrive(format, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata_of("llama3"), tensors_of("llama3"))
    decode = "all" if format else False
    load = ft.partial(load_model, path, format, decode=decode, progress=False)
    model, skeleton = load(), load(abstract=True)
    is_real = [isinstance(x, jax.Array) for x in jax.tree.leaves(skeleton)]
    assert not any(is_real)
    early = Generator(skeleton, 32)
    loading = Future()
    early.start_compiling(3, loading)
    loading.set_result(model)
    early.compile(3)
    early.put(model)
    assert early.prefill([1, 2, 3]) == Generator(model, 32).prefill([1, 2, 3])
    with pytest.raises(ValueError, match="other formats or shapes"):
        early.put(load(dtype=jnp.bfloat16))


def test_a_random_model_has_the_tokenizer_of_another_file(tmp_path):
    import _random_gguf  # pyright: ignore

    given, path = tmp_path / "given.gguf", tmp_path / "random.gguf"
    write_gguf(given, metadata_of("llama3"), tensors_of("llama3"))
    sizes = dict(layers=2, size=64, hidden=96, heads=4, kv_heads=2)
    _random_gguf.write(path, given, **sizes)
    text, expected = (open_model(x).vocabulary() for x in (path, given))
    assert text.tokenizer.get_vocab() == expected.tokenizer.get_vocab()
    weight = load_model(path, progress=False).layers.mlp.up.weight
    assert eqquant.is_quantized(weight) and weight.shape == (2, 96, 64)
    largest = jnp.abs(weight.dequantize()).max()
    # Scales and offsets are rounded to float16, by at most 2**-11 each.
    assert abs(largest / (1 / 8) - 1) < 3 * 2**-11


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_a_cache_of_zeros_is_empty(format):
    data = pathlib.Path(__file__).parent / "data" / "llama" / "llama3"
    cache = Generator(load_model(data, progress=False), 32, format).cache
    for part in (cache.keys, cache.values):
        assert part.format == format and not eqquant.dequantize(part).any()


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    model = tmp_path / "model.gguf"
    write_gguf(model, metadata_of("llama3"), tensors_of("llama3"))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(EXAMPLE / "generate.py"), str(model), "a b"]

    def start(*options: str) -> tuple[str, set[str]]:
        ran = subprocess.run(
            [*command, "--tokens", "4", "--temperature", "0", *options],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert not ran.returncode, ran.stderr
        text, _ = ran.stdout.split("\nloading")
        return text, {f.name for f in tmp_path.rglob("*-cache")}

    text, programs = start("--no-program-cache")
    assert not programs
    assert start()[0] == text
    text, programs = start()
    # For the prompt and for each token. Indexing an array would compile another one.
    assert len(programs) == 2
    assert all(name.startswith("jit_step") for name in programs)
    assert start() == (text, programs)
