"""llama.cpp, through its tensor library, ggml."""

import ctypes
import functools as ft
import importlib.metadata

import numpy as np
from _peers.llama_cpp import ggml_of, peer, quantized

from . import Quantize, Quantizer, weight_by_weight


# The numbers of the types in ggml.
TYPES = {"q2_K": 10, "q3_K": 11, "q4_0": 2, "q4_K": 12, "q5_K": 13, "q8_0": 8}
# The block size of the K types. The rows of MiniLM are not a multiple of it. For such
# rows `llama-quantize` uses another type; this script joins rows, which takes fewer
# bytes.
BLOCK = 256


class _Traits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("nbytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        (
            "to_float",
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        ),
    ]


def load() -> tuple[str, dict[str, Quantize]]:
    import llama_cpp

    ggml = ggml_of(llama_cpp)
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)

    def round_trip(w, kind: int):
        blocks = np.ascontiguousarray(w.reshape(-1, BLOCK))
        data = quantized(ggml, kind, blocks)
        out = np.empty_like(blocks)
        traits = ggml.ggml_get_type_traits(kind).contents
        traits.to_float(data.ctypes.data, out.ctypes.data, out.size)
        return out.reshape(w.shape), data.nbytes

    version = importlib.metadata.version("llama-cpp-python")
    return f"llama-cpp-python {version}", {
        name: weight_by_weight(ft.partial(round_trip, kind=kind))
        for name, kind in TYPES.items()
    }


quantizer = Quantizer(peer.name, peer.packages, load, peer.header)
