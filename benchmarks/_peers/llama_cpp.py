"""llama.cpp, through its tensor library, ggml."""

import ctypes
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from . import Peer, Products, Quantize, THREADS


TYPES = {"q4_0": 2, "q8_0": 8, "tq2_0": 35}
FLOAT32 = 0

# ggml's AMX kernels configure the tile sizes once per thread with `_tile_loadconfig`.
# GCC 12 declares that this intrinsic reads 8 of the 64 bytes, so the compiler
# drops the writes to the other bytes. Tiles then have no rows, and the first use of a
# tile raises an illegal instruction. This replacement declares all 64 bytes, and works
# with other versions of GCC as well.
HEADER = """\
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(from) \\
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(from)))
#endif
"""

_pointer, _size, _number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64


class _InitParams(ctypes.Structure):
    _fields_ = [("size", _size), ("buffer", _pointer), ("no_alloc", ctypes.c_bool)]


# The result type and argument types of each function.
_functions = {
    "ggml_init": (_pointer, _InitParams),
    "ggml_free": (None, _pointer),
    "ggml_new_tensor_2d": (_pointer, _pointer, ctypes.c_int, _number, _number),
    "ggml_mul_mat": (_pointer, _pointer, _pointer, _pointer),
    "ggml_new_graph": (_pointer, _pointer),
    "ggml_build_forward_expand": (None, _pointer, _pointer),
    "ggml_nbytes": (_size, _pointer),
    "ggml_row_size": (_size, ctypes.c_int, _number),
    "ggml_quantize_chunk": (
        *(_size, ctypes.c_int, _pointer, _pointer),
        *(_number, _number, _number, _pointer),
    ),
    "ggml_backend_cpu_init": (_pointer,),
    "ggml_backend_cpu_set_n_threads": (None, _pointer, ctypes.c_int),
    "ggml_backend_alloc_ctx_tensors": (_pointer, _pointer, _pointer),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_pointer, _pointer, _pointer),
    "ggml_backend_buffer_free": (None, _pointer),
    "ggml_backend_buffer_get_alloc_size": (_size, _pointer, _pointer),
    "ggml_backend_buft_name": (ctypes.c_char_p, _pointer),
    "ggml_backend_tensor_set": (None, _pointer, _pointer, _size, _size),
    "ggml_backend_tensor_get": (None, _pointer, _pointer, _size, _size),
    "ggml_backend_graph_compute": (ctypes.c_int, _pointer, _pointer),
    "ggml_backend_cpu_reg": (_pointer,),
    "ggml_backend_reg_dev_get": (_pointer, _pointer, _size),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, _pointer, _pointer),
    "ggml_backend_reg_get_proc_address": (_pointer, _pointer, ctypes.c_char_p),
}


def ggml_of(llama_cpp) -> ctypes.CDLL:
    """Load ggml and declare its functions. It uses AMX only if eqquant does.

    The parts of ggml are loaded first, because they need not be on the linker's path.
    """
    folder = pathlib.Path(llama_cpp.__file__).parent / "lib"
    *_, library = (
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml-cpu", "ggml")
    )
    for name, (result, *arguments) in _functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if _instruction_limit() != "amx":
        _disable_amx(library)
    return library


def _instruction_limit() -> str:
    """Return the best instruction set that `EQQUANT_CPU` permits."""
    return os.environ.get("EQQUANT_CPU", "amx")


def _buffer_types(ggml: ctypes.CDLL):
    """Return llama.cpp's null-terminated array of buffer types for this CPU.

    A buffer type repacks weights for certain instructions.
    """
    registry = ggml.ggml_backend_cpu_reg()
    get = ggml.ggml_backend_reg_get_proc_address
    address = get(registry, b"ggml_backend_dev_get_extra_bufts")
    prototype = ctypes.CFUNCTYPE(ctypes.POINTER(_pointer), _pointer)
    return prototype(address)(ggml.ggml_backend_reg_dev_get(registry, 0))


def _memories(ggml: ctypes.CDLL) -> dict[bytes, int]:
    """Map the names of buffer types to pointers, in llama.cpp's order of preference."""
    array = _buffer_types(ggml)
    buffer_types = itertools.takewhile(bool, (array[i] for i in itertools.count()))
    return {ggml.ggml_backend_buft_name(memory): memory for memory in buffer_types}


def _disable_amx(ggml: ctypes.CDLL) -> None:
    """Remove the AMX buffer type from the array that llama.cpp reads for each model."""
    array = _buffer_types(ggml)
    kept = [memory for name, memory in _memories(ggml).items() if name != b"AMX"]
    for i, memory in enumerate([*kept, None]):
        array[i] = memory


def about_amx(ggml: ctypes.CDLL) -> str:
    """Return whether ggml uses AMX, as words for a table."""
    if b"AMX" in _memories(ggml):
        return "with AMX"
    limit = _instruction_limit()
    limit = "" if limit == "amx" else f" (EQQUANT_CPU={limit})"
    return f"without AMX{limit}"


