"""GPTQ and AWQ weights with zero points, from files that follow the specification."""

import eqquant
import jax
import numpy as np
import pytest
from eqquant import Int2, Int3, Int4, Int8
from helpers import relative, TOLERANCE
from zero_point_files import (
    awq,
    gptq,
    GROUP,
    INPUTS,
    OUTPUTS,
    pack_int32,
    parts,
    values,
)


def read(folder, **options):
    return eqquant.checkpoints.read_checkpoint(folder, **options)["a.weight"]


def assert_exact(q, expected):
    """Compare float32 values bit for bit, and values in the dtype of the file with the
    rounding of its library."""
    assert q.shape == (OUTPUTS, INPUTS) and q.dtype == np.float16
    found = np.asarray(q.astype("float32").dequantize())
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()
    half = np.ascontiguousarray(expected.astype(np.float16))
    assert np.asarray(q.dequantize()).tobytes() == half.tobytes()


FULL = {"scale_dtype": "float32", "fit": "absmax"}


@pytest.mark.parametrize(
    "bits, group, symmetric, format",
    [
        (4, 32, False, Int4(block_size=32, affine=True)),
        (4, 32, True, Int4(block_size=32)),
        (4, INPUTS, False, Int4(block_size=None, affine=True)),
        (3, 32, False, Int3(block_size=32, affine=True, **FULL)),
        (2, 32, True, Int2(block_size=32, **FULL)),
        (8, 32, True, Int8(block_size=32)),
    ],
)
def test_gptq_keeps_codes_and_values(bits, group, symmetric, format, tmp_path):
    size = -1 if group == INPUTS else group
    expected = gptq(tmp_path, bits, group, symmetric, config={"group_size": size})
    q = read(tmp_path)
    assert q.format == format
    assert_exact(q, expected)
    # `decode=True` changes nothing for exact formats.
    assert read(tmp_path, decode=True).format == format


