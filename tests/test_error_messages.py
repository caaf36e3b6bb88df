"""The error messages in the documentation are the messages that code raises.

Readers search docs/when-it-does-not-run.md and docs/when-training-fails.md for their
error.
"""

import pathlib
import re
import warnings
from collections.abc import Callable

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax


DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = ("when-it-does-not-run.md", "when-training-fails.md")
TEXT = "\n".join((DOCS / page).read_text() for page in PAGES)
# A message starts at a line that starts with the name of an exception.
STARTS = re.compile(r"^(?=(?:\w+[.])*\w+(?:Error|Warning): )", re.MULTILINE)


def shown() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    messages = [m.strip() for block in blocks for m in STARTS.split(block)]
    return [m for m in messages if STARTS.match(m)]


def q():
    return eqquant.quantize(jnp.ones((64, 64)), "nf4")


def kernel():
    return eqquant.quantize(jnp.ones((16, 16, 3)), "int8", axis=(1, 2))


def model():
    mlp = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    return eqquant.quantize_tree(mlp, "nf4")


def parted():
    quantized = model()
    return eqx.partition(quantized, eqquant.trainable_mask(quantized))


def gradient_of_all():
    jax.grad(lambda model, x: jnp.sum(model(x)))(model(), jnp.ones(64))


def update_of_all():
    """Pass gradients of the trainable part to a state for the whole model."""
    quantized, (trainable, _) = model(), parted()
    arrays = eqx.filter(quantized, eqx.is_array)
    optimiser = optax.adamw(1e-3)
    optimiser.update(trainable, optimiser.init(arrays), arrays)


def codes_of_an_optimiser():
    broken = eqx.tree_at(lambda q: q.codes, q(), q().codes.astype("float32"))
    return jnp.ones((8, 64)) @ broken


def sum_of_two():
    keys = jax.random.split(jax.random.key(0))
    models = [eqquant.quantize(jax.random.normal(key, (16, 64)), "nf4") for key in keys]
    jax.tree.map(lambda a, b: a + b, *models)


PREDICT = "import jax.numpy as jnp\n\n\ndef predict(q):\n    return jnp.exp(q)\n"


def predict(**policy):
    module: dict = {}
    exec(compile(PREDICT, "model.py", "exec"), module)
    return eqquant.quaxify(module["predict"], **policy)(q())


X = jnp.ones((8, 64))
# In the order of the pages.
PROVOKED: dict[str, Callable] = {
    "dot": lambda: jnp.dot(q(), X.T),
    "matmul": lambda: jnp.matmul(X, q()),
    "einsum": lambda: jnp.einsum("bi,oi->bo", X, q()),
    "take": lambda: jnp.take(q(), jnp.array([3, 1]), axis=0),
    "relu": lambda: jax.nn.relu(q()),
    "softmax": lambda: jax.nn.softmax(q()),
    "exp": lambda: jnp.exp(q()),
    "sum": lambda: jnp.sum(q()),
    "convolution": lambda: lax.conv_general_dilated(
        jnp.ones((1, 16, 9)), kernel(), (1,), "VALID"
    ),
    "lax.dot": lambda: lax.dot_general(X, q(), (((1,), (1,)), ((), ()))),
    "+": lambda: q() + 1,
    "==": lambda: q() == 0,
    "bool": lambda: bool(q()),
    "at": lambda: q().at[0].set(1),
    "*": lambda: q() * jnp.ones((64, 64)),
    "asarray": lambda: np.asarray(q()),
    "warning": predict,
    "error": lambda: predict(on_materialise="error"),
    "integers": lambda: eqquant.quantize(jnp.arange(64), "int8"),
    "not finite": lambda: eqquant.quantize(jnp.full((4, 64), jnp.nan), "int8"),
    "grad": gradient_of_all,
    "optimiser": update_of_all,
    "codes": codes_of_an_optimiser,
    "codes of two models": sum_of_two,
    "parts": lambda: jax.vmap(parted()[0])(X),
}


def raised(fn: Callable) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception) as caught:
            fn()
    return f"{caught.type.__name__}: {caught.value}"


def ours() -> list[str]:
    """Return the messages except Flax's, which tests/clients covers."""
    return [text for text in shown() if not text.startswith("flax.")]


@pytest.mark.skipif(
    f"Messages are from JAX {jax.__version__}." not in TEXT,
    reason=f"the pages show messages of another version of JAX than {jax.__version__}",
)
@pytest.mark.parametrize("name", PROVOKED)
def test_message_equals_the_documented_message(name):
    text = ours()[list(PROVOKED).index(name)]
    # The pages show the beginning of long messages about pytrees.
    assert raised(PROVOKED[name])[: len(text)] == text


def test_every_documented_message_is_tested():
    assert len(ours()) == len(PROVOKED)
    assert [text for text in shown() if text not in ours()] == [
        text for text in shown() if "ScopeParamShapeError" in text
    ]
