"""Conversion of Hugging Face's `config.json` to `Config`.

Unsupported entries raise an error that names them.
"""

import math
from collections.abc import Callable

from config import Config, LinearScaling, Llama3Scaling


def config_of(values: dict) -> Config:
    """Return the `Config` of a `config.json`, or raise an error for unsupported
    entries."""
    kind = values.get("model_type")
    if kind not in _architectures:
        raise ValueError(
            f"config.json: the architecture model_type={kind!r} is not supported. "
            f"Supported architectures: {', '.join(_architectures)}."
        )
    for name in values.get("architectures") or []:
        if not name.endswith("ForCausalLM"):
            raise ValueError(f"config.json: {name} is not a causal language model.")
    if "quantization_config" in values:
        _check_weights_alone(values["quantization_config"])
    return _architectures[kind](_Values(values))


def _check_weights_alone(quantization) -> None:
    """Check that the file quantizes weights only, in a supported way.

    Ignoring the rounding of activations would change the model.
    """
    known = "awq", "bitsandbytes", "compressed-tensors", "gptq"
    values = quantization if isinstance(quantization, dict) else {}
    method = values.get("quant_method")
    if method not in known:
        raise ValueError(
            f"config.json: quantization_config of quant_method={method!r} is not "
            f"supported, only {', '.join(map(repr, known))}."
        )
    for group in values.get("config_groups", {}).values():
        if group.get("input_activations"):
            raise ValueError(
                "config.json: quantization_config has input_activations, which are "
                "not supported: only weights may be quantized."
            )


class _Values:
    """The entries of `config.json`. Errors name the entry."""

    def __init__(self, values: dict):
        self._values = values

    def __call__(self, name: str, default=...):
        value = self._values.get(name)
        if value is not None:
            return value
        if default is ...:
            raise ValueError(f"config.json has no {name}.")
        return default

    def must_be(self, name: str, *allowed) -> None:
        """Check that an entry has an allowed value. A missing entry has the first."""
        value = self(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"config.json: {name}={value!r} is not supported, only "
                f"{' or '.join(map(repr, allowed))}."
            )


def _common(get: _Values, *, head_size=None, tied=False, theta=10_000.0) -> dict:
    """Return the settings that all architectures share."""
    get.must_be("mlp_bias", False)
    get.must_be("partial_rotary_factor", 1.0)
    size, heads = get("hidden_size"), get("num_attention_heads")
    rope_theta, rope_scaling = _rope(get, theta)
    return dict(
        vocabulary=get("vocab_size"),
        size=size,
        layers=get("num_hidden_layers"),
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        head_size=get("head_dim", head_size or size // heads),
        hidden=get("intermediate_size"),
        tied=get("tie_word_embeddings", tied),
        norm_eps=get("rms_norm_eps", 1e-6),
        rope_theta=float(rope_theta),
        rope_scaling=rope_scaling,
    )


def _rope(get: _Values, theta: float, layers: str | None = None):
    """Return the base of the rotary frequencies, and their scaling.

    They are in `rope_parameters`, possibly for each kind of layer, or in the older
    entries from before transformers 5.
    """
    name = "rope_parameters" if get("rope_parameters", None) else "rope_scaling"
    values = get(name, {})
    if layers and layers in values:
        values, name = values[layers], f"{name}[{layers!r}]"
    theta = values.get("rope_theta") or get("rope_theta", theta)
    kind = values.get("rope_type") or values.get("type") or "default"
    try:
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, LinearScaling(values["factor"])
        if kind == "llama3":
            low, high = values["low_freq_factor"], values["high_freq_factor"]
            length = values["original_max_position_embeddings"]
            return theta, Llama3Scaling(values["factor"], low, high, length)
    except KeyError as error:
        raise ValueError(f"config.json: {name} has no {error.args[0]}.") from None
    raise ValueError(
        f"config.json: {name} of type {kind!r} is not supported, only 'default', "
        "'linear' and 'llama3'."
    )


def _local(get: _Values, default: Callable[[int], bool]) -> dict:
    """Return for each layer whether its attention is local."""
    layers, window = get("num_hidden_layers"), get("sliding_window", None)
    kinds = get("layer_types", None)
    if kinds is not None:
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"config.json: layer_types has {kind!r}, which is not supported."
                )
        if len(kinds) != layers:
            raise ValueError(
                f"config.json: layer_types has {len(kinds)} entries, and "
                f"num_hidden_layers is {layers}."
            )
        local = tuple(kind == "sliding_attention" for kind in kinds)
    else:
        local = tuple(default(i) for i in range(layers))
    if window is None or not any(local):
        return {}
    return dict(local=local, window=window)