def row_bytes(ggml: ctypes.CDLL, kind: int, columns: int) -> int:
    return ggml.ggml_row_size(kind, columns)


def quantized(ggml: ctypes.CDLL, kind: int, w: np.ndarray) -> np.ndarray:
    """Quantize a float32 matrix to a type of ggml, and return its bytes."""
    rows, columns = w.shape
    data = np.empty((rows, row_bytes(ggml, kind, columns)), np.uint8)
    ggml.ggml_quantize_chunk(kind, _address(w), _address(data), 0, rows, columns, None)
    return data


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(_pointer)


class _CPU:
    def __init__(self, ggml: ctypes.CDLL):
        self.ggml = ggml
        self.backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self.backend, THREADS)
        self.device = ggml.ggml_backend_reg_dev_get(ggml.ggml_backend_cpu_reg(), 0)

    def context(self):
        return self.ggml.ggml_init(_InitParams(1 << 20, None, True))

    def weight(self, kind: int, rows: int, columns: int):
        """Return a tensor and its bytes, in the first buffer type that has a matmul."""
        ggml = self.ggml
        for memory in _memories(ggml).values():
            context = self.context()
            weight = ggml.ggml_new_tensor_2d(context, kind, columns, rows)
            buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, memory)
            trial = self.context()
            x = ggml.ggml_new_tensor_2d(trial, FLOAT32, columns, 1)
            product = ggml.ggml_mul_mat(trial, weight, x)
            fits = buffer and ggml.ggml_backend_dev_supports_op(self.device, product)
            ggml.ggml_free(trial)
            if fits:
                return weight, ggml.ggml_backend_buffer_get_alloc_size(buffer, weight)
            if buffer:
                ggml.ggml_backend_buffer_free(buffer)
            ggml.ggml_free(context)
        context = self.context()
        weight = ggml.ggml_new_tensor_2d(context, kind, columns, rows)
        ggml.ggml_backend_alloc_ctx_tensors(context, self.backend)
        return weight, ggml.ggml_nbytes(weight)

    def graph(self, weights: Sequence, m: int, columns: int):
        """Return the activation, the last result, and the graph that multiplies the
        activation with each weight."""
        ggml = self.ggml
        context = self.context()
        x = ggml.ggml_new_tensor_2d(context, FLOAT32, columns, m)
        graph = ggml.ggml_new_graph(context)
        for weight in weights:
            out = ggml.ggml_mul_mat(context, weight, x)
            ggml.ggml_build_forward_expand(graph, out)
        ggml.ggml_backend_alloc_ctx_tensors(context, self.backend)
        return x, out, graph

    def quantize(self, kind: int) -> Quantize:
        ggml = self.ggml

        def quantize_weight(w):
            rows, columns = w.shape
            w = np.ascontiguousarray(w)
            weight, stored = self.weight(kind, rows, columns)
            data = w if kind == FLOAT32 else quantized(ggml, kind, w)
            ggml.ggml_backend_tensor_set(weight, _address(data), 0, data.nbytes)
            return _Matmul(self, [weight], rows), stored

        return quantize_weight


class _Matmul:
    """A graph with the products of an activation and some weights."""

    def __init__(self, cpu: _CPU, weights: Sequence, rows: int):
        self.cpu, self.weights, self.rows = cpu, weights, rows
        self.graphs: dict[int, tuple] = {}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        ggml, (m, columns) = self.cpu.ggml, x.shape
        if m not in self.graphs:
            self.graphs[m] = self.cpu.graph(self.weights, m, columns)
        activation, out, graph = self.graphs[m]
        ggml.ggml_backend_tensor_set(activation, _address(x), 0, x.nbytes)
        assert ggml.ggml_backend_graph_compute(self.cpu.backend, graph) == 0
        y = np.empty((m, self.rows), np.float32)
        ggml.ggml_backend_tensor_get(out, _address(y), 0, y.nbytes)
        return y

    @staticmethod
    def join(matmuls: Sequence["_Matmul"]) -> "_Matmul":
        first = matmuls[0]
        return _Matmul(first.cpu, [w for m in matmuls for w in m.weights], first.rows)


def load() -> Products:
    import llama_cpp

    ggml = ggml_of(llama_cpp)
    cpu = _CPU(ggml)
    version = importlib.metadata.version("llama-cpp-python")
    return Products(
        f"llama-cpp-python {version}, {about_amx(ggml)}",
        cpu.quantize(FLOAT32),
        {name: cpu.quantize(kind) for name, kind in TYPES.items()},
        join=_Matmul.join,
    )


# pip compiles llama-cpp-python for this machine.
peer = Peer("llama.cpp", load, packages=("llama-cpp-python", "numpy"), header=HEADER)
