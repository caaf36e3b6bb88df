"""Tests of `GPUKernel` and `GPUProgram`, with shell scripts in place of NVIDIA's
tools."""

import types

import jax
import pytest
from eqquant.debug import _gpu_program, GPUKernel, GPUProgram


PTX = """
.version 8.7
.target sm_90a
.visible .entry first_kernel(
    .param .u64 first_kernel_param_0
)
{ ret; }
.func helper() { ret; }
.entry loop_fusion$1()
{ ret; }
"""

LAUNCHES = """\
000: kWhile #while
  000: kKernel fusion
  001: kGemm custom-call
001: kDynamicSlice copy
002: kCopy copy.1
"""


def test_kernels_are_the_entry_points():
    found = _gpu_program.kernels_in([PTX, PTX.replace("first", "second")], "sm_90a")
    names = ["first_kernel", "loop_fusion$1", "second_kernel", "loop_fusion$1"]
    assert [kernel.name for kernel in found] == names
    assert {kernel.architecture for kernel in found} == {"sm_90a"}
    assert found[0].ptx == PTX
    assert _gpu_program.kernels_in([], "sm_80") == ()


def test_launches_are_counted_once():
    """A loop does not count, its body counts once, and repeated lists are ignored."""
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()

    def count(text):
        launches = _gpu_program.without_repetition(text)
        return GPUProgram(compiled, "h100", launches, ()).num_launches

    assert count(LAUNCHES) == 3
    assert count(LAUNCHES + LAUNCHES) == 3
    grouped = "000: kCommandBuffer command_buffer\n  000: kKernel fusion\n"
    assert count(LAUNCHES + grouped) == 3
    assert count("") == 0
    assert "HloModule" in GPUProgram(compiled, "h100", "", ()).as_text()


PTXAS = """#!/bin/sh
# Called as: ptxas -arch=A -v source -o binary
echo "$1 of $(cat $3)" > "$5"
echo "ptxas info    : Used 40 registers, 8 bytes spill stores, 64 bytes smem" >&2
"""
NVDISASM = """#!/bin/sh
echo "        /*0010*/                   EXIT ; // $(cat $3)"
"""


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """Return a function that installs a tool, in a folder of `PATH` by default."""
    monkeypatch.setattr(_gpu_program.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def add(name, program, to=tmp_path):
        to.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(program)
        (to / name).chmod(0o755)

    return add


def test_a_kernel_is_assembled_for_its_chip(tools):
    tools("ptxas", PTXAS)
    tools("nvdisasm", NVDISASM)
    kernel = GPUKernel("k", "sm_90a", "the program")
    assert (kernel.registers, kernel.spilled, kernel.shared) == (40, 8, 64)
    assert "EXIT ; // -arch=sm_90a of the program" in kernel.sass


def test_tools_of_wheels_have_precedence(tools, monkeypatch, tmp_path):
    wheels = tmp_path / "site/nvidia"
    tools("ptxas", PTXAS.replace("40", "39"))
    tools("ptxas", PTXAS, wheels / "cu13/bin")
    tools("nvdisasm", NVDISASM)
    spec = types.SimpleNamespace(submodule_search_locations=[str(wheels)])
    monkeypatch.setattr(_gpu_program.importlib.util, "find_spec", lambda name: spec)
    assert GPUKernel("k", "sm_80", "").registers == 40


def test_errors_contain_the_message_of_the_tool(tools):
    tools("ptxas", "#!/bin/sh\necho 'ptxas fatal: no such sm' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="ptxas fatal: no such sm"):
        _ = GPUKernel("k", "sm_1", "").registers


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(_gpu_program.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_gpu_program.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="ptxas.*eqquant\\[gpu-compiler\\]"):
        _ = GPUKernel("k", "sm_80", "").registers