def _llama(get: _Values) -> Config:
    get.must_be("hidden_act", "silu")
    bias = get("attention_bias", False)
    common = _common(get)
    return Config(**common, query_key_value_bias=bias, output_bias=bias)


def _mistral(get: _Values) -> Config:
    get.must_be("hidden_act", "silu")
    return Config(**_common(get), **_local(get, lambda i: True))


def _qwen2(get: _Values) -> Config:
    get.must_be("hidden_act", "silu")
    return Config(**_common(get), **_qwen_local(get), query_key_value_bias=True)


def _qwen_local(get: _Values) -> dict:
    if not get("use_sliding_window", False):
        return {}
    first = get("max_window_layers", 0)
    return _local(get, lambda i: i >= first)


def _qwen3(get: _Values) -> Config:
    get.must_be("hidden_act", "silu")
    bias = get("attention_bias", False)
    return Config(
        **_common(get, head_size=128),
        **_qwen_local(get),
        query_key_value_bias=bias,
        output_bias=bias,
        query_key_norm=True,
    )


def _gemma(get: _Values, local: dict, rope: dict, **others) -> Config:
    get.must_be("hidden_activation", "gelu_pytorch_tanh")
    get.must_be("use_bidirectional_attention", False)
    bias = get("attention_bias", False)
    return Config(
        **{**_common(get, head_size=256, tied=True), **rope},
        **local,
        activation="gelu",
        query_key_value_bias=bias,
        output_bias=bias,
        attention_scale=1 / math.sqrt(get("query_pre_attn_scalar", 256)),
        attention_softcap=get("attn_logit_softcapping", None),
        logit_softcap=get("final_logit_softcapping", None),
        norm_offset=1.0,
        post_norms=True,
        scale_embedding=True,
        **others,
    )


def _gemma2(get: _Values) -> Config:
    return _gemma(get, _local(get, lambda i: i % 2 == 0), {})


def _gemma3(get: _Values) -> Config:
    pattern = get("sliding_window_pattern", 6)
    theta, scaling = _rope(get, 1_000_000.0, "full_attention")
    local_theta, local_scaling = get("rope_local_base_freq", 10_000.0), None
    if get("rope_parameters", None):
        local_theta, local_scaling = _rope(get, local_theta, "sliding_attention")
    if local_scaling is not None:
        raise ValueError(
            "config.json: rope_parameters['sliding_attention'] must not be scaled."
        )
    return _gemma(
        get,
        _local(get, lambda i: (i + 1) % pattern != 0),
        {"rope_theta": float(theta), "rope_scaling": scaling},
        local_rope_theta=float(local_theta),
        query_key_norm=True,
    )


def _mixtral(get: _Values) -> Config:
    get.must_be("hidden_act", "silu")
    return Config(
        **_common(get, theta=1_000_000.0),
        **_local(get, lambda i: True),
        experts=get("num_local_experts"),
        active_experts=get("num_experts_per_tok"),
    )


def _qwen3_moe(get: _Values) -> Config:
    get.must_be("hidden_act", "silu")
    get.must_be("decoder_sparse_step", 1)
    get.must_be("mlp_only_layers", [])
    bias = get("attention_bias", False)
    return Config(
        **{**_common(get, head_size=128), "hidden": get("moe_intermediate_size")},
        **_qwen_local(get),
        query_key_value_bias=bias,
        output_bias=bias,
        query_key_norm=True,
        # The name before transformers 5, and since.
        experts=get("num_experts", None) or get("num_local_experts"),
        active_experts=get("num_experts_per_tok"),
        normalise_experts=get("norm_topk_prob", False),
    )


_architectures = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
SUPPORTED = tuple(_architectures)
