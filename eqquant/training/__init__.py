"""Training: straight-through estimators, quantization-aware training, distillation and
adapters.

Exports the training functions for users. Imports `sharding`, `trees`, `arrays`,
`primitives`, `kernels`, `formats` and `_jax`.
"""

from ._activations import round_activations as round_activations
from ._distill import distill as distill, DistillationState as DistillationState
from ._dropout import with_dropout_key as with_dropout_key
from ._fake_quantize import (
    fake_quantize_tree as fake_quantize_tree,
    FakeQuantized as FakeQuantized,
)
from ._lora_tree import lora_tree as lora_tree
from ._merge_lora import merge_lora as merge_lora
from ._straight_through import (
    initial_scales as initial_scales,
    straight_through as straight_through,
)
from ._straight_through_array import StraightThroughArray as StraightThroughArray


__all__ = [
    "distill",
    "DistillationState",
    "fake_quantize_tree",
    "FakeQuantized",
    "initial_scales",
    "lora_tree",
    "merge_lora",
    "round_activations",
    "straight_through",
    "with_dropout_key",
]
