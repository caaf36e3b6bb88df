"""GPTQ weights in safetensors, as AutoGPTQ and GPTQModel pack them.

A code has `bits` bits, and a weight has a column for each output: `qweight` is int32
`(inputs * bits / 32, outputs)`, `scales` are `(groups, outputs)`, and `qzeros` is int32
`(groups, outputs * bits / 32)`. `g_idx` holds the group of each input. Zero points are
stored minus one, except in the layout `gptq_v2`.
"""

import numpy as np

from ..files import Source
from ._config import PackingConfig
from ._entry import Entry
from ._int32 import count_codes, unpack_int32
from ._parts import Parts, prefixes
from ._zero_points import BITS, block_order, SCALE_DTYPES, ZeroPointWeight


def gptq_entries(source: Source, config: PackingConfig) -> dict[str, Entry]:
    bits = config.one_of("bits", BITS)
    block = config.block_size()
    symmetric = config.one_of("sym", (True, False), True)
    ordered = not config.one_of("desc_act", (True, False), False)
    names = "checkpoint_format", "format"
    zeros_minus_one = config.check_layout(names, ("gptq", "gptq_v2")) == "gptq"
    config.one_of("pack_dtype", ("int32",), "int32")
    entries = {}
    for prefix in prefixes(source, "qweight"):
        parts = Parts(source, prefix, "GPTQ")
        weight = _weight(parts, bits, block, symmetric, ordered, zeros_minus_one)
        entries[parts.weight] = weight.entry()
    return entries


def _weight(
    parts: Parts,
    bits: int,
    block: int | None,
    symmetric: bool,
    ordered: bool,
    zeros_minus_one: bool,
) -> ZeroPointWeight:
    packed_inputs, outputs = parts.look_up("qweight", ("int32",), (None, None)).shape
    inputs, packed_outputs = count_codes(packed_inputs, bits), outputs * bits // 32
    if not inputs or not outputs or count_codes(packed_outputs, bits) != outputs:
        raise ValueError(
            f"{parts.where}: 'qweight' has the shape {(packed_inputs, outputs)}, which "
            f"does not unpack to a matrix of {bits} bits."
        )
    blocks = 1 if block is None else -(-inputs // block)
    scales = parts.look_up("scales", SCALE_DTYPES, (blocks, outputs))
    parts.look_up("qzeros", ("int32",), (blocks, packed_outputs))
    if has_order := "g_idx" in parts:
        parts.look_up("g_idx", ("int32",), (inputs,))
    elif not ordered:
        raise ValueError(
            f"{parts.where} needs 'g_idx', which is missing: desc_act is true."
        )

    def zeros() -> np.ndarray:
        unpacked = unpack_int32(parts.read("qzeros"), bits, 1).T.astype(np.int32)
        unpacked += zeros_minus_one
        if np.any(unpacked == 2**bits):
            # Libraries disagree whether this value wraps to 0 or exceeds the codes.
            raise ValueError(
                f"{parts.where}: 'qzeros' has a zero point of {2**bits}, which is out "
                f"of range for {bits} bits. Save the checkpoint as gptq_v2."
            )
        return unpacked

    return ZeroPointWeight(
        "GPTQ",
        parts.where,
        (outputs, inputs),
        scales.dtype,
        tuple(parts.names),
        bits,
        block,
        symmetric,
        codes=lambda: unpack_int32(parts.read("qweight"), bits, 0).T,
        scales=lambda: parts.read("scales").T,
        zeros=zeros,
        order=(lambda: block_order(parts, "g_idx", blocks)) if has_order else None,
    )
