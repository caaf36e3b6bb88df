"""Training: straight-through estimators, quantization-aware and low-precision training,
distillation and adapters.

Exports the training functions for users. Imports `checkpoints`, `sharding`, `trees`,
`arrays`, `primitives`, `partition`, `kernels`, `formats` and `_jax`.
"""

from ._activations import round_activations
from ._distill import distill
from ._distillation_state import DistillationState
from ._dropout import with_dropout_key
from ._fake_quantize import fake_quantize_tree, FakeQuantized
from ._kl_divergence import kl_divergence, TopLogits
from ._lora_tree import lora_tree
from ._merge_lora import merge_lora
from ._quantized_state import quantized_state, QuantizedMoment, QuantizedState
from ._store_logits import store_logits
from ._stored_logits import StoredLogits
from ._straight_through import initial_scales, straight_through
from ._straight_through_array import StraightThroughArray
from ._tune_rounding import tune_rounding
from .rounded import (
    low_precision,
    LowPrecisionArray,
    master_weights,
    Recipe,
    save_quantized,
    with_rounding_key,
)


__all__ = [
    "distill",
    "DistillationState",
    "fake_quantize_tree",
    "FakeQuantized",
    "initial_scales",
    "kl_divergence",
    "lora_tree",
    "low_precision",
    "master_weights",
    "merge_lora",
    "quantized_state",
    "Recipe",
    "round_activations",
    "save_quantized",
    "store_logits",
    "StoredLogits",
    "straight_through",
    "TopLogits",
    "tune_rounding",
    "with_dropout_key",
    "with_rounding_key",
]
