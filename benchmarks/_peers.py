"""One peer, measured in its own environment, where eqquant need not be installed.

    python benchmarks/_peers.py NAME OPTIONS_AS_JSON

Prints JSON lines. Only NumPy and the peer itself are imported.
"""

import ctypes
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class Peer(NamedTuple):
    version: str
    # `dense(w)`, and each of `quantized`, make of a float32 weight of (rows, columns)
    # what is called with an activation of (m, columns), and its size in bytes.
    dense: Callable
    quantized: dict[str, Callable]
    # NumPy to the peer's arrays; and to NumPy, when all is done.
    put: Callable = lambda x: x
    get: Callable = np.asarray


#
# The peers
#


def _jax_dense(w):
    import jax
    from jax import lax

    # The weight on the left: XLA:CPU is slow at `x @ w.T` with one row.
    product = jax.jit(lambda x, w: lax.dot_general(w, x, (((1,), (1,)), ((), ()))).T)
    return lambda x: product(x, w), w.nbytes


def _jax_peer(package: str, quantized: dict[str, Callable]) -> Peer:
    import importlib.metadata

    import jax
    import jax.numpy as jnp

    version = f"{importlib.metadata.version(package)}, jax {jax.__version__}"
    return Peer(version, _jax_dense, quantized, put=jnp.asarray)


def _bytes_of(tree) -> int:
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def eqquant() -> Peer:
    import eqquant
    import jax

    product = jax.jit(lambda x, q: x @ q.T)

    def make(format):
        def quantize(w):
            q = jax.block_until_ready(eqquant.quantize(w, format))
            return lambda x: product(x, q), q.nbytes

        return quantize

    formats = {
        "nf4": "nf4",
        "nf4, default precision": eqquant.NF4(precision="default"),
        "int8": "int8",
        "int8, default precision": eqquant.Int8(precision="default"),
        "ternary": "ternary",
        "binary": "binary",
    }
    return _jax_peer("eqquant", {name: make(f) for name, f in formats.items()})


def eformer() -> Peer:
    import jax
    from eformer.jaximus import implicit
    from eformer.ops.quantization import Array8B, ArrayNF4

    product = jax.jit(implicit(lambda x, q: x @ q))

    # Its weights are (columns, rows), so that they are multiplied without a transpose.
    def nf4(w):
        q = jax.block_until_ready(ArrayNF4.quantize(w.T, block_size=64))
        return lambda x: product(x, q), _bytes_of(q)

    def int8(w):
        q = jax.block_until_ready(Array8B.quantize(w.T, axis=0))
        return lambda x: product(x, q), _bytes_of(q)

    return _jax_peer("eformer", {"nf4": nf4, "int8": int8})


def qwix() -> Peer:
    import jax
    import jax.numpy as jnp
    import qwix

    contract = (((1,), (1,)), ((), ()))

    @jax.jit
    def weight_only(x, q):
        return qwix.dot_general(x, q, contract)

    @jax.jit
    def both(x, q):
        return qwix.dot_general(
            qwix.quantize(x, jnp.int8, channelwise_axes=(0,)), q, contract
        )

    def make(product, qtype, **how):
        quantize = jax.jit(lambda w: qwix.quantize(w, qtype, **how))

        def of(w):
            q = jax.block_until_ready(quantize(w))
            size = q.qvalue.nbytes + q.scale.nbytes
            return lambda x: product(x, q), size

        return of

    blocks = dict(channelwise_axes=(0,), tiled_axes={1: 64})
    return _jax_peer(
        "qwix",
        {
            "nf4": make(weight_only, "nf4", **blocks),
            "int8": make(weight_only, jnp.int8, channelwise_axes=(0,)),
            "int8, activations too": make(both, jnp.int8, channelwise_axes=(0,)),
        },
    )


def _torch_peer(package: str, quantized: dict[str, Callable]) -> Peer:
    import importlib.metadata

    import torch

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)

    def dense(w):
        return lambda x: torch.nn.functional.linear(x, w), w.nbytes

    version = f"{importlib.metadata.version(package)}, torch {torch.__version__}"
    return Peer(
        version, dense, quantized, torch.from_numpy, lambda y: y.float().numpy()
    )


