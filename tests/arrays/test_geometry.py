"""The geometry of contractions: a pure function of shapes and axes."""

import itertools
import math

import numpy as np
from eqquant.arrays.quantized._geometry import geometry
from hypothesis import given, settings, strategies as st


def merged_shape(shape, counts):
    sizes = iter(shape)
    return [math.prod(itertools.islice(sizes, count)) for count in counts]


def contract(w, x, blocked, over, batch, padding):
    """Contract two NumPy arrays as the geometry describes."""
    g = geometry(w.shape, x.shape, blocked, over, batch, padding)
    lead = [axis for axis in range(w.ndim) if axis not in blocked]
    stored = w.transpose(*lead, *blocked).reshape(*(w.shape[i] for i in lead), -1)
    stored = np.pad(stored, [*[(0, 0)] * len(lead), (0, padding)], constant_values=7)
    stored = stored.transpose(g.weight_order)
    matrix = stored.reshape(merged_shape(stored.shape, g.weight_counts))
    x = x.transpose(g.x_order)
    if not g.contract_rows:
        x = x.reshape(merged_shape(x.shape, g.blocked_counts))
        x = np.pad(x, g.x_padding)
    x = x.reshape(merged_shape(x.shape, g.x_counts))
    out = x @ (matrix if g.contract_rows else matrix.swapaxes(-1, -2))
    out = out.reshape([size for shape in g.out_shapes for size in shape])
    if g.contract_rows:
        out = out[..., : g.size]
        out = out.reshape([size for shape in g.blocked_shapes for size in shape])
    return g, out.transpose(g.out_order)


def test_a_matrix_that_contracts_its_blocked_axis():
    g = geometry((6, 100), (5, 100), blocked=(1,), over=[(1, 1)], padding=28)
    assert not g.contract_rows
    assert (g.stack, g.tokens, g.rows, g.columns) == ((), (5,), (6,), ())
    assert g.weight_order == g.x_order == (0, 1)
    assert g.weight_counts == g.x_counts == (1, 1)
    assert g.x_padding == ((0, 0), (0, 28))
    assert g.out_shapes == ((5,), (6,)) and g.first_free == 1


def test_a_matrix_that_contracts_its_rows():
    g = geometry((6, 100), (6, 5), blocked=(1,), over=[(0, 0)], padding=28)
    assert g.contract_rows and g.x_order == (1, 0)
    assert g.out_shapes == ((5,), (128,)) and g.blocked_shapes == ((5,), (100,))
    # The padding is part of the merged axis, so this axis is not split.
    assert g.first_free is None


def test_heads_and_a_stack():
    # (experts, heads, out, in), contracted over its heads; the blocked axis is free.
    g = geometry((2, 3, 4, 64), (5, 2, 3), blocked=(3,), over=[(1, 2)], batch=[(0, 1)])
    assert g.contract_rows and g.stack == (2,) and g.tokens == (5,)
    assert (g.rows, g.columns, g.free) == ((3,), (4,), (4, 64))
    assert g.weight_order == (0, 1, 2, 3) and g.weight_counts == (1, 1, 2)
    assert g.x_order == (1, 0, 2) and g.x_counts == (1, 1, 1)
    assert g.free_axes == slice(2, None) and g.contracted_axes == slice(1, 2)
    assert g.first_free == 2


@st.composite
def contractions(draw):
    ndim = draw(st.integers(1, 5))
    shape = draw(st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim))
    axes = draw(st.permutations(range(ndim)))
    blocked = axes[: draw(st.integers(1, ndim))]
    lead = axes[len(blocked) :]
    num_batch = draw(st.integers(0, len(lead)))
    batch_axes, lead = lead[:num_batch], lead[num_batch:]
    over_axes = [*lead[: draw(st.integers(0, len(lead)))]]
    over_axes += blocked if draw(st.booleans()) else []
    over_axes = draw(st.permutations(over_axes))
    tokens = draw(st.lists(st.integers(1, 3), max_size=2))
    names = [*batch_axes, *over_axes, *(None for _ in tokens)]
    sizes = [*(shape[axis] for axis in (*batch_axes, *over_axes)), *tokens]
    order = draw(st.permutations(range(len(sizes))))
    place = {names[i]: place for place, i in enumerate(order)}
    over = [(axis, place[axis]) for axis in over_axes]
    batch = [(axis, place[axis]) for axis in batch_axes]
    x_shape = [sizes[i] for i in order]
    return shape, x_shape, blocked, over, batch, draw(st.integers(0, 2))


@given(contractions())
@settings(max_examples=300, deadline=None)
def test_the_same_as_einsum(contraction):
    shape, x_shape, blocked, over, batch, padding = contraction
    rng = np.random.default_rng(0)
    w, x = (rng.integers(-3, 4, size) for size in (shape, x_shape))
    _, got = contract(w, x, blocked, over, batch, padding)
    w_axes, x_axes = [*range(w.ndim)], [*range(10, 10 + x.ndim)]
    for i, j in (*over, *batch):
        x_axes[j] = i
    used = {axis for axis, _ in (*over, *batch)}
    out = [i for i, _ in batch]
    out += [i for i in x_axes if i >= 10]
    out += [i for i in w_axes if i not in used]
    np.testing.assert_array_equal(got, np.einsum(x, x_axes, w, w_axes, out))


@given(contractions())
@settings(max_examples=100, deadline=None)
def test_the_first_free_axis_is_the_first_in_storage(contraction):
    shape, x_shape, blocked, over, batch, padding = contraction
    g = geometry(shape, x_shape, blocked, over, batch, padding)
    if g.first_free is not None:
        assert g.out_order[g.first_free] == g.num_lead
        assert g.first_free >= g.num_lead
