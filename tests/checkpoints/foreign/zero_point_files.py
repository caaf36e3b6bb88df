"""Write GPTQ and AWQ files from their specification, with changes for tests."""

import json

import numpy as np
from safetensors.numpy import save_file


GROUP, INPUTS, OUTPUTS = 32, 96, 64


def pack_int32(codes, bits, axis):
    """Pack codes into int32, bit after bit, along an axis."""
    codes = np.moveaxis(np.asarray(codes, np.uint8), axis, -1)
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = np.packbits(stream.reshape(*codes.shape[:-1], -1), -1, bitorder="little")
    return np.ascontiguousarray(np.moveaxis(stream.view("<i4"), -1, axis))


def parts(bits=4, group=GROUP, symmetric=False, seed=0):
    """Return codes, zero points and scales, `(inputs or groups, outputs)`, and the
    group of each input."""
    rng = np.random.default_rng(seed)
    groups = INPUTS // group
    # Avoid the 8-bit level -128, which symmetric Int8 lacks.
    codes = rng.integers(bits == 8, 2**bits, (INPUTS, OUTPUTS))
    zeros = rng.integers(1, 2**bits, (groups, OUTPUTS))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(1e-3, 1e-1, (groups, OUTPUTS)).astype(np.float16)
    return codes, zeros, scales, np.arange(INPUTS, dtype=np.int32) // group


def values(codes, zeros, scales, groups):
    """Return the dequantized weight, `(outputs, inputs)`, in float32."""
    levels = (codes - zeros[groups]).astype(np.float32)
    return (levels * scales[groups].astype(np.float32)).T


def gptq(folder, bits=4, group=GROUP, symmetric=False, *, config=(), **changes):
    """Write a folder with one weight, `a.weight`, and return its values."""
    codes, zeros, scales, groups = parts(bits, group, symmetric)
    tensors = {
        "qweight": pack_int32(codes, bits, 0),
        "qzeros": pack_int32(zeros - 1, bits, 1),
        "scales": scales,
        "g_idx": groups,
    }
    settings = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    write(
        folder, tensors, {"quant_method": "gptq", **settings, **dict(config)}, changes
    )
    return values(codes, zeros, scales, groups)


def awq(folder, *, config=(), **changes):
    codes, zeros, scales, groups = parts()

    def pack(x):
        x = x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack_int32(x.reshape(len(x), -1), 4, 1)

    tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
    }
    write(folder, tensors, {**settings, **dict(config)}, changes)
    return values(codes, zeros, scales, groups)


def write(folder, tensors, config, changes):
    """Write tensors and the configuration. `changes` replaces tensors by name, or
    removes them if `None`."""
    tensors = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
    tensors = {f"a.{name}": np.ascontiguousarray(t) for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {k: v for k, v in config.items() if v is not None}
    text = json.dumps({"quantization_config": config})
    (folder / "config.json").write_text(text)
