"""What a program for GPUs says of itself: read from text, with stand-ins for NVIDIA's
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
    """Not the loop itself, but what is in it; nor what is written again in groups."""
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    count = lambda text: (
        GPUProgram(compiled, "h100", _gpu_program.once(text), ()).num_launches
    )
    assert count(LAUNCHES) == 3
    assert count(LAUNCHES + LAUNCHES) == 3
    grouped = "000: kCommandBuffer command_buffer\n  000: kKernel fusion\n"
    assert count(LAUNCHES + grouped) == 3
    assert count("") == 0
    assert "HloModule" in GPUProgram(compiled, "h100", "", ()).as_text()


PTXAS = """#!/bin/sh
# -arch=A -v source -o binary
echo "$1 of $(cat $3)" > "$5"
echo "ptxas info    : Used 40 registers, 8 bytes spill stores, 64 bytes smem" >&2
"""
NVDISASM = """#!/bin/sh
echo '        /*0000*/               @P0 MOV R1, R2 ;'
echo "        /*0010*/                   EXIT ; // $(cat $2)"
"""


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """A folder for tools, where the system has them."""
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
    assert kernel.instructions == ["MOV", "EXIT"]
    assert "-arch=sm_90a of the program" in kernel.sass


BITS = """#!/bin/sh
echo '        /*0000*/   LDS R4, [R2] ;   /* 0x0000000002047984 */'
echo '                                    /* 0x000e280000000800 */'
echo '        /*0010*/   HMUL2 R5, R4, R3 ;   /* 0x0000000304057232 */'
echo '                                    /* 0x001fca0000000000 */'
"""


def test_cycles_are_in_the_bits_of_an_instruction(tools):
    tools("ptxas", PTXAS)
    tools("nvdisasm", BITS)
    kernel = GPUKernel("k", "sm_90a", "")
    assert kernel.instructions == ["LDS", "HMUL2"]
    assert kernel.stalls == [4, 5]
    # The second one waits until the first one's result is written.
    assert kernel.listed == [
        ("LDS", "R4, [R2] ", 4, False, 0, None, ()),
        ("HMUL2", "R5, R4, R3 ", 5, True, None, None, (0,)),
    ]


def test_the_tools_of_wheels_come_first(tools, monkeypatch, tmp_path):
    wheels = tmp_path / "site/nvidia"
    tools("ptxas", PTXAS.replace("40", "39"))
    tools("ptxas", PTXAS, wheels / "cu13/bin")
    tools("nvdisasm", NVDISASM)
    spec = types.SimpleNamespace(submodule_search_locations=[str(wheels)])
    monkeypatch.setattr(_gpu_program.importlib.util, "find_spec", lambda name: spec)
    assert GPUKernel("k", "sm_80", "").registers == 40


def test_what_a_tool_says_is_shown(tools):
    tools("ptxas", "#!/bin/sh\necho 'ptxas fatal: no such sm' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="ptxas failed: ptxas fatal: no such sm"):
        _ = GPUKernel("k", "sm_1", "").registers
