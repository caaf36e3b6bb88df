"""Tests of `compile_for_gpu`. Some need NVIDIA's compiler."""

import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant.debug import _compile, compile_for_gpu
from helpers import load_benchmark, needs_gpu_compiler


def test_unknown_chips_are_rejected():
    with pytest.raises(ValueError, match="chip.*'h100'.*'v100'"):
        compile_for_gpu(lambda x: x, jnp.ones(3), chip="v100")


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(_compile, "has_gpu_compiler", lambda: False)
    with pytest.raises(RuntimeError, match="eqquant\\[gpu-compiler\\]"):
        compile_for_gpu(lambda x: x, jnp.ones(3))


def test_kernels_that_mosaic_compiled_before_are_found(monkeypatch):
    """The hash of a kernel may contain quotes."""
    monkeypatch.setattr(_compile, "_ptx_of_mosaic_kernel", {})
    program = 'kernel_hash = "a\\"b\\\\", module = "x", kernel_hash = "c", '

    def find(text, *new):
        return _compile._mosaic_kernels_in(text, list(new))

    assert find(program, "first", "second") == ["first", "second"]
    assert find(program) == ["first", "second"]
    assert find('kernel_hash = "c" kernel_hash = "d"', "third") == ["second", "third"]
    assert find("") == []
    # If a kernel cannot be found, the function raises.
    for new in [(), ("fourth", "fifth")]:
        with pytest.raises(RuntimeError, match=f"1 .*Mosaic.* {len(new)}"):
            find('kernel_hash = "c" kernel_hash = "e"', *new)
    assert find('kernel_hash = "c"') == ["second"]


@needs_gpu_compiler
@pytest.mark.parametrize("chip", ["a100", "h100"])
def test_a_product_is_compiled(chip):
    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 512), (512, 256)))
    program = compile_for_gpu(lambda x, w: x @ w, *shapes, chip=chip)
    assert "dot" in program.as_text() and "gemm" in program.launches
    architecture = {"a100": "sm_80", "h100": "sm_90a"}[chip]
    for kernel in program.kernels:
        assert f".target {architecture}" in kernel.ptx
        assert kernel.registers > 0 and kernel.spilled == 0
    names_in = load_benchmark("_gpu_sass").names_in
    assert any("MMA" in name for k in program.kernels for name in names_in(k))


@needs_gpu_compiler
def test_the_products_of_a_training_step_in_fp8_are_compiled_to_cublas():
    """XLA rewrites all three products to cuBLASLt, with 8-bit floats as operands."""
    layer = eqx.nn.Linear(512, 1024, use_bias=False, key=jax.random.key(0))
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)

    def gradients(w, x):
        model = eqx.tree_at(lambda m: m.weight, layer, w)
        model = eqquant.training.low_precision(model, "fp8")
        value = lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2).astype(jnp.float32)
        return jax.grad(value, (0, 1))(model, x)

    options = {"xla_gpu_enable_triton_gemm": False}
    text = compile_for_gpu(gradients, w, x, chip="h100", options=options).as_text()
    assert text is not None
    called = re.findall(r'custom_call_target="(__cublas[^"]*)"', text)
    assert called == ["__cublas$lt$matmul$f8"] * 3
    assert " dot(" not in text
