"""Tests of the SASS parser in `benchmarks/_gpu_sass.py`."""

from types import SimpleNamespace

from helpers import load_benchmark


_gpu_sass = load_benchmark("_gpu_sass")
LOOP = """
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
ENCODED = """
        /*0000*/   LDS R4, [R2] ;   /* 0x0000000002047984 */
                                    /* 0x000e280000000800 */
        /*0010*/   HMUL2 R5, R4, R3 ;   /* 0x0000000304057232 */
                                    /* 0x001fca0000000000 */
"""


def test_loops():
    kernel = SimpleNamespace(sass=LOOP)
    names = ["MOV", "LDG.E.64", "FFMA", "BRA", "EXIT", "BRA"]
    assert _gpu_sass.names_in(kernel) == names
    assert _gpu_sass.loops_in(kernel) == [["LDG.E.64", "FFMA", "BRA"]]
    assert _gpu_sass.loop_ranges(kernel) == [(1, 4)]


def test_scheduling_is_decoded():
    kernel = SimpleNamespace(sass=ENCODED)
    assert _gpu_sass.names_in(kernel) == ["LDS", "HMUL2"]
    # HMUL2 waits for the scoreboard that the load releases.
    assert _gpu_sass.instructions_in(kernel) == [
        ("LDS", "R4, [R2] ", 4, False, 0, None, ()),
        ("HMUL2", "R5, R4, R3 ", 5, True, None, None, (0,)),
    ]