def bitsandbytes() -> Peer:
    import bitsandbytes as bnb
    import torch

    def make(compute):
        def nf4(w):
            rows, columns = w.shape
            layer = bnb.nn.Linear4bit(
                columns, rows, bias=False, compute_dtype=compute, quant_type="nf4"
            )
            layer.weight = bnb.nn.Params4bit(
                w,
                requires_grad=False,
                quant_type="nf4",
                blocksize=64,
                compress_statistics=False,
            )
            layer = layer.to("cpu").eval()
            state = layer.weight.quant_state
            return layer, layer.weight.nbytes + state.absmax.nbytes

        return nf4

    return _torch_peer(
        "bitsandbytes",
        {"nf4, float32": make(torch.float32), "nf4, bfloat16": make(torch.bfloat16)},
    )


def torchao() -> Peer:
    import torch
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    def make(config):
        def of(w):
            rows, columns = w.shape
            layer = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False))
            layer[0].weight = torch.nn.Parameter(w, requires_grad=False)
            quantize_(layer, config())
            weight = layer[0].weight
            parts = (getattr(weight, name) for name in ("qdata", "scale"))
            return torch.compile(layer), sum(part.nbytes for part in parts)

        return of

    def int4(w):
        # PyTorch's own kernel, which torchao's int4 weights use on CPUs: bfloat16
        # activations, one scale and one zero for each 64 weights.
        rows, columns = w.shape
        blocks = w.reshape(rows, -1, 64)
        low, high = blocks.amin(-1), blocks.amax(-1)
        scale = ((high - low) / 15).clamp(min=1e-9)
        codes = ((blocks - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            codes.reshape(rows, columns).int(), 1
        )
        # A code of 8 stands for the second number.
        pair = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1)
        pair = pair.contiguous().bfloat16()

        def product(x):
            return torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.bfloat16(), packed, 64, pair
            )

        return product, packed.nbytes + pair.nbytes

    return _torch_peer(
        "torchao",
        {
            "int8": make(Int8WeightOnlyConfig),
            "int8, activations too": make(Int8DynamicActivationInt8WeightConfig),
            "int4 (torch), bfloat16": int4,
        },
    )


