"""Exchange adapters of `examples/llama` with PEFT, in both directions."""

import importlib.util
import pathlib
import sys

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest


torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples/llama"))
from load import load_model  # noqa: E402
from lora import add_adapters, load_adapters, save_adapters  # noqa: E402


FOLDER = ROOT / "tests/examples/data/llama/llama3"
TOKENS = np.array([[1, 5, 9, 30, 2, 17]])


@pytest.fixture(autouse=True)
def without_gptqmodel(monkeypatch):
    """Hide GPTQModel. If it is installed, PEFT also requires Optimum for all models."""
    find = importlib.util.find_spec
    hidden = lambda name, *args: None if name == "gptqmodel" else find(name, *args)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)


def _base():
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
    return model.float().eval()


def _logits_of_peft(model) -> np.ndarray:
    with torch.no_grad():
        return model.double()(torch.from_numpy(TOKENS)).logits.numpy()


def _logits(model) -> np.ndarray:
    tokens = jnp.asarray(TOKENS, jnp.int32)
    return np.asarray(model(tokens, jnp.zeros_like(tokens)))


def _assert_close(ours, theirs):
    """Compare float32 results of eqquant with float64 results of PEFT. With float32 on
    both sides, rounding in large adapters would exceed the tolerance. It depends on the
    CPU: with AVX2 it is 1.04e-5 of the largest logit."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("stacked", [True, False])
def test_peft_reads_our_adapters(stacked, tmp_path):
    model = load_model(FOLDER, stacked=stacked, progress=False)
    model = add_adapters(model, 4, alpha=8.0, key=jax.random.key(0))
    is_adapted = lambda x: isinstance(x, eqquant.arrays.LoraArray)
    filled = lambda q: q.replace(b=jax.random.normal(jax.random.key(1), q.b.shape))
    # `b` is initialised to zero.
    model = jax.tree.map(
        lambda x: filled(x) if is_adapted(x) else x, model, is_leaf=is_adapted
    )
    save_adapters(tmp_path, model, "llama")
    plain, adapted = _base(), peft.PeftModel.from_pretrained(_base(), tmp_path).eval()
    theirs = _logits_of_peft(adapted)
    assert np.abs(theirs - _logits_of_peft(plain)).max() > 0.1
    _assert_close(_logits(model), theirs)


def test_our_adapters_are_read_from_peft(tmp_path):
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(_base(), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    model = load_model(FOLDER, stacked=True, progress=False)
    ours = load_adapters(tmp_path, model, "llama")
    _assert_close(_logits(ours), _logits_of_peft(theirs))
