"""examples/llama: right, with any of its weights and its cache quantized."""

import json
import pathlib
import shutil
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, relative, strict
from safetensors.numpy import load_file


HERE = pathlib.Path(__file__).parent
DATA = HERE / "data" / "llama"
EXAMPLE = HERE.parents[1] / "examples" / "llama"
NAMES = sorted(path.name for path in DATA.iterdir())


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


def reference(name):
    values = load_file(DATA / name / "reference.safetensors")
    return jnp.asarray(values["tokens"]), values["logits"]


forward = eqx.filter_jit(strict(lambda model, tokens: model(tokens)))
extend = eqx.filter_jit(
    strict(lambda model, *rest: model.extend(*rest)), donate="none"
)
logits_of = eqx.filter_jit(strict(lambda model, hidden: model.logits(hidden)))


def in_pieces(model, tokens, cache, sizes):
    """Logits, computed piece by piece."""
    start, out = 0, []
    for size in sizes:
        piece = tokens[:, start : start + size]
        hidden, cache = extend(model, piece, cache, jnp.asarray(start))
        out.append(logits_of(model, hidden))
        start += size
    return jnp.concatenate(out, 1), cache


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    from load import load_model

    tokens, expected = reference(name)
    model = load_model(DATA / name, stacked=True, progress=False)
    # Both in float32, which rounds to 6e-8: a few hundred roundings, one after another.
    np.testing.assert_allclose(forward(model, tokens), expected, atol=1e-4, rtol=0)
    # A cache is the same, where layers are apart and where they are stacked.
