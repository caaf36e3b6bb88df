"""Weights of GPTQ in safetensors, as AutoGPTQ and GPTQModel pack them.

A code has `bits` bits, and a weight has a column for each output: `qweight` is int32 of
`(inputs * bits / 32, outputs)`, `scales` are `(groups, outputs)`, and `qzeros` is int32
of `(groups, outputs * bits / 32)`. `g_idx` says which group each input is in. Zeros are
stored less one, unless the layout is called `gptq_v2`.
"""

import numpy as np

from ..files import Source
from ._config import PackingConfig
from ._entry import Entry
from ._parts import Parts, prefixes
from ._words import holds, unpack_words
from ._zero_points import BITS, block_order, SCALE_DTYPES, ZeroPointWeight


def gptq_entries(source: Source, config: PackingConfig) -> dict[str, Entry]:
    bits = config.one_of("bits", BITS)
    block = config.block_size()
    symmetric = config.one_of("sym", (True, False), True)
    ordered = not config.one_of("desc_act", (True, False), False)
    names = "checkpoint_format", "format"
    less_one = config.layout(names, ("gptq", "gptq_v2")) == "gptq"
    config.one_of("pack_dtype", ("int32",), "int32")
    entries = {}
    for prefix in prefixes(source, "qweight"):
        parts = Parts(source, prefix, "GPTQ")
        weight = _weight(parts, bits, block, symmetric, ordered, less_one)
        entries[parts.weight] = weight.entry()
    return entries


def _weight(
    parts: Parts,
    bits: int,
    block: int | None,
    symmetric: bool,
    ordered: bool,
    less_one: bool,
) -> ZeroPointWeight:
    words, outputs = parts.look_up("qweight", ("int32",), (None, None)).shape
    inputs, held = holds(words, bits), outputs * bits // 32
    if not inputs or not outputs or holds(held, bits) != outputs:
        raise ValueError(
            f"{parts.where} has 'qweight' of the shape {(words, outputs)}, which is no "
            f"matrix of {bits} bits."
        )
    blocks = 1 if block is None else -(-inputs // block)
    scales = parts.look_up("scales", SCALE_DTYPES, (blocks, outputs))
    parts.look_up("qzeros", ("int32",), (blocks, held))
    if has_order := "g_idx" in parts:
        parts.look_up("g_idx", ("int32",), (inputs,))
    elif not ordered:
        raise ValueError(
            f"{parts.where} has no 'g_idx' beside it, although desc_act is true."
        )

    def zeros() -> np.ndarray:
        found = unpack_words(parts.read("qzeros"), bits, 1).T.astype(np.int32)
        found += less_one
        if np.any(found == 2**bits):
            # Libraries differ in whether this is 0 or the next after the last code.
            raise ValueError(
                f"{parts.where} has a zero point that is out of range: {2**bits}, "
                f"stored less one in {bits} bits. Save the checkpoint as gptq_v2."
            )
        return found

    return ZeroPointWeight(
        "GPTQ",
        parts.where,
        (outputs, inputs),
        scales.dtype,
        tuple(parts.names),
        bits,
        block,
        symmetric,
        codes=lambda: unpack_words(parts.read("qweight"), bits, 0).T,
        scales=lambda: parts.read("scales").T,
        zeros=zeros,
        order=(lambda: block_order(parts, "g_idx", blocks)) if has_order else None,
    )
