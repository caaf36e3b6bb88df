"""Test the loops over the codes of a row in the TPU kernels."""

import functools as ft

import eqquant
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from eqquant import Binary, Int3, Int8, NF4, Ternary
from eqquant.kernels import Matmul, tpu
from eqquant.kernels.tpu import _chips, _loop
from helpers import multiply_by, pairs, relative, slow


def product(x, q, **options):
    interpret = options.pop("interpret", False)
    args, matmul = (x, q.codes, q.scales), Matmul(q.format, **options)
    return multiply_by(tpu.KERNELS, matmul, *args, interpret=interpret)


@pairs(
    "kind, format, m, contract_rows",
    ["TPU v5e", "TPU v6e"],
    [NF4(), Int3(), Binary(), slow(Int8(block_size=64)), slow(Ternary(block_size=128))],
    [8, 40],
    [False, True],
)
def test_loops_that_are_not_unrolled(
    kind, format, m, contract_rows, monkeypatch, normal
):
    monkeypatch.setattr(_chips, "device_kind", lambda: kind)
    monkeypatch.setattr(_loop, "_bundles", 1)
    # The last chunks of a row are a partial iteration.
    rows, columns = 130, 5 * 1024
    q = eqquant.quantize(normal(rows, columns), format)
    x = normal(m, rows if contract_rows else columns)
    out = product(x, q, contract_rows=contract_rows, interpret=True)
    w = np.asarray(q.dequantize(), np.float64)
    expected = np.asarray(x, np.float64) @ (w if contract_rows else w.T)
    assert relative(out, expected) < 1e-4


def operations(jaxpr) -> int:
    is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    params = jax.tree.leaves([eqn.params for eqn in jaxpr.eqns], is_leaf=is_jaxpr)
    inner = [getattr(x, "jaxpr", x) for x in params if is_jaxpr(x)]
    return len(jaxpr.eqns) + sum(map(operations, inner))


@pairs("format, m", [NF4(), Int8(), Int3(), Binary()], [8, 512])
def test_the_size_of_a_program_does_not_grow_with_rows(format, m):
    def traced(columns: int) -> int:
        q = jax.eval_shape(
            ft.partial(eqquant.quantize, format=format, check_finite=False),
            jax.ShapeDtypeStruct((512, columns), jnp.float32),
        )
        x = jax.ShapeDtypeStruct((m, columns), jnp.float32)
        fn = ft.partial(product, contract_rows=False)
        return operations(jax.make_jaxpr(fn)(x, q).jaxpr)

    assert traced(2**15) <= 1.2 * traced(2**13)
