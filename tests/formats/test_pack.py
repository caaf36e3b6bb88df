"""Packing of codes into bytes."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.formats._pack import (
    from_plane_order,
    group_multiple,
    num_bytes,
    num_codes,
    pack,
    planes_of,
    to_plane_order,
    unpack,
    unpack_planes,
)


BITS = [1, 2, 4]
EVERY = [*BITS, 3, 5, 6]


def codes_of(bits: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**bits, shape).astype(np.uint8)


@pytest.mark.parametrize("bits", EVERY)
def test_a_byte_is_full(bits):
    packed = pack(jnp.asarray(codes_of(bits, 3, 5, 64)), bits)
    assert packed.shape == (3, 5, 64 * bits // 8)
    assert packed.dtype == jnp.uint8


def test_nibbles_are_the_two_halves_of_a_group():
    codes = codes_of(4, 1, 64)
    packed = np.asarray(pack(jnp.asarray(codes), 4))
    assert (packed & 15 == codes[:, :32]).all()
    assert (packed >> 4 == codes[:, 32:]).all()


@pytest.mark.parametrize("bits", BITS)
def test_plane_p_holds_the_pth_run_of_a_group(bits):
    codes = codes_of(bits, 2, 64)
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    runs = codes.reshape(2, planes_of(bits), -1)
    for plane in range(planes_of(bits)):
        assert (packed >> (plane * bits) & (2**bits - 1) == runs[:, plane]).all()


@pytest.mark.parametrize("bits, low", [(3, 2), (5, 4), (6, 4)])
def test_codes_with_two_parts(bits, low):
    """The low bits of all codes of a group are before the high bits."""
    codes = codes_of(bits, 5, 64)
    packed = np.asarray(pack(jnp.asarray(codes), bits))
    assert packed.shape == (5, 8 * bits)
    parts = pack(codes % 2**low, low), pack(codes >> low, bits - low)
    assert (packed == np.concatenate(parts, -1)).all()
    assert (pack(codes, bits) == packed).all()  # NumPy only.


@hypothesis.settings(max_examples=8)
@hypothesis.given(
    bits=st.sampled_from(EVERY),
    lead=st.sampled_from([(), (3,), (2, 0), (2, 1)]),
    groups=st.sampled_from([0, 1, 4]),
    bytes_per_group=st.sampled_from([1, 3, 8]),
)
def test_unpack_inverts_pack(bits, lead, groups, bytes_per_group):
    group = bytes_per_group * group_multiple(bits)
    size = num_bytes(group, bits)
    assert num_codes(size, bits) == group
    codes = codes_of(bits, *lead, groups, group)
    packed = pack(jnp.asarray(codes), bits).reshape(*lead, groups * size)
    assert (unpack(packed, bits, group) == codes.reshape(*lead, groups * group)).all()


@pytest.mark.parametrize("bits", [*EVERY, 8])
def test_plane_order_is_the_order_in_which_bytes_decode(bits):
    codes = jnp.asarray(codes_of(bits, 2, 3, 64))
    flat = codes.reshape(2, 192)
    packed = pack(codes, bits).reshape(2, -1)
    planes = unpack_planes(packed, bits, 64)
    assert planes.shape == (2, planes_of(bits), 192 // planes_of(bits))
    assert (planes.reshape(2, 192) == to_plane_order(flat, bits, 64)).all()
    assert (from_plane_order(planes.reshape(2, 192), bits, 64) == flat).all()
