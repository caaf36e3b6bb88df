"""The kernels for TPUs beside those of qwix, by the compiler's own schedule.

    python benchmarks/tpu_qwix.py
    python benchmarks/tpu_qwix.py --chips v6e --m 256 2048 --sizes 4096x4096

qwix is installed into an environment of its own (see `peers.py`), with the compiler of
this one. There all rows are computed, by `tpu_roofline.py`, which has the options and
says what the columns mean. qwix has

- "W8A8": `qwix.contrib.kernels.quantized_matmul`, its kernel, in the blocks that are
  its default. Both operands are int8, with one scale for each tile of 128 x 128, the
  finest that it takes. `qwix.quantize` rounds the activation, which counts.
- "W8A8 fused": `qwix.contrib.kernels.lhs_fused_quantized_matmul`, which rounds the
  activation itself, from float32. In the same blocks, as it has no default.
- "pallas": not a kernel of qwix's, but the one that its tests show, with what it has
  to write kernels: `qwix.pallas.pallas_call`, and in it `qwix.pallas.dot_general`; for
  NF4, which that cannot multiply, `qwix.pallas.dequantize` and a product. In the blocks
  of "dense". Weights have a scale for each column ("int8"), and for each 128 ("int4")
  or 64 ("nf4") in it; activations stay in bfloat16.
- "XLA": what the compiler makes of `qwix.dot_general`, by columns, and in blocks of 64
  for 4 bits. That of NF4 takes minutes to compile.

Weights are (K, N). What cannot be compiled says why. `can_use_qmm`, which qwix asks
first, wants 128 rows; for fewer its kernels are given smaller blocks here.
"""

import argparse
import importlib.metadata
import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
from _environments import CACHE, install, run
from jax import lax


CONTRACT = (((1,), (0,)), ((), ()))


def weight(k: int, n: int, qtype, **how):
    """The shapes of one that qwix has quantized, and its bytes if 4 bits take half."""
    import qwix

    q = jax.eval_shape(
        lambda: qwix.quantize(jnp.zeros((k, n), jnp.bfloat16), qtype, **how)
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
        x.astype(jnp.float32),  # With bfloat16 it cannot be traced.
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

    def case(name, variant, product, *how, **options):
        q, size = weight(k, n, *how, **options)
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
    """A Python that has qwix, and the versions that this one has."""
    same = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in ("jax", "jaxlib", "libtpu")
    ]
    needed = importlib.metadata.requires("eqquant") or []
    ours = [need for need in needed if "extra" not in need and "jax>=" not in need]
    return install("qwix-tpu", ["qwix", *same, *ours], cache)


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--cache", type=pathlib.Path, default=CACHE)
    where, rest = first.parse_known_args()
    if importlib.util.find_spec("qwix") is None:
        eqquant = str(pathlib.Path(__file__).resolve().parent.parent)
        python = python_with_qwix(where.cache)
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