def onnxruntime() -> Peer:
    import onnx
    import onnxruntime as ort
    from onnx import helper
    from onnxruntime.capi import _pybind_state

    def session(node, weights: dict[str, np.ndarray], rows, columns):
        graph = helper.make_graph(
            [node],
            "product",
            [helper.make_tensor_value_info("x", 1, ["m", columns])],
            [helper.make_tensor_value_info("y", 1, ["m", rows])],
            [onnx.numpy_helper.from_array(v, k) for k, v in weights.items()],
        )
        opsets = [
            helper.make_opsetid("", 21),
            helper.make_opsetid("com.microsoft", 1),
        ]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        run = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        ).run
        size = sum(v.nbytes for v in weights.values())
        return lambda x: run(None, {"x": x})[0], size

    def dense(w):
        rows, columns = w.shape
        node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
        return session(node, {"w": w}, rows, columns)

    def make(bits, block, level):
        def of(w):
            rows, columns = w.shape
            blocks = columns // block
            codes = np.zeros((rows, blocks, block * bits // 8), np.uint8)
            scales = np.zeros(rows * blocks, np.float32)
            zeros = np.zeros((rows, (blocks * bits + 7) // 8), np.uint8)
            quantize = getattr(_pybind_state, f"quantize_matmul_{bits}bits")
            quantize(codes, w.T.copy(), scales, zeros, block, rows, columns, True)
            node = helper.make_node(
                "MatMulNBits",
                ["x", "codes", "scales"],
                ["y"],
                domain="com.microsoft",
                K=columns,
                N=rows,
                bits=bits,
                block_size=block,
                accuracy_level=level,
            )
            return session(node, {"codes": codes, "scales": scales}, rows, columns)

        return of

    return Peer(
        ort.__version__,
        dense,
        {
            "int4, float32": make(4, 64, 1),
            "int4, int8 activations": make(4, 64, 4),
            "int8, int8 activations": make(8, 64, 4),
        },
    )


def llama_cpp() -> Peer:
    import importlib.metadata
    import pathlib

    import llama_cpp

    folder = pathlib.Path(llama_cpp.__file__).parent / "lib"
    base, cpu, _ = (
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml-cpu", "ggml")
    )
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64

    def declare(library, name, result, *arguments):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        return function

    class InitParams(ctypes.Structure):
        _fields_ = [("size", size), ("buffer", pointer), ("no_alloc", ctypes.c_bool)]

    init = declare(base, "ggml_init", pointer, InitParams)
    free = declare(base, "ggml_free", None, pointer)
    tensor = declare(
        base, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, number, number
    )
    mul_mat = declare(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
    new_graph = declare(base, "ggml_new_graph", pointer, pointer)
    expand = declare(base, "ggml_build_forward_expand", None, pointer, pointer)
    nbytes = declare(base, "ggml_nbytes", size, pointer)
    chunk = declare(
        base,
        "ggml_quantize_chunk",
        size,
        ctypes.c_int,
        pointer,
        pointer,
        number,
        number,
        number,
        pointer,
    )
    allocate = declare(
        base, "ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer
    )
    allocate_in = declare(
        base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer
    )
    free_buffer = declare(base, "ggml_backend_buffer_free", None, pointer)
    write = declare(base, "ggml_backend_tensor_set", None, pointer, pointer, size, size)
    read = declare(base, "ggml_backend_tensor_get", None, pointer, pointer, size, size)
    compute = declare(
        base, "ggml_backend_graph_compute", ctypes.c_int, pointer, pointer
    )
    device_of = declare(base, "ggml_backend_get_device", pointer, pointer)
    registry_of = declare(base, "ggml_backend_dev_backend_reg", pointer, pointer)
    procedure = declare(
        base, "ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p
    )
    supports = declare(
        base, "ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer
    )
    backend = declare(cpu, "ggml_backend_cpu_init", pointer)()
    declare(cpu, "ggml_backend_cpu_set_n_threads", None, pointer, ctypes.c_int)(
        backend, THREADS
    )
    device = device_of(backend)
    # Kinds of memory in which weights are laid out anew for this CPU, which llama.cpp
    # tries one after the other, too. That for AMX is left out: in this release its
    # kernel stops with an illegal instruction (tiles that were not configured).
    name_of = declare(base, "ggml_backend_buft_name", ctypes.c_char_p, pointer)
    listed = procedure(registry_of(device), b"ggml_backend_dev_get_extra_bufts")
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(listed)(device)

    def kinds():
        i = 0
        while extra and extra[i]:
            if name_of(extra[i]) != b"AMX":
                yield extra[i]
            i += 1

    def context():
        return init(InitParams(1 << 20, None, True))

    def address(array):
        return array.ctypes.data_as(pointer)

    def make(kind):
        def of(w):
            rows, columns = w.shape
            w = np.ascontiguousarray(w)
            for memory in [*kinds(), None]:
                of_weight = context()
                weight = tensor(of_weight, kind, columns, rows)
                if memory is None:
                    allocate(of_weight, backend)
                    break
                buffer = allocate_in(of_weight, memory)
                trial = context()
                op = mul_mat(trial, weight, tensor(trial, 0, columns, 1))
                fits = buffer and supports(device, op)
                free(trial)
                if fits:
                    break
                if buffer:
                    free_buffer(buffer)
                free(of_weight)
            stored = nbytes(weight)
            data = np.empty(stored, np.uint8)
            if kind == 0:
                data = w
            else:
                chunk(kind, address(w), address(data), 0, rows, columns, None)
            write(weight, address(data), 0, stored)
            graphs = {}

            def product(x):
                m = len(x)
                if m not in graphs:
                    held = context()
                    activation = tensor(held, 0, columns, m)
                    out = mul_mat(held, weight, activation)
                    graph = new_graph(held)
                    expand(graph, out)
                    allocate(held, backend)
                    graphs[m] = activation, out, graph
                activation, out, graph = graphs[m]
                write(activation, address(x), 0, x.nbytes)
                assert compute(backend, graph) == 0
                y = np.empty((m, rows), np.float32)
                read(out, address(y), 0, y.nbytes)
                return y

            return product, stored

        return of

    types = {"q4_0": 2, "q8_0": 8, "tq2_0": 35}
    version = importlib.metadata.version("llama-cpp-python")
    quantized = {name: make(kind) for name, kind in types.items()}
    return Peer(f"llama-cpp-python {version}, without AMX", make(0), quantized)


PEERS: dict[str, Callable[[], Peer]] = {
    "eqquant": eqquant,
    "eqquant, XLA": eqquant,
    "eformer": eformer,
    "qwix": qwix,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "onnxruntime": onnxruntime,
    "llama.cpp": llama_cpp,
}


#
# Measuring
#


def interleaved(calls: dict[str, Callable[[], Any]], seconds: float, at_least: int):
    """Seconds of each run of each, in turn, in an order that changes."""
    for call in calls.values():
        call(), call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    stop = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < stop or len(next(iter(times.values()))) < at_least:
        for name, call in order.sample(list(calls.items()), len(calls)):
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def peak_of(call: Callable[[], Any]) -> tuple[float | None, Any]:
    """By how much a call raises the memory of this process above what it was, in MB;
    Linux only. What freed memory the allocators keep makes it a lower bound."""

    def status(name):
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[name].split()[0]) / 1e3

    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Forget the peak.
        before = status("VmRSS")
    except OSError:
        return None, call()
    out = call()
    return status("VmHWM") - before, out


def measure(name: str, options: dict) -> None:
    peer = PEERS[name]()
    for rows, columns in options["shapes"]:
        rng = np.random.default_rng(0)
        w = rng.standard_normal((rows, columns), dtype=np.float32)
        xs = {
            m: rng.standard_normal((m, columns), dtype=np.float32) for m in options["m"]
        }
        weight = peer.put(w)
        calls = {"dense": peer.dense(weight)[0]}
        results: dict[str, dict] = {}
        for variant, quantize in peer.quantized.items():
            try:
                quantize(weight)  # Compiles.
                start = time.perf_counter()
                product, size = quantize(weight)
                taken = time.perf_counter() - start
                x = xs[min(xs, key=lambda m: abs(m - 64))]
                put = peer.put(x)
                product(put)
                memory, y = peak_of(lambda p=product, x=put: peer.get(p(x)))
            except Exception as error:
                short = f"{type(error).__name__}: {error}".splitlines()[0]
                report = {"variant": variant, "shape": [rows, columns], "failed": short}
                print(json.dumps(report), flush=True)
                continue
            exact = x.astype(np.float64) @ w.T.astype(np.float64)
            error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
            calls[variant] = product
            results[variant] = {
                "bytes_per_weight": size / w.size,
                "sqnr": -20 * float(np.log10(error)),
                "quantized_gb_per_s": w.nbytes / taken / 1e9,
                "peak_mb": memory,
            }
        ratios: dict[str, dict] = {variant: {} for variant in results}
        for m, x in xs.items():
            put = peer.put(x)
            times = interleaved(
                {k: lambda f=f, x=put: peer.get(f(x)) for k, f in calls.items()},
                options["seconds"],
                options["at_least"],
            )
            dense = statistics.median(times["dense"])
            for variant in results:
                of = times[variant]
                ratios[variant][m] = [
                    dense / t for t in (statistics.median(of), max(of), min(of))
                ]
        for variant, result in results.items():
            report = {"variant": variant, "shape": [rows, columns], **result}
            report |= {"version": peer.version, "ratios": ratios[variant]}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    measure(sys.argv[1], json.loads(sys.argv[2]))
