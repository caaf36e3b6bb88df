"""onnxruntime, with models that consist of one matmul."""

import numpy as np

from . import Peer, Products, THREADS


def load() -> Products:
    import onnx
    import onnxruntime as ort
    from onnx import helper
    from onnxruntime.capi import _pybind_state

    # Sessions share one pool: the threads of an idle session would spin on a core.
    ort.set_global_thread_pool_sizes(THREADS, 1)

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
        options.use_per_session_threads = False
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
        def quantize(w):
            rows, columns = w.shape
            blocks = columns // block
            codes = np.zeros((rows, blocks, block * bits // 8), np.uint8)
            scales = np.zeros(rows * blocks, np.float32)
            zeros = np.zeros((rows, (blocks * bits + 7) // 8), np.uint8)
            encode = getattr(_pybind_state, f"quantize_matmul_{bits}bits")
            encode(codes, w.T.copy(), scales, zeros, block, rows, columns, True)
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

        return quantize

    return Products(
        ort.__version__,
        dense,
        {
            "int4, float32": make(4, 64, 1),
            "int4, int8 activations": make(4, 64, 4),
            "int8, int8 activations": make(8, 64, 4),
        },
    )


peer = Peer("onnxruntime", load, packages=("onnxruntime", "onnx", "numpy"))
