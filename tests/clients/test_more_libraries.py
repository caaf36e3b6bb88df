"""More libraries of the Equinox family: each model against its dequantized self."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from compare import check, left
from helpers import strict


KEY = jax.random.key(0)


def test_charges_of_expaloma():
    """A graph network with its real weights, which are plain arrays."""
    expaloma = pytest.importorskip("expaloma")
    model = expaloma.load_eqx(expaloma.bundled_eqx_path())
    units = model.gnn.w_f_in.shape[1]
    x = jax.random.bernoulli(KEY, 0.1, (6, units)).astype(jnp.float32)
    ring = jnp.arange(6)
    senders = jnp.concatenate([ring, (ring + 1) % 6])
    receivers = jnp.concatenate([(ring + 1) % 6, ring])
    graph = x, senders, receivers, jnp.zeros(6, jnp.int32)
    call = lambda model: model(*graph, 1, 0.0)
    rules = {"*.w_*": eqquant.trees.QuantizationRule("int8", axis=-1), "*": None}
    check(model, call, least=0.9, rules=rules, run=strict, tolerance=1e-3)


def test_a_root_of_optimistix():
    """The implicit derivative of a fixed point with quantized weights."""
    optimistix = pytest.importorskip("optimistix")
    layer = eqx.nn.Linear(32, 32, key=KEY)
    x = jax.random.normal(KEY, (32,))
    step = lambda y, args: jnp.tanh(args[0](y)) / 4 + args[1]
    solver = optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6)

    def solve(layer):
        return optimistix.fixed_point(step, solver, jnp.zeros(32), (layer, x)).value

    check(layer, solve, least=0.9, tolerance=1e-3)


def test_a_sampler_of_blackjax():
    """Hamiltonian Monte Carlo, with a density that a quantized network computes."""
    blackjax = pytest.importorskip("blackjax")
    network = eqx.nn.MLP(8, "scalar", 64, 1, key=KEY)
    options = dict(inverse_mass_matrix=jnp.ones(8), num_integration_steps=4)

    def sample(network):
        density = lambda x: jnp.sum(jnp.sin(network(x))) - jnp.sum(x**2) / 2
        sampler = blackjax.hmc(density, step_size=0.3, **options)

        def step(state, key):
            state, info = sampler.step(key, state)
            return state, (state.position, info.acceptance_rate)

        keys = jax.random.split(KEY, 8)
        return jax.lax.scan(step, sampler.init(jnp.ones(8)), keys)[1]

    check(network, sample, least=0.75, tolerance=1e-3)


@pytest.mark.filterwarnings("ignore:.*of the bytes stay in floating point")
def test_a_transformer_flow():
    """Stacks of stacked layers; the feed-forward layers are of the library's own."""
    flows = pytest.importorskip("transformer_flows")
    sizes = dict(channels=64, n_blocks=2, layers_per_block=2, head_dim=16, expansion=2)
    model = flows.TransformerFlow(1, 8, 4, **sizes, key=KEY)
    # The last layer is initialised with zeros, and the flow with the identity.
    last = lambda model: model.blocks.proj_out.weight
    weight = jax.random.normal(KEY, last(model).shape) / 8
    model = eqx.tree_at(last, model, weight)
    image = jax.random.normal(KEY, (1, 8, 8))
    call = lambda model: model.log_prob(image, None)
    q = eqquant.quantize_tree(model, "int8")
    layers = (
        "proj_in",
        "proj_out",
        *(f"attn_blocks.mlp.net.layers.{i}" for i in (0, 2)),
    )
    assert left(q) >= {f"blocks.{layer}.weight" for layer in layers}
    rules = {"*.net.layers.*.weight": "int8", "*.proj_*.weight": "int8"}
    check(model, call, rules=rules, run=strict)


# The axes that products contract, by path.
PENZAI = {
    "*.embeddings.value.data_array": ("int8", -1),
    "*.input_to_query.*.data_array": ("int8", -4),
    "*.input_to_key.*.data_array": ("int8", -3),
    "*.input_to_value.*.data_array": ("int8", -3),
    "*.attn_value_to_output.*.data_array": ("int8", (-4, -3, -2)),
    "*.delta.sublayers.1.sublayers.*.data_array": ("int8", -2),
    "body.sublayers.3.weights.value.data_array": ("int8", -2),
}


@pytest.mark.parametrize("stacked", [False, True])
def test_a_transformer_of_penzai(stacked):
    """Named arrays: after `freeze_params`, rules choose the weights."""
    pz = pytest.importorskip("penzai.pz")
    llama = pytest.importorskip("penzai.models.transformer.variants.llamalike_common")
    sizes = dict(embedding_dim=64, projection_dim=16, mlp_hidden_dim=128, vocab_size=64)
    options = dict(mlp_variant="swiglu", tie_embedder_and_logits=False)
    heads = dict(num_kv_heads=2, query_head_multiplier=2, num_decoder_blocks=1)
    config = llama.LlamalikeTransformerConfig(
        **sizes, **heads, **options, use_layer_stack=stacked
    )
    model = llama.build_llamalike_transformer(config, init_base_rng=KEY, name="llama")
    model = pz.freeze_params(model)
    tokens = pz.nx.wrap(jax.random.randint(KEY, (2, 9), 0, 64)).tag("batch", "seq")
    places = pz.nx.arange("seq", 9)
    names = ("batch", "seq", "vocabulary")
    call = lambda model: model(tokens, token_positions=places).unwrap(*names)
    with pytest.warns(UserWarning, match="nothing was chosen"):
        eqquant.quantize_tree(model, "int8")
    check(model, call, rules=PENZAI, run=strict)