def test_zero_points_of_gptq_v2(tmp_path):
    _, zeros, *_ = parts()
    config = {"checkpoint_format": "gptq_v2"}
    expected = gptq(tmp_path, config=config, qzeros=pack_int32(zeros, 4, 1))
    assert_exact(read(tmp_path), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_gptq_v2_with_the_label_of_gptq(bits, tmp_path):
    _, zeros, *_ = parts(bits, symmetric=True)
    stored = pack_int32(zeros, bits, 1)
    expected = gptq(tmp_path, bits, symmetric=True, qzeros=stored)
    with pytest.warns(UserWarning, match="read as gptq_v2"):
        assert_exact(read(tmp_path), expected)


def test_awq_keeps_codes_and_values(tmp_path):
    expected = awq(tmp_path)
    q = read(tmp_path)
    assert q.format == Int4(block_size=GROUP, affine=True)
    assert_exact(q, expected)


def test_a_product(tmp_path, normal):
    expected = awq(tmp_path).astype(np.float64)
    x, q = normal(5, INPUTS), read(tmp_path).astype("float32")
    y = jax.jit(lambda x, q: x @ q.T)(x, q)
    assert relative(y, x @ expected.T) < TOLERANCE["high"]


@pytest.mark.parametrize("desc_act", [False, True])
def test_permuted_whole_groups(desc_act, tmp_path):
    codes, zeros, scales, groups = parts()
    groups = groups[::-1].copy()
    gptq(tmp_path, g_idx=groups, config={"desc_act": desc_act})
    assert_exact(read(tmp_path), values(codes, zeros, scales, groups))


def test_desc_act_needs_decode(tmp_path):
    codes, zeros, scales, groups = parts()
    groups = np.random.default_rng(1).permutation(groups)
    gptq(tmp_path, g_idx=groups, config={"desc_act": True})
    with pytest.raises(ValueError, match="'a.weight' of GPTQ: .*desc_act.*decode=True"):
        read(tmp_path)
    expected = values(codes, zeros, scales, groups).astype(np.float16)
    np.testing.assert_array_equal(read(tmp_path, decode=True), expected)


def test_without_g_idx(tmp_path):
    expected = gptq(tmp_path, g_idx=None)
    assert_exact(read(tmp_path), expected)


def test_a_group_larger_than_a_row(tmp_path):
    expected = gptq(tmp_path, group=INPUTS, config={"group_size": 2**31 - 1})
    q = read(tmp_path)
    assert q.format == Int4(block_size=None, affine=True)
    assert_exact(q, expected)


def test_offsets_that_float32_would_round(tmp_path):
    scales = parts()[2].astype(np.float32) * np.float32(1 + 2**-20)
    gptq(tmp_path, scales=scales)
    with pytest.raises(ValueError, match="offsets.*float32.*decode=True"):
        read(tmp_path)
    assert read(tmp_path, decode=True).dtype == np.float32
    # Without zero points there are no offsets to round.
    gptq(tmp_path, symmetric=True, scales=scales)
    assert read(tmp_path).format == Int4(block_size=GROUP)


def test_8_bit_codes_with_zero_points(tmp_path):
    expected = gptq(tmp_path, 8)
    found = read(tmp_path)
    assert found.format == eqquant.Int8(block_size=GROUP, affine=True)
    values = found.with_dtype("float32").dequantize()
    np.testing.assert_array_equal(values, expected.astype(np.float32))


def int32(*shape):
    return np.zeros(shape, np.int32)


def f16(*shape):
    return np.ones(shape, np.float16)


INVALID = {
    "no scales": (gptq, dict(scales=None), "'scales'"),
    "no zeros": (gptq, dict(qzeros=None), "'qzeros'"),
    "no order": (
        gptq,
        dict(g_idx=None, config={"desc_act": True}),
        "'g_idx'.*desc_act",
    ),
    "codes of another dtype": (
        gptq,
        dict(qweight=f16(12, 64)),
        "'qweight' .*int32.*float16",
    ),
    "codes of a vector": (gptq, dict(qweight=int32(12)), r"\(any, any\).*\(12,\)"),
    "no codes": (gptq, dict(qweight=int32(0, 64)), r"\(0, 64\)"),
    "no outputs": (gptq, dict(qweight=int32(12, 0)), r"\(12, 0\)"),
    "outputs that fill no int32": (gptq, dict(qweight=int32(12, 63)), r"\(12, 63\)"),
    "scales of fewer groups": (gptq, dict(scales=f16(2, 64)), r"\(3, 64\), got"),
    "scales of integers": (gptq, dict(scales=int32(3, 64)), "'scales' .*int32"),
    "zeros of more outputs": (gptq, dict(qzeros=int32(3, 9)), r"\(3, 8\), got"),
    "a short order": (gptq, dict(g_idx=int32(95)), r"\(96,\), got"),
    "groups out of range": (gptq, dict(g_idx=int32(96) + 3), "'g_idx' .*3 to 3"),
    "groups below zero": (gptq, dict(g_idx=int32(96) - 1), "'g_idx' .*-1 to -1"),
    "a zero out of range": (gptq, dict(qzeros=int32(3, 8) - 1), "'qzeros' .*16"),
    "5 bits": (gptq, dict(config={"bits": 5}), "bits .*2, 3, 4, 8, got 5"),
    "other bits": (gptq, dict(config={"bits": 8}), "'qweight'|'scales'"),
    "non-integer bits": (gptq, dict(config={"bits": 4.0}), "got 4.0"),
    "no group size": (gptq, dict(config={"group_size": None}), "-1, got None"),
    "a group size of 0": (gptq, dict(config={"group_size": 0}), "-1, got 0"),
    "an odd group size": (
        gptq,
        dict(config={"group_size": 33}),
        "'a.weight' of GPTQ: Int4: block_size must be",
    ),
    "a huge group size": (gptq, dict(config={"group_size": 2**40}), "got 1099511"),
    "another layout": (
        gptq,
        dict(config={"checkpoint_format": "marlin"}),
        "checkpoint_format .*'gptq', 'gptq_v2', got 'marlin'",
    ),
    "another packing dtype": (gptq, dict(config={"pack_dtype": "int8"}), "'int8'"),
    "another method": (
        gptq,
        dict(config={"quant_method": "other"}),
        "'a.qweight' .*GPTQ",
    ),
    "no method": (gptq, dict(config={"quant_method": None}), "quant_method"),
    "AWQ of GPTQ": (gptq, dict(config={"quant_method": "awq"}), "of AWQ"),
    "GPTQ of AWQ": (awq, dict(config={"quant_method": "gptq"}), "of GPTQ"),
    "AWQ for other kernels": (
        awq,
        dict(config={"version": "gemv"}),
        "version .*'gemv'",
    ),
    "AWQ of 3 bits": (awq, dict(config={"bits": 3}), "bits .*4, got 3"),
    "AWQ without zeros": (awq, dict(qzeros=None), "'qzeros'"),
    "AWQ of nothing": (awq, dict(qweight=int32(0, 8)), "'qweight' .*0"),
    "plain and quantized": (gptq, dict(weight=f16(64, 96)), "'a.weight'"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_parts(name, tmp_path):
    make, changes, message = INVALID[name]
    make(tmp_path, **changes)
    for decode in (False, True):
        with pytest.raises(ValueError, match=message) as raised:
            read(tmp_path, decode=decode)
        assert str(raised.value).startswith(str(tmp_path))


def test_missing_config_json(tmp_path):
    gptq(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"'qweight' .*config\.json"):
        read(tmp_path)
