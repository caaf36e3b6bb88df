"""Training with quantized weights."""

from ._activations import round_activations as round_activations
from ._fake_quantize import (
    fake_quantize_tree as fake_quantize_tree,
    FakeQuantized as FakeQuantized,
)
from ._lora import (
    lora_tree as lora_tree,
    merge_lora as merge_lora,
    with_dropout_key as with_dropout_key,
)
from ._straight_through import (
    learned_scales as learned_scales,
    straight_through as straight_through,
)
