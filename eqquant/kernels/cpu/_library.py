"""The library of native kernels: found, checked, and made known to XLA, once."""

import ctypes
import functools as ft
import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import jax

from ._build import architecture, fingerprint, library


# What a CPU may have, each with all of those before it.
_sets = {"x86": ("avx2", "avx512", "vnni", "amx"), "arm": ("neon", "dotprod", "i8mm")}
instruction_sets = _sets.get(architecture() or "", ())


class Library(NamedTuple):
    # The instructions that it may use: some of `instruction_sets`, from the first on.
    instructions: tuple[str, ...]
    scratch: Callable[..., int]
    # Whether XLA multiplies bfloat16 faster than float32.
    bfloat16: bool = False


@ft.cache
def load() -> Library | str:
    """The library, or why there is none.

    The environment variable `EQQUANT_CPU` is read here, when the first product is
    lowered: `off`, or the best of the instruction sets to use.
    """
    best = instruction_sets[-1] if instruction_sets else "off"
    wanted = os.environ.get("EQQUANT_CPU", best)
    if wanted not in ("off", *instruction_sets):
        raise ValueError(
            f"EQQUANT_CPU must be one of {('off', *instruction_sets)}, got {wanted!r}."
        )
    if wanted == "off":
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
        for name in ("eqquant_dot", "eqquant_encode", "eqquant_round"):
            handler = jax.ffi.pycapsule(getattr(native, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception as error:  # Whatever is wrong with it, XLA serves.
        return f"the native kernels cannot be loaded ({error})"
    most = min(native.eqquant_instructions(), 1 + instruction_sets.index(wanted))
    if not most:
        return "this CPU lacks AVX2"
    scratch = native.eqquant_scratch
    scratch.restype = ctypes.c_int64
    scratch.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int,
        *[ctypes.c_int64] * 5,
        ctypes.c_int,
    ]
    usable = instruction_sets[:most]
    bfloat16 = "vnni" in usable and bool(native.eqquant_bfloat16())
    return Library(usable, scratch, bfloat16)


def _interface_of_xla() -> int:
    """As the header files say that came with it. To register a handler of a later one
    would not fail here, but when JAX looks for devices, and leave it with none."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (
        re.search(rf"^#define XLA_FFI_API_{part} (\d+)", header, re.MULTILINE)
        for part in ("MAJOR", "MINOR")
    )
    assert major and minor, "the version of XLA's interface was not found"
    return int(major[1]) * 1000 + int(minor[1])


def status() -> str:
    """One line on what there is."""
    found = load()
    if isinstance(found, str):
        return f"Native CPU kernels: none; {found}. XLA serves."
    return f"Native CPU kernels: up to {found.instructions[-1]}."
