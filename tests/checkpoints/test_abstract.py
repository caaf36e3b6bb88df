"""`load_quantized(abstract=True)` describes what it loads."""

import functools as ft
import pathlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant.checkpoints.foreign import TYPES


DATA = pathlib.Path(__file__).parent / "foreign" / "data"
GGUF = DATA / "gguf.gguf"
EXACT = [kind.name for kind in TYPES.values() if kind.format is not None]
load = ft.partial(eqquant.load_quantized, progress=False)


def described(tree):
    """Return the structure, the shapes and the dtypes of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves]


def check(*args, **options):
    loaded, abstract = load(*args, **options), load(*args, abstract=True, **options)
    assert described(abstract) == described(loaded)
    arrays = [x for x in jax.tree.leaves(abstract) if hasattr(x, "shape")]
    assert arrays
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in arrays)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("names", ["one", "stack", "rows"])
def test_types_of_gguf(name, names):
    value = eqquant.checkpoints.read_checkpoint(GGUF, decode=True)[name]
    rows, *rest = value.shape
    twice = eqquant.checkpoints.Concatenated(name, name)
    names, lead = {
        "one": (name, (rows,)),
        "stack": ([[name] * 3] * 2, (2, 3, rows)),
        "rows": ([twice] * 3, (3, 2 * rows)),
    }[names]
    for dtype in ("float32", "bfloat16"):
        like = [jax.ShapeDtypeStruct((*lead, *rest), dtype)]
        options = {"names": lambda path: names, "ignore": "*"}
        check(GGUF, like, **options)
        check(GGUF, like, "nf4", rules={"*": "nf4"}, decode="all", **options)


@pytest.mark.slow
def test_floats_and_files_of_eqquant(tmp_path):
    model = eqx.nn.MLP(64, 10, 128, 2, key=jax.random.key(0))
    eqquant.save(tmp_path / "float.safetensors", model)
    check(tmp_path / "float.safetensors", model, "nf4", activations="int8")
    rules = {"layers.1.*": eqquant.NF4(double_quantization=True)}
    check(tmp_path / "float.safetensors", model, "int8", rules=rules)
    quantized = eqquant.quantize_tree(model, "nf4", rules=rules, progress=False)
    eqquant.save(tmp_path / "quantized.safetensors", quantized)
    check(tmp_path / "quantized.safetensors", model, None, precision="default")


def test_formats_that_need_the_tensors():
    found = eqquant.checkpoints.describe_checkpoint(DATA / "gptq_zeros").tensors
    name, tensor = next((n, t) for n, t in found.items() if t.is_quantized)
    like = {"weight": jax.ShapeDtypeStruct(tensor.shape, jnp.float32)}
    with pytest.raises(ValueError, match=r"only known after reading.*abstract=True"):
        load(
            DATA / "gptq_zeros",
            like,
            names=lambda path: name,
            ignore="*",
            abstract=True,
        )
