"""A mesh over several processes: results of one process, and a shared checkpoint."""

import os
import pathlib
import socket
import subprocess
import sys

import eqquant
import equinox as eqx
import jax
import numpy as np
import process
import pytest


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes(tmp_path, count):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    if cache := jax.config.jax_compilation_cache_dir:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    port, folder = str(free_port()), tmp_path / "model"
    expected = process.reference()
    eqquant.save(tmp_path / "reference.safetensors", expected)
    program = pathlib.Path(process.__file__)
    logs = [tmp_path / f"{i}.log" for i in range(count)]
    running = []
    for i, log in enumerate(logs):
        command = [sys.executable, program, str(i), str(count), port, folder]
        with log.open("wb") as out:
            running.append(
                subprocess.Popen(command, stdout=out, stderr=out, env=environment)
            )
    try:
        # The last process kills itself while saving, while the others wait for it.
        running[-1].wait(500)
    finally:
        for one in running:
            one.kill()
            one.wait()
    said = "\n".join(log.read_text() for log in logs)
    assert (folder / "killed").exists(), said

    # The previous checkpoint is intact, for any number of processes.
    keys = jax.random.split(jax.random.key(3), 4)
    like = {"model": expected["trained"], "keys": keys, "step": 0}
    found = eqquant.load(folder, like)
    assert found["step"] == 1 and (found["keys"] == keys).all()
    models = (eqx.filter(t["model"], eqx.is_array) for t in (found, like))
    for a, b in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_allclose(a, b, process.SUMS, process.SUMS)
    # The next save removes the files of interrupted saves.
    eqquant.save(folder, {"step": 4})
    assert {x.name for x in folder.iterdir()} == {"model.safetensors", "killed"}
