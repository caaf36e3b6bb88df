"""Conversion of the metadata of a GGUF file to `Config`.

Unsupported keys raise an error that names them.
"""

import math
from collections.abc import Callable, Collection

from config import Config, LinearScaling
from gguf_values import Values


# Keys that have no effect on the logits.
_no_effect = (
    "context_length",
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
)


def config_of_gguf(
    kind: str, values: Values, vocabulary: int, tensors: Collection[str]
) -> tuple[str, Config]:
    """Return the `model_type` of Hugging Face, and the `Config`.

    **Arguments:**

    - `kind`: the architecture, `general.architecture`.
    - `values`: the values of the architecture.
    - `vocabulary`: the number of tokens.
    - `tensors`: the names of all tensors.
    """
    if kind not in _architectures:
        raise ValueError(
            f"{values.where}: general.architecture={kind!r} is not supported. "
            f"Supported architectures: {', '.join(_architectures)}."
        )
    model_type, make = _architectures[kind]
    bias = lambda name: f"blk.0.{name}.bias" in tensors
    size, heads = map(values.integer, ("embedding_length", "attention.head_count"))
    head_size = values.integer("attention.key_length", size // heads)
    values.must_be("attention.value_length", head_size)
    values.must_be("rope.dimension_count", head_size)
    values.must_be("attention.causal", True)
    values.ignore(_no_effect)
    common = dict(
        vocabulary=vocabulary,
        size=size,
        layers=values.integer("block_count"),
        heads=heads,
        kv_heads=values.integer("attention.head_count_kv", heads),
        head_size=head_size,
        hidden=values.integer("feed_forward_length"),
        tied="output.weight" not in tensors,
        norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope_theta=float(values.number("rope.freq_base", 10_000.0)),
        rope_scaling=_scaling(values),
        query_key_value_bias=bias("attn_q"),
        output_bias=bias("attn_output"),
    )
    config = Config(**{**common, **make(values, common)})
    values.check_all_used()
    return ("mixtral" if kind == "llama" and config.experts else model_type), config


def _scaling(values: Values) -> LinearScaling | None:
    # The factor of files before `rope.scaling`.
    factor = values.number("rope.scale_linear", 1.0)
    values.must_be("rope.scaling.type", "none", "linear")
    values.must_be("rope.scaling.attn_factor", 1.0)
    factor = values.number("rope.scaling.factor", factor)
    if factor == 1 or values.text("rope.scaling.type", "linear") == "none":
        return None
    return LinearScaling(factor)


def _local(values: Values, layers: int, default: int) -> dict:
    """Return the layers with local attention. A period of `n` means that each `n`-th
    layer is global; the file can also have a flag per layer."""
    window = values.integer("attention.sliding_window", None)
    key = "attention.sliding_window_pattern"
    local = values.flags(key, layers)
    if local is None:
        period = values.integer(key, default)
        local = tuple((i + 1) % period != 0 for i in range(layers))
    return dict(local=local, window=window) if window and any(local) else {}


def _experts(values: Values) -> dict:
    experts = values.integer("expert_count", 0, least=0)
    if not experts:
        values.ignore(["expert_used_count"])
        return {}
    active = values.integer("expert_used_count")
    return dict(experts=experts, active_experts=active)


def _llama(values: Values, common: dict) -> dict:
    window = values.integer("attention.sliding_window", None)  # Mistral.
    local = dict(local=(True,) * common["layers"], window=window) if window else {}
    return {**_experts(values), **local}


def _qwen2(values: Values, common: dict) -> dict:
    return {}


def _qwen3(values: Values, common: dict) -> dict:
    return dict(query_key_norm=True)


def _qwen3_moe(values: Values, common: dict) -> dict:
    hidden = values.integer("expert_feed_forward_length")
    return dict(query_key_norm=True, hidden=hidden, **_experts(values))


def _gemma(values: Values, common: dict, largest: int) -> dict:
    # The largest model has a scale that the file does not contain.
    is_largest = common["layers"] == largest
    size = common["size"] // common["heads"] if is_largest else common["head_size"]
    return dict(
        activation="gelu",
        attention_scale=1 / math.sqrt(size),
        logit_softcap=values.number("final_logit_softcapping", None),
        # In GGUF files, the weights of norms contain the 1.
        norm_offset=0.0,
        post_norms=True,
        scale_embedding=True,
    )


def _gemma2(values: Values, common: dict) -> dict:
    return dict(
        **_gemma(values, common, largest=46),
        **_local(values, common["layers"], 2),
        attention_softcap=values.number("attn_logit_softcapping", 50.0),
    )


def _gemma3(values: Values, common: dict) -> dict:
    return dict(
        **_gemma(values, common, largest=62),
        **_local(values, common["layers"], 6),
        local_rope_theta=float(values.number("rope.freq_base_swa", 10_000.0)),
        query_key_norm=True,
    )


# The `model_type` and a function for the settings that differ from Llama.
_architectures: dict[str, tuple[str, Callable[[Values, dict], dict]]] = {
    "llama": ("llama", _llama),
    "mistral3": ("mistral", _llama),
    "qwen2": ("qwen2", _qwen2),
    "qwen3": ("qwen3", _qwen3),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
}
