"""Functional quantization for JAX and Equinox."""

from . import debug as debug
from ._array import QuantizedArray as QuantizedArray
from ._dispatch import quaxify as quaxify
from ._dot import quantized_dot as quantized_dot, quantized_dot_p as quantized_dot_p
from ._lora import LoraArray as LoraArray
from ._materialise import (
    MaterialiseError as MaterialiseError,
    MaterialiseWarning as MaterialiseWarning,
)
from ._quantize import (
    dequantize as dequantize,
    from_components as from_components,
    quantize as quantize,
)
from ._report import Report as Report, report as report, ReportRow as ReportRow
from ._selection import Rule as Rule
from ._tree import (
    dequantize_tree as dequantize_tree,
    is_quantized as is_quantized,
    quantize_tree as quantize_tree,
    trainable_mask as trainable_mask,
    tree_nbytes as tree_nbytes,
)
from .formats import (
    Binary as Binary,
    Format as Format,
    Int8 as Int8,
    NF4 as NF4,
    QuantizedScales as QuantizedScales,
    Ternary as Ternary,
    TPUKernel as TPUKernel,
)
from .rules import register as register
from .training import (
    fake_quantize_tree as fake_quantize_tree,
    FakeQuantized as FakeQuantized,
    learned_scales as learned_scales,
    lora_tree as lora_tree,
    merge_lora as merge_lora,
    round_activations as round_activations,
    straight_through as straight_through,
    with_dropout_key as with_dropout_key,
)
