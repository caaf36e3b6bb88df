"""The environment in bug reports."""

import pathlib
import platform

import eqquant
import jax
import pytest
from eqquant.kernels import cpu


def rows():
    text = eqquant.debug.environment()
    return dict(line.split("  ", 1) for line in text.splitlines())


def test_versions_kernels_and_devices():
    found = {name: value.strip() for name, value in rows().items()}
    assert found["jax"] == jax.__version__
    assert found["kernels"] == cpu.status()
    assert f"{len(jax.devices())} x " in found["devices"]
    assert found["jax_enable_x64"] == str(jax.config.jax_enable_x64)


@pytest.mark.skipif(
    not pathlib.Path("/proc/cpuinfo").exists(), reason="only Linux has this file"
)
def test_instructions_of_the_native_kernels_are_listed():
    if "avx512" in cpu.status():
        assert "avx512f" in rows()["CPU"]


def test_no_private_data():
    text = eqquant.debug.environment()
    assert str(pathlib.Path.home()) not in text and platform.node() not in text
