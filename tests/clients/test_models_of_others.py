"""Models of other libraries that use `eqx.nn` run unchanged, without `quaxify`."""

import importlib.util
import sys
import types

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from compare import check, left, share
from helpers import assert_close, strict


KEY = jax.random.key(0)


def test_a_vision_transformer_of_equimo():
    vit = pytest.importorskip("equimo.models.vit")
    options = dict(patch_size=8, num_heads=2, depths=[2], num_classes=10, key=KEY)
    model = vit.VisionTransformer(32, 3, 64, **options)
    image = jax.random.normal(KEY, (3, 32, 32))
    check(model, lambda model: model(image, key=KEY, inference=True))


def test_a_convolutional_network_of_equimo():
    mobilenet = pytest.importorskip("equimo.models.mobilenet")
    # Channels in, channels in the middle, kernel size, stride, excitation, activation.
    blocks = [(16, 16, 3, 2, True, "relu"), (24, 96, 5, 1, True, "hard_swish")]
    model = mobilenet.MobileNetv3(3, blocks, last_channels=64, num_classes=10, key=KEY)
    model = eqx.nn.inference_mode(model)
    image = jax.random.normal(KEY, (3, 32, 32))
    check(model, lambda model: model(image, key=KEY, inference=True), tolerance=1e-3)


def test_esm2():
    esm2quinox = pytest.importorskip("esm2quinox")
    model = esm2quinox.ESM2(
        num_layers=2, embed_size=64, num_heads=4, token_dropout=False, key=KEY
    )
    tokens = esm2quinox.tokenise(["MKTVRQERLKSIVRILERSKEPVSGAQ"])
    check(model, lambda model: jax.vmap(model)(tokens).logits, format="nf4")


def test_a_flow_of_flowjax():
    flows = pytest.importorskip("flowjax.flows")
    distributions = pytest.importorskip("flowjax.distributions")
    normal = distributions.Normal(jnp.zeros(8))
    flow = flows.coupling_flow(KEY, base_dist=normal, nn_width=64, flow_layers=2)
    x = jax.random.normal(KEY, (5, 8))
    check(flow, lambda flow: flow.log_prob(x), least=0.5, tolerance=1e-3)


@pytest.fixture
def jaxonmodels(monkeypatch):
    """Import jaxonmodels without PyTorch, which it needs to read weights only."""
    torch = types.ModuleType("torch")
    torch.Tensor = jax.Array
    if importlib.util.find_spec("torch") is None:
        monkeypatch.setitem(sys.modules, "torch", torch)
    return lambda name: pytest.importorskip(f"jaxonmodels.models.{name}")


def test_a_vision_transformer_of_jaxonmodels(jaxonmodels):
    """Its attention keeps the projections of queries, keys and values in one array."""
    model = jaxonmodels("vit").VisionTransformer(32, 8, 64, 2, 4, 10, key=KEY)
    image = jax.random.normal(KEY, (3, 32, 32))
    call = lambda model: model(image)[0]
    with pytest.warns(UserWarning, match="23% of the bytes .*in_proj_weight"):
        q = eqquant.quantize_tree(model, "int8")
    joined = [f"transformer.resblocks.{i}.attn.in_proj_weight" for i in range(2)]
    assert left(q) >= {*joined, "proj"}
    rules = {"*.in_proj_weight": "int8", "proj": ("int8", 0)}
    check(model, call, least=0.95, rules=rules, run=strict)


@pytest.mark.filterwarnings("ignore:.*of the bytes stay in floating point")
def test_mamba_of_jaxonmodels(jaxonmodels):
    """A state space model, whose last layer shares the table of its embedding."""
    model = jaxonmodels("mamba").Mamba(32, 64, 2, key=KEY)
    tokens = jax.random.randint(KEY, (9,), 0, 64)
    q = check(model, lambda model: model(tokens), least=0.75)
    weights = [path for path in left(q) if path.endswith(("A_log", "_proj.weight"))]
    assert {path.split(".")[-2] for path in weights} == {"ssm", "delta_proj"}


def test_a_residual_network_of_jaxonmodels(jaxonmodels):
    resnet = jaxonmodels("resnet")
    block, make = resnet.BasicBlock, eqx.nn.make_with_state(resnet.ResNet)
    model, state = make(block, [1, 1, 1, 1], 10, False, 1, 64, None, key=KEY)
    model = eqx.nn.inference_mode(model)
    image = jax.random.normal(KEY, (3, 32, 32))
    call = lambda model: model(image, state, inference=True)[0]
    check(model, call, least=0.99)


def test_a_network_for_differential_equations_of_pdequinox():
    """A U-Net with periodic boundaries, whose layers are copies of Equinox's."""
    arch = pytest.importorskip("pdequinox.arch")
    options = dict(hidden_channels=16, num_levels=1, boundary_mode="periodic")
    model = arch.ClassicUNet(1, 1, 1, key=KEY, **options)
    state = jax.random.normal(KEY, (1, 32))
    check(model, lambda model: model(state), run=strict)


def test_fourier_operators_of_pdequinox_stay_in_floating_point():
    arch = pytest.importorskip("pdequinox.arch")
    model = arch.ClassicFNO(1, 1, 1, hidden_channels=16, num_blocks=1, key=KEY)
    with pytest.warns(UserWarning, match="9.% of the bytes .*weights_real"):
        q = eqquant.quantize_tree(model, "int8")
    assert {"blocks.0.spectral_conv.weights_real", "projection.weight"} <= left(q)
    assert share(q) < 0.1


def test_megalodon():
    """Chunks of attention beside an exponential moving average."""
    megalodon = pytest.importorskip("megalodon_jax")
    sizes = dict(vocab_size=64, model_dim=64, z_dim=32, value_dim=64, cema_ndim=4)
    sizes |= dict(ffn_hidden_dim=128, chunk_size=8, norm_num_groups=4, num_layers=1)
    model = megalodon.MegalodonForCausalLM(
        megalodon.MegalodonConfig(num_heads=2, **sizes), key=KEY
    )
    tokens = jax.random.randint(KEY, (2, 16), 0, 64)
    q = check(model, lambda model: model(tokens)[0], least=0.9, run=strict)
    assert not [path for path in left(q) if path.endswith("proj.weight")]


def test_a_solver_of_lineax():
    lineax = pytest.importorskip("lineax")
    a = jnp.eye(64) * 8 + jax.random.normal(KEY, (64, 64)) / 8
    q = eqquant.quantize(a, "int8", precision="highest")
    y = jax.random.normal(KEY, (64,))
    operator = lambda w: lineax.FunctionLinearOperator(lambda x: w @ x, y)
    solver = lineax.GMRES(rtol=1e-5, atol=1e-5)
    solve = eqx.filter_jit(lambda w: lineax.linear_solve(operator(w), y, solver).value)
    assert_close(solve(q), solve(q.dequantize()), 1e-3)
