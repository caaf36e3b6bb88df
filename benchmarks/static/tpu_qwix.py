"""Compare the TPU kernels with qwix, using the schedules that libtpu compiles.

    python benchmarks/static/tpu_qwix.py
    python benchmarks/static/tpu_qwix.py --chips v6e --m 256 2048 --sizes 4096x4096

The script installs qwix into a separate environment (see `peers.py`) with the same
versions of JAX and libtpu, and computes all rows there. `tpu_roofline.py` describes the
columns and has the same options. The variants of qwix:

- "W8A8": `qwix.contrib.kernels.quantized_matmul` with its default block sizes. Both
  operands are int8, with one scale per tile of 128 x 128, the smallest tile that it
  supports. The time includes `qwix.quantize` of the activation.
- "W8A8 fused": `qwix.contrib.kernels.lhs_fused_quantized_matmul`, which quantizes the
  activation itself, from float32. It has no default block sizes and uses the same sizes
  as "W8A8".
- "pallas": a kernel written for this comparison after an example in qwix's tests. It
  uses `qwix.pallas.pallas_call` and `qwix.pallas.dot_general`. That function does not
  support NF4, so NF4 uses `qwix.pallas.dequantize` and a matmul. Block sizes equal the
  block sizes of "dense". Weights have one scale per column ("int8"), per 128 rows
  ("int4") or per 64 rows ("nf4") of a column. Activations stay in bfloat16.
- "XLA": `qwix.dot_general` as XLA compiles it, with one scale per column for 8 bits and
  per 64 rows for 4 bits. NF4 takes minutes to compile.

Weights are (K, N). Rows that fail to compile show the error. qwix's `can_use_qmm`
requires 128 rows; with fewer rows, its kernels get smaller blocks here.
"""

import argparse
import importlib.metadata
import importlib.util
import pathlib
import sys

import _paths  # noqa: F401
import jax
import jax.numpy as jnp
from _environments import CACHE, install, run
from jax import lax


CONTRACT = (((1,), (0,)), ((), ()))


def weight(k: int, n: int, qtype, **kwargs):
    """Return an abstract weight quantized by qwix, and its packed size in bytes."""
    import qwix

    q = jax.eval_shape(
        lambda: qwix.quantize(jnp.zeros((k, n), jnp.bfloat16), qtype, **kwargs)
    )
    bits = 8 if q.qvalue.dtype == jnp.int8 else 4
    return q, k * n * bits // 8 + q.scale.size * q.scale.dtype.itemsize


def w8a8(x, q):
    import qwix
    from qwix.contrib.kernels import quantized_matmul as kernel

    m, n = x.shape[0], q.qvalue.shape[1]
    sizes = kernel.QuantizedMatmulConfig()
    x = qwix.quantize(x, jnp.int8, tiled_axes={0: min(m, 128), 1: 128})
    return kernel.quantized_matmul(
        x.qvalue,
        x.scale.astype(jnp.float32),
        q.qvalue,
        q.scale.astype(jnp.float32),
        bm=min(m, sizes.bm),
        bk=sizes.bk,
        bn=min(n, sizes.bn),
        dtype=jnp.bfloat16,
    )


def w8a8_fused(x, q):
    from qwix.contrib.kernels.lhs_fused_quantized_matmul import (
        lhs_fused_quantized_matmul,
    )
    from qwix.contrib.kernels.quantized_matmul import QuantizedMatmulConfig

    m = x.shape[0]
    sizes = QuantizedMatmulConfig()
    out = lhs_fused_quantized_matmul(
        x.astype(jnp.float32),  # Tracing fails with bfloat16.
        q.qvalue,
        q.scale.astype(jnp.float32),
        bm=min(m, sizes.bm),
        bk=sizes.bk,
        bn=sizes.bn,
        sm=max(m // 128, 1),
    )
    return out.astype(x.dtype)


def pallas(x, q):
    import qwix.pallas as qpl
    from tpu_roofline import tiled

    def product(x, q):
        if q.qtype == "nf4":
            return lax.dot(x, qpl.dequantize(q), preferred_element_type=jnp.float32)
        out = qpl.dot_general(x, q, CONTRACT, preferred_element_type=jnp.float32)
        return out.astype(jnp.float32)

    n = q.qvalue.shape[1]
    return tiled(x, q, n, product, "qwix_pallas", qpl.pallas_call)


def dot_general(x, q):
    import qwix

    return qwix.dot_general(x, q, CONTRACT)


def dot_general_w8a8(x, q):
    import qwix

    return dot_general(qwix.quantize(x, jnp.int8, channelwise_axes=(0,)), q)


def qwix_cases(m: int, k: int, n: int, xla: bool):
    from tpu_roofline import Case

    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)

    def case(name, variant, product, qtype, **kwargs):
        q, size = weight(k, n, qtype, **kwargs)
        return Case(f"qwix {name}", variant, size, product, (x, q))

    tiles = dict(tiled_axes={0: 128, 1: 128})
    rows = dict(channelwise_axes=(1,))
    yield case("int8", "W8A8", w8a8, jnp.int8, **tiles)
    yield case("int8", "W8A8 fused", w8a8_fused, jnp.int8, **tiles)
    yield case("int8", "pallas", pallas, jnp.int8, **rows)
    yield case("int4", "pallas", pallas, jnp.int4, **rows, tiled_axes={0: 128})
    yield case("nf4", "pallas", pallas, "nf4", **rows, tiled_axes={0: 64})
    if xla:
        yield case("int8", "XLA", dot_general, jnp.int8, **rows)
        yield case("int8", "XLA W8A8", dot_general_w8a8, jnp.int8, **rows)
        yield case("int4", "XLA", dot_general, jnp.int4, **rows, tiled_axes={0: 64})
        yield case("nf4", "XLA", dot_general, "nf4", **rows, tiled_axes={0: 64})


def python_with_qwix(cache: pathlib.Path) -> str:
    """Return a Python with qwix and the same JAX and libtpu as this one."""
    pinned = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in ("jax", "jaxlib", "libtpu")
    ]
    required = importlib.metadata.requires("eqquant") or []
    ours = [name for name in required if "extra" not in name and "jax>=" not in name]
    return install("qwix-tpu", ["qwix", *pinned, *ours], cache)


def main() -> None:
    cache_parser = argparse.ArgumentParser(add_help=False)
    cache_parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    cache_options, rest = cache_parser.parse_known_args()
    if importlib.util.find_spec("qwix") is None:
        eqquant = str(pathlib.Path(__file__).resolve().parents[2])
        python = python_with_qwix(cache_options.cache)
        ran = run(python, __file__, *rest, environment={"PYTHONPATH": eqquant})
        sys.exit(ran.returncode)

    import tpu_roofline

    parser = tpu_roofline.parser(__doc__.splitlines()[0])
    parser.set_defaults(formats=["int8", "w8a8", "nf4"])
    options = parser.parse_args(rest)
    tpu_roofline.PACKAGES.append("qwix")
    xla = not options.no_xla

    def cases(m, k, n):
        yield from tpu_roofline.cases(m, k, n, options.formats, xla=False)
        yield from qwix_cases(m, k, n, xla)

    tpu_roofline.run(options, cases)


if __name__ == "__main__":
    main()
