"""Find the library of native kernels, check it, and register it with XLA, once."""

import ctypes
import functools as ft
import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import jax

from ..._jax import check_one_of
from ._build import architecture, fingerprint, library


# The instruction sets of CPUs. Each includes all previous ones.
_sets = {"x86": ("avx2", "avx512", "vnni", "amx"), "arm": ("neon", "dotprod", "i8mm")}
instruction_sets = _sets.get(architecture() or "", ())
_handlers = "dot", "encode", "rotate", "round", "round_int8", "search", "transpose"
# The sets that multiply int8.
INT8_SETS = "vnni", "i8mm", "dotprod"


class Library(NamedTuple):
    """The loaded library.

    - `instructions`: the first entries of `instruction_sets`, which kernels may use.
    - `scratch`: a function that returns the bytes of memory that a kernel needs.
    - `relayout`: a function that moves bits: see `_relayout.py`.
    - `bfloat16`: whether XLA multiplies bfloat16 faster than float32.
    """

    instructions: tuple[str, ...]
    scratch: Callable[..., int]
    relayout: Callable[..., int]
    bfloat16: bool = False


@ft.cache
def load() -> Library | str:
    """Return the library, or the reason why there is none.

    The lowering of the first product reads the environment variable `EQQUANT_CPU`. It
    is `off`, or the last instruction set that kernels may use.
    """
    best = instruction_sets[-1] if instruction_sets else "off"
    last = os.environ.get("EQQUANT_CPU", best)
    check_one_of("", "EQQUANT_CPU", last, ("off", *instruction_sets))
    if last == "off":
        return "native kernels are switched off (EQQUANT_CPU=off)"
    if not library.exists():
        return "eqquant was installed without native kernels"
    try:
        native = ctypes.CDLL(str(library))
        native.eqquant_sources.restype = ctypes.c_char_p
        if native.eqquant_sources().decode() != fingerprint():
            return "the native kernels are older than their sources (reinstall eqquant)"
        if native.eqquant_interface() > _interface_of_xla():
            return "the native kernels were built for a later JAX (reinstall eqquant)"
        for name in _handlers:
            handler = jax.ffi.pycapsule(getattr(native, f"eqquant_{name}"))
            jax.ffi.register_ffi_target(f"eqquant_{name}", handler, platform="cpu")
    except Exception as error:  # XLA computes the products.
        return f"the native kernels cannot be loaded ({error})"
    most = min(native.eqquant_instructions(), 1 + instruction_sets.index(last))
    if not most:
        return "this CPU lacks AVX2"
    scratch = native.eqquant_scratch
    scratch.restype = ctypes.c_int64
    scratch.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int,
        *[ctypes.c_int64] * 6,
        *[ctypes.c_int] * 4,
    ]
    relayout = native.eqquant_relayout
    array, number = ctypes.c_void_p, ctypes.c_int64
    relayout.argtypes = [array, number, number, array, number, array, array, number]
    usable = instruction_sets[:most]
    bfloat16 = "vnni" in usable and bool(native.eqquant_bfloat16())
    return Library(usable, scratch, relayout, bfloat16)


def _interface_of_xla() -> int:
    """Return the version of XLA's interface, from the header files of jaxlib.

    JAX accepts a handler for a later version, but then finds no devices.
    """
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (
        re.search(rf"^#define XLA_FFI_API_{part} (\d+)", header, re.MULTILINE)
        for part in ("MAJOR", "MINOR")
    )
    assert major and minor, "the version of XLA's interface was not found"
    return int(major[1]) * 1000 + int(minor[1])


def status() -> str:
    """Describe the library in one line."""
    found = load()
    if isinstance(found, str):
        return f"Native CPU kernels: none; {found}. XLA serves."
    return f"Native CPU kernels: up to {found.instructions[-1]}."
