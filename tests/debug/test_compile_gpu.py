"""`compile_for_gpu`: where the compiler is installed, and what is said where not."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from eqquant.debug import _compile, _gpu_program, compile_for_gpu
from helpers import needs_gpu_compiler


def test_the_chips_are_named():
    with pytest.raises(ValueError, match="chip must be one of .*'h100'.*got 'v100'"):
        compile_for_gpu(lambda x: x, jnp.ones(3), chip="v100")


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(_compile, "has_gpu_compiler", lambda: False)
    with pytest.raises(RuntimeError, match="eqquant\\[gpu-compiler\\]"):
        compile_for_gpu(lambda x: x, jnp.ones(3))
    monkeypatch.setattr(_gpu_program.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_gpu_program.shutil, "which", lambda name: None)
    kernel = eqquant.debug.GPUKernel("k", "sm_80", "")
    with pytest.raises(RuntimeError, match="ptxas is not installed"):
        _ = kernel.registers


SASS = """
.L_x_1:
        /*0010*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0020*/              @!P0 LDG.E.64 R2, [R2.64] ;
        /*0030*/                   FFMA R4, R2, R3, R4 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
"""


def test_what_mosaic_compiled_before_is_known(monkeypatch):
    """A program names its kernels by text that has quotes in it, too."""
    monkeypatch.setattr(_compile, "_compiled_by_mosaic", {})
    program = 'kernel_hash = "a\\"b\\\\", module = "x", kernel_hash = "c", '
    of = lambda text, *new: _compile._all_of_mosaic(text, list(new))
    assert of(program, "first", "second") == ["first", "second"]
    assert of(program) == ["first", "second"]
    assert of('kernel_hash = "c" kernel_hash = "d"', "third") == ["second", "third"]
    assert of("") == []
    # What it cannot show it does not leave out.
    for new in [(), ("fourth", "fifth")]:
        with pytest.raises(RuntimeError, match=f"has 1 kernels .* wrote {len(new)}"):
            of('kernel_hash = "c" kernel_hash = "e"', *new)
    assert of('kernel_hash = "c"') == ["second"]


def test_loops_are_found():
    kernel = eqquant.debug.GPUKernel("k", "sm_80", "")
    said = "Used 24 registers\n 8 bytes stack frame, 16 bytes spill stores"
    kernel.__dict__["_assembled"] = said, SASS
    assert (kernel.registers, kernel.spilled) == (24, 16)
    assert kernel.instructions == ["MOV", "LDG.E.64", "FFMA", "BRA", "EXIT", "BRA"]
    assert kernel.loops == [["LDG.E.64", "FFMA", "BRA"]]


@needs_gpu_compiler
@pytest.mark.parametrize("chip", ["a100", "h100"])
def test_a_product_is_compiled(chip):
    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 512), (512, 256)))
    program = compile_for_gpu(lambda x, w: x @ w, *shapes, chip=chip)
    assert "dot" in program.as_text() and "gemm" in program.launches
    architecture = {"a100": "sm_80", "h100": "sm_90a"}[chip]
    for kernel in program.kernels:
        assert f".target {architecture}" in kernel.ptx
        assert kernel.registers > 0 and kernel.spilled == 0
    assert any("MMA" in name for k in program.kernels for name in k.instructions)
