"""Functional quantization for JAX and Equinox."""

from . import debug as debug
from .arrays import (
    dequantize as dequantize,
    from_components as from_components,
    is_quantized as is_quantized,
    LoraArray as LoraArray,
    MaterialiseError as MaterialiseError,
    MaterialiseWarning as MaterialiseWarning,
    quantize as quantize,
    QuantizedArray as QuantizedArray,
    RotatedArray as RotatedArray,
)
from .calibration import (
    allocate as allocate,
    Allocation as Allocation,
    calibrate as calibrate,
    Statistics as Statistics,
    WeightStatistics as WeightStatistics,
)
from .checkpoints import (
    load as load,
    load_metadata as load_metadata,
    load_quantized as load_quantized,
    quantize_checkpoint as quantize_checkpoint,
    read_checkpoint as read_checkpoint,
    save as save,
    write_bitsandbytes as write_bitsandbytes,
)
from .dispatch import quaxify as quaxify, register as register
from .formats import (
    Binary as Binary,
    Codebook as Codebook,
    Float8Scales as Float8Scales,
    Format as Format,
    FP8 as FP8,
    GPUKernel as GPUKernel,
    Int2 as Int2,
    Int3 as Int3,
    Int4 as Int4,
    Int8 as Int8,
    MXFP4 as MXFP4,
    NF2 as NF2,
    NF3 as NF3,
    NF4 as NF4,
    NVFP4 as NVFP4,
    PowerOfTwoScales as PowerOfTwoScales,
    QuantizedOffsets as QuantizedOffsets,
    QuantizedScales as QuantizedScales,
    Ternary as Ternary,
    TPUKernel as TPUKernel,
)
from .primitives import (
    quantized_dot as quantized_dot,
    quantized_dot_p as quantized_dot_p,
)
from .sharding import shard_tree as shard_tree
from .training import (
    distill as distill,
    Distillation as Distillation,
    fake_quantize_tree as fake_quantize_tree,
    FakeQuantized as FakeQuantized,
    learned_scales as learned_scales,
    lora_tree as lora_tree,
    merge_lora as merge_lora,
    round_activations as round_activations,
    straight_through as straight_through,
    with_dropout_key as with_dropout_key,
)
from .trees import (
    dequantize_tree as dequantize_tree,
    quantize_tree as quantize_tree,
    register_weights as register_weights,
    Report as Report,
    report as report,
    ReportRow as ReportRow,
    Rule as Rule,
    trainable_mask as trainable_mask,
    tree_nbytes as tree_nbytes,
    Weight as Weight,
)
