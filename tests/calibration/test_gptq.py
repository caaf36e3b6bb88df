"""GPTQ against a reference, and against rounding to nearest."""

import dataclasses
import functools as ft
import itertools
import operator

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.calibration import _gptq, _search
from eqquant.calibration._gptq import inverse_factor
from eqquant.calibration._search import searched
from eqquant.kernels import cpu
from helpers import assert_identical, DEFAULT_FORMATS, slow, unpacked


def correlated(rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Return realistic inputs: a few directions contain most of the energy."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(size, size)) / np.arange(1, size + 1)[:, None]
    return (rng.normal(size=(rows, size)) @ directions).astype(np.float32)


def linear(out: int, size: int) -> eqx.nn.Linear:
    return eqx.nn.Linear(size, out, use_bias=False, key=jax.random.key(1))


def calibrated(model, x, format, **options):
    stats = eqquant.calibrate(lambda m, x: jax.vmap(m)(x), model, [x])
    return stats, eqquant.quantize_tree(model, format, calibration=stats, **options)


def loss(q, w, x) -> np.ndarray:
    """Return the squared error of each output over the data."""
    e = np.asarray(q.dequantize(), np.float64) - np.asarray(w, np.float64)
    return np.sum((np.asarray(x, np.float64) @ e.T) ** 2, 0)


@pytest.mark.parametrize(
    "format", [DEFAULT_FORMATS[0], *map(slow, DEFAULT_FORMATS[1:])]
)
def test_the_objective_falls_and_in_no_row_rises(format):
    model, x = linear(32, 128), correlated(256, 128)
    _, q = calibrated(model, x, format)
    plain = eqquant.quantize(model.weight, format)
    after, before = loss(q.weight, model.weight, x), loss(plain, model.weight, x)
    # Up to float32 rounding of the comparison.
    assert np.all(after <= before * (1 + 1e-4))
    assert after.sum() < 0.9 * before.sum()
    assert q.weight.format == format and q.weight.nbytes == plain.nbytes


def reference(w, gram, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes and scales by GPTQ in float64, from the explicit inverse."""
    w, size = np.array(w, np.float64), w.shape[1]
    inverse = np.linalg.inv(gram + 0.01 * np.mean(np.diagonal(gram)) * np.eye(size))
    codes, scales = np.zeros(w.shape, np.int8), []
    for i in range(size):
        if i % block == 0:
            scale = np.abs(w[:, i : i + block]).max(1) / 127
            scales.append(scale)
        codes[:, i] = np.clip(np.rint(w[:, i] / scale), -127, 127)
        error = (w[:, i] - codes[:, i] * scale) / inverse[i, i]
        w[:, i:] -= error[:, None] * inverse[i, i:]
        # The inverse of the remaining matrix.
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return codes, np.stack(scales, 1)


@pytest.mark.slow
def test_codes_are_those_of_a_reference():
    x = correlated(256, 64)
    model = linear(16, 64)
    _, q = calibrated(model, x, eqquant.Int8(block_size=32))
    x = x.astype(np.float64)
    codes, scales = reference(model.weight, x.T @ x, 32)
    np.testing.assert_allclose(q.weight.scales, scales, rtol=1e-4)
    # Except where float32 and float64 are on different sides of a tie.
    assert np.mean(unpacked(q.weight) == codes) > 0.98
    assert np.max(np.abs(unpacked(q.weight).astype(int) - codes)) <= 1


def test_the_factor_is_that_of_the_inverse():
    x = correlated(300, 200).astype(np.float64)
    gram = x.T @ x
    factor = inverse_factor(gram)
    is_heavy = np.diagonal(gram).max() > 100 * np.median(np.diagonal(gram))
    damping = (0.1 if is_heavy else 0.01) * np.mean(np.diagonal(gram))
    product = factor.T @ factor @ (gram + damping * np.eye(200))
    np.testing.assert_allclose(product, np.eye(200), atol=1e-8)
    np.testing.assert_array_equal(factor, np.triu(factor))


def with_gram(stats, gram):
    return eqx.tree_at(lambda s: s.weights["weight"].gram, stats, jnp.asarray(gram))


def test_grams_that_are_not_positive_definite():
    """For example, from statistics that were rounded or merged by other code."""
    rng = np.random.default_rng(0)
    gram = rng.normal(size=(64, 64)).astype(np.float32)
    gram += gram.T
    gram[3] = gram[:, 3] = 0
    factor = inverse_factor(gram)
    assert np.all(np.isfinite(factor)) and np.all(np.diagonal(factor) > 0)
    model, x = linear(16, 64), correlated(128, 64)
    stats, _ = calibrated(model, x, "nf4")
    q = eqquant.quantize_tree(model, "nf4", calibration=with_gram(stats, gram))
    assert np.all(np.isfinite(q.weight.dequantize()))
    for wrong in (np.nan, np.inf):
        gram[0, 1] = wrong
        with pytest.raises(ValueError, match="Gram matrix of 'weight' is not"):
            eqquant.quantize_tree(model, "nf4", calibration=with_gram(stats, gram))


def test_weights_with_equal_inputs_share_a_factorisation(monkeypatch):
    count = []
    once = lambda gram: count.append(1) or inverse_factor(gram)
    monkeypatch.setattr(_gptq, "inverse_factor", once)
    model, x = {"q": linear(16, 64), "v": linear(8, 64)}, correlated(128, 64)
    run = lambda m, x: (jax.vmap(m["q"])(x), jax.vmap(m["v"])(x))
    stats = eqquant.calibrate(run, model, [x])
    both = eqquant.quantize_tree(model, "nf4", calibration=stats)
    assert len(count) == 1
    alone = eqquant.quantize_tree(model, None, rules={"v.*": "nf4"}, calibration=stats)
    assert len(count) == 2
    assert_identical(both["v"].weight, alone["v"].weight)


def test_a_wide_search_finds_the_best_rounding():
    """Compare with all combinations of levels, in float64."""
    rng, width, format = np.random.default_rng(0), 5, eqquant.NF2()
    columns = rng.normal(size=(width, 6)).astype(np.float32)
    scales = rng.uniform(1, 2, 6).astype(np.float32)
    scales[0] = -scales[0]
    x = rng.normal(size=(64, width)) + rng.normal(size=(64, 1))
    factor = inverse_factor(x.T @ x)
    inverse = np.linalg.inv(factor)  # Errors are weighted by `inverse @ inverse.T`.
    args = map(jnp.asarray, (columns, scales, factor.astype(np.float32)))
    values, errors, _ = searched(*args, format, 2**width)
    levels = np.array(list(itertools.product(format.codebook, repeat=width)))
    for i in range(6):
        every = np.sum(((columns[:, i] - levels * scales[i]) @ inverse) ** 2, -1)
        found = np.sum(((columns[:, i] - values[:, i]) @ inverse) ** 2)
        assert found <= min(every) * (1 + 1e-5)  # The values are float32.
        np.testing.assert_allclose(np.sum(errors[:, i] ** 2), found, rtol=1e-4)


@pytest.mark.parametrize(
    "format", ["nf3", slow("int4"), slow(eqquant.NF4(double_quantization=True))]
)
def test_a_search_reduces_the_objective(format):
    model, x = linear(32, 72), correlated(256, 72)
    stats, greedy = calibrated(model, x, format)
    q = eqquant.quantize_tree(model, format, calibration=stats, search=8)
    before, after = (loss(m.weight, model.weight, x).sum() for m in (greedy, q))
    assert after < 0.95 * before
    assert jax.tree.structure(q) == jax.tree.structure(greedy)
    with pytest.raises(ValueError, match="search must be from 1"):
        eqquant.quantize_tree(model, format, calibration=stats, search=0)


@pytest.mark.parametrize("format", ["int8", slow("nf4"), slow("int4")])
def test_where_inputs_are_independent_it_is_plain_rounding(format):
    model = linear(16, 64)
    _, q = calibrated(model, np.eye(64, dtype=np.float32), format)
    assert_identical(q.weight, eqquant.quantize(model.weight, format))


@pytest.mark.slow
def test_inputs_that_never_occur():
    model, x = linear(16, 64), correlated(128, 64)
    x[:, 5:20] = 0
    _, q = calibrated(model, x, "nf4")
    assert np.all(np.isfinite(q.weight.dequantize()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "format",
    [
        eqquant.NF4(block_size=32),  # A partial last block.
        slow(eqquant.NF4(double_quantization=True)),
        slow(eqquant.NF2(double_quantization=True, block_size=32)),
        slow(eqquant.NVFP4()),
        slow(eqquant.MXFP4()),
        slow(eqquant.NF4(scale_dtype="bfloat16")),
        slow(eqquant.Int8()),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_other_scales_and_shapes(format, dtype):
    model, x = linear(16, 72), correlated(256, 72)
    model = jax.tree.map(lambda w: w.astype(dtype), model)
    stats, q = calibrated(model, x, format)
    row, *_ = eqquant.report(q, model, calibration=stats).rows
    assert row.output_error < 0.95 * row.rounded_output_error
    assert q.weight.dtype == dtype
    plain = eqquant.quantize(model.weight, format)
    assert jax.tree.structure(q.weight) == jax.tree.structure(plain)


@pytest.mark.slow
def test_every_matrix_of_a_stack_has_its_own_data():
    keys = jax.random.split(jax.random.key(0), 2)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 16, key=key))(keys)
    xs = np.stack([correlated(128, 64), correlated(128, 64, seed=1)])
    run = lambda stack, xs: eqx.filter_vmap(lambda m, x: jax.vmap(m)(x))(stack, xs)
    stats = eqquant.calibrate(run, stack, [xs])
    q = eqquant.quantize_tree(stack, "nf4", calibration=stats).weight
    for i in range(2):
        single = jax.tree.map(operator.itemgetter(i), stack)
        _, alone = calibrated(single, xs[i], "nf4")
        assert np.mean(unpacked(q[i]) == unpacked(alone.weight)) > 0.98


def test_a_format_without_nearest_is_rounded_plainly():
    @dataclasses.dataclass(frozen=True, repr=False)
    class Own(eqquant.Int8):
        nearest = eqquant.formats.Format.nearest

        def encode(self, blocks, absmax, counts, limit):
            return eqquant.Int8().encode(blocks, absmax, counts, limit)

    model = linear(16, 64)
    for format in (Own(), eqquant.Int4(affine=True)):
        with pytest.warns(UserWarning, match="rounded plainly"):
            _, q = calibrated(model, correlated(64, 64), format)
        assert_identical(q.weight, eqquant.quantize(model.weight, format))


def decoded(codes, scales, format) -> np.ndarray:
    """Return the values of codes `(width, rows)` that a search found."""
    levels, codes, states = _search._levels(format), np.int64(codes), 0
    for age in range(format.history + 1):
        earlier = np.pad(codes, ((age, 0), (0, 0)))[: len(codes)]
        states = states + (earlier << format.code_bits * (format.history - age))
    return levels[states] * np.asarray(scales)


@pytest.mark.skipif(not cpu.searches(4), reason="there is no native search here")
@pytest.mark.parametrize(
    "format",
    [
        *(eqquant.formats.Trellis(bits=bits, block_size=40) for bits in (2, 3, 4)),
        *(eqquant.NF4(), eqquant.Int3(), eqquant.Binary()),
    ],
    ids=repr,
)
def test_the_native_search_finds_what_the_search_of_jax_finds(format, rng):
    columns = jnp.asarray(rng.standard_normal((40, 24)).astype(np.float32))
    scales = rng.uniform(1, 2, 24).astype(np.float32) * 2 / format.largest_level
    scales = jnp.asarray(scales)
    x = correlated(128, 40).astype(np.float64)
    factor = jnp.asarray(inverse_factor(x.T @ x), jnp.float32)
    native, errors, codes = jax.jit(ft.partial(searched, format=format, count=12))(
        columns, scales, factor
    )
    levels = _search._levels(format)
    in_jax = ft.partial(_search._search, format=format, levels=levels, count=12)
    values, expected, own = jax.jit(in_jax)(columns, scales, factor)
    np.testing.assert_allclose(decoded(own, scales, format), values, rtol=1e-6)
    np.testing.assert_allclose(decoded(codes, scales, format), native, rtol=1e-6)
    # The errors are the feedback of the values: the factor maps one to the other.
    difference = np.float64(columns) - np.float64(native)
    residual = np.float64(factor).T @ np.float64(errors) - difference
    assert np.abs(residual).max() < 1e-4 * np.abs(difference).max()
    loss, least = (np.sum(np.float64(e) ** 2, 0) for e in (errors, expected))
    if format.history:
        # Sums are rounded differently, so some rows keep other roundings.
        assert np.mean(np.isclose(loss, least, rtol=1e-4)) > 0.8
    # Without a history, the search in JAX tries only two levels for each value.
    assert loss.sum() < 1.05 * least.sum()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [2, slow(3), slow(4)])
def test_trellis_codes_of_partial_blocks_and_of_any_axis(bits, axis):
    """The codes of the search are stored without encoding the values again."""
    format = eqquant.formats.Trellis(bits=bits, block_size=40)
    w, x = np.asarray(linear(16, 72).weight), correlated(256, 72)
    model = {"w": jnp.asarray(w if axis else w.T)}
    run = lambda m, x: x @ (m["w"].T if axis else m["w"])
    rules = {"w": (format, axis)}
    stats = eqquant.calibrate(run, model, [x], rules=rules)
    q = eqquant.quantize_tree(model, rules=rules, calibration=stats)["w"]
    plain = eqquant.quantize(model["w"], format, axis=axis)
    assert jax.tree.structure(q) == jax.tree.structure(plain)
    transposed = lambda q: q if axis else q.T
    after, before = (loss(transposed(q), w, x) for q in (q, plain))
    assert np.all(after <= before * (1 + 1e-4)) and after.sum() < 0.9 * before.sum()


def test_the_native_search_of_rows_of_zeros_and_of_zero_scales():
    if not cpu.searches(2):
        pytest.skip("there is no native search here")
    format = eqquant.formats.Trellis(bits=2, block_size=8)
    columns = jnp.ones((8, 2)).at[:, 1].set(0)
    values, errors, _ = searched(columns, jnp.zeros(2), jnp.eye(8), format, 4)
    assert (
        (values == 0).all() and (errors[:, 0] == 1).all() and (errors[:, 1] == 0).all()
    )


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["search", "least_squares"])
def test_offsets_and_scales_are_fitted_to_the_data(fit):
    format = eqquant.Int3(affine=True, block_size=64, fit=fit)
    model, x = linear(24, 100), correlated(256, 100)
    # Inputs of very different magnitudes.
    x = x * np.geomspace(1, 0.01, 100, dtype=np.float32)
    _, q = calibrated(model, x, format)
    plain = eqquant.quantize(model.weight, format)
    new, old = loss(q.weight, model.weight, x), loss(plain, model.weight, x)
    assert np.all(new <= old * (1 + 1e-5))  # Float32 rounding of sums.
    assert new.sum() < 0.9 * old.sum()


def test_method_nearest_is_plain_rounding_and_the_report_has_both():
    model, x = linear(16, 64), correlated(128, 64)
    stats, q = calibrated(model, x, "nf4", method="nearest")
    assert_identical(q.weight, eqquant.quantize(model.weight, "nf4"))
    report = eqquant.report(q, model, calibration=stats)
    assert report.rows[0].output_error == report.rows[0].rounded_output_error
    assert "if rounded" in str(report) and "if rounded" not in str(eqquant.report(q))
