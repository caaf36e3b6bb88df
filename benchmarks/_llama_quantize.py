"""Quantize a GGUF file with llama.cpp, as `llama-quantize --imatrix` does.

Run as a script, this file is in the environment of llama.cpp:

    python _llama_quantize.py SOURCE TARGET TYPE IMPORTANCE.npz
"""

import ctypes
import importlib
import os
import pathlib
import sys
from collections.abc import Mapping

import numpy as np


def quantize_file(
    source: pathlib.Path,
    target: pathlib.Path,
    type: str,
    importance: Mapping[str, np.ndarray],
    cache: pathlib.Path,
) -> None:
    """Write the GGUF file `target`, with the matrices of `source` in a type such as
    `"Q4_K_M"`.

    llama.cpp first decodes all tensors to float32, because it copies a tensor that has
    the wanted type. `importance` maps names of tensors to the mean squares of the
    inputs of their columns. Raise a `RuntimeError` if llama.cpp cannot be installed, or
    fails.
    """
    from _environments import install, last_line, run
    from _peers.llama_cpp import peer

    python = install(peer.name, peer.packages, cache, peer.header)
    arrays = target.with_suffix(".npz")
    np.savez(arrays, **importance)
    command = (__file__, str(source), str(target), type, str(arrays))
    ran = run(python, *command, environment={}, capture_output=True)
    arrays.unlink()
    if ran.returncode:
        raise RuntimeError(f"llama.cpp: {type}: {last_line(ran.stderr)}")


def main(source: str, target: str, type: str, importance: str) -> int:
    llama_cpp = importlib.import_module("llama_cpp")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    decoded = f"{target}.float32"

    def convert(source: str, target: str) -> int:
        files = source.encode(), target.encode()
        return llama_cpp.llama_model_quantize(*files, ctypes.byref(options))

    if status := convert(source, decoded):
        return status
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
    with np.load(importance) as file:
        arrays = {name.encode(): file[name].astype(np.float32) for name in file.files}
    # llama.cpp reads entries until it finds one without a name.
    entries = (llama_cpp.llama_model_imatrix_data * (len(arrays) + 1))()
    for entry, (name, array) in zip(entries, arrays.items(), strict=False):
        address = array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.name, entry.data, entry.size = name, address, array.size
    if arrays:
        options.imatrix = entries
    status = convert(decoded, target)
    os.remove(decoded)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
