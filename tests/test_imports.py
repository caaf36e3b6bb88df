"""Modules that `import eqquant` leaves for their first use, because they take long."""

import subprocess
import sys

import pytest


LATE = {
    "eqquant.debug",
    "eqquant.kernels.gpu",
    "eqquant.kernels.tpu",
    "jax.experimental.pallas",
}
_multiply = """
import eqquant, jax.numpy as jnp
q = eqquant.quantize(jnp.ones((64, 64)), "nf4")
jnp.ones((2, 64)) @ q"""
_use_all = """
import eqquant
from eqquant.kernels import gpu, tpu
eqquant.debug.explain"""


@pytest.mark.parametrize("program, used", [(_multiply, set()), (_use_all, LATE)])
def test_modules_are_imported_on_first_use(program, used):
    command = [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert LATE & {*ran.stdout.split()} == used


def test_names_of_late_modules_are_public():
    import eqquant

    assert eqquant.debug.explain.__module__ == "eqquant.debug"
    assert "debug" in dir(eqquant)
    with pytest.raises(AttributeError, match="has no attribute 'debugger'"):
        eqquant.debugger  # noqa: B018
