"""Files of GPTQ and AWQ by their layout, for tests that change one thing in them."""

import json

import numpy as np
from safetensors.numpy import save_file


GROUP, INPUTS, OUTPUTS = 32, 96, 64


def pack_words(codes, bits, axis):
    """Bit after bit into int32 words, along an axis."""
    codes = np.moveaxis(np.asarray(codes, np.uint8), axis, -1)
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = np.packbits(stream.reshape(*codes.shape[:-1], -1), -1, bitorder="little")
    return np.ascontiguousarray(np.moveaxis(stream.view("<i4"), -1, axis))


def parts(bits=4, group=GROUP, symmetric=False, seed=0):
    """Codes, zeros and scales, `(inputs or groups, outputs)`; and groups of inputs."""
    rng = np.random.default_rng(seed)
    groups = INPUTS // group
    # No 8-bit level is -128, which Int8 does not have.
    codes = rng.integers(bits == 8, 2**bits, (INPUTS, OUTPUTS))
    zeros = rng.integers(1, 2**bits, (groups, OUTPUTS))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(1e-3, 1e-1, (groups, OUTPUTS)).astype(np.float16)
    return codes, zeros, scales, np.arange(INPUTS, dtype=np.int32) // group


def values(codes, zeros, scales, groups):
    """`(outputs, inputs)`, in float32."""
    levels = (codes - zeros[groups]).astype(np.float32)
    return (levels * scales[groups].astype(np.float32)).T


def gptq(folder, bits=4, group=GROUP, symmetric=False, *, config=(), **changes):
    """A folder with one weight, `a.weight`, and its values."""
    codes, zeros, scales, groups = parts(bits, group, symmetric)
    tensors = {
        "qweight": pack_words(codes, bits, 0),
        "qzeros": pack_words(zeros - 1, bits, 1),
        "scales": scales,
        "g_idx": groups,
    }
    about = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    write(folder, tensors, {"quant_method": "gptq", **about, **dict(config)}, changes)
    return values(codes, zeros, scales, groups)


def awq(folder, *, config=(), **changes):
    codes, zeros, scales, groups = parts()

    def pack(x):
        x = x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_words(x.reshape(len(x), -1), 4, 1)

    tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
    about = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    write(folder, tensors, {**about, **dict(config)}, changes)
    return values(codes, zeros, scales, groups)


def write(folder, tensors, config, changes):
    """`changes` by name: another tensor, or None for none."""
    tensors = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
    tensors = {f"a.{name}": np.ascontiguousarray(t) for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {k: v for k, v in config.items() if v is not None}
    text = json.dumps({"quantization_config": config})
    (folder / "config.json").write_text(text)
