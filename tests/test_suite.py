"""Tests of the test helpers: pairs of options, type checks, and the program cache."""

import dataclasses
import importlib.metadata
import itertools

import jax
import jaxtyping
import numpy as np
import pytest
from eqquant.kernels.cpu import _library
from helpers import pairs
from jaxtyping import Float
from programs import cache_key
from type_checks import checked


def test_pairs_contain_every_pair_and_every_fast_option():
    options = ["abcd", range(3), [True, False], "xy"]
    cases = pairs("a, b, c, d", *options).args[1]
    assert len(cases) < 16  # Out of 48.
    fast = [case.values for case in cases if not case.marks]
    assert len(fast) == 4
    for column, values in enumerate(options):
        assert {row[column] for row in fast} == set(values)
    for (i, first), (j, second) in itertools.combinations(enumerate(options), 2):
        met = {(case.values[i], case.values[j]) for case in cases}
        assert met == set(itertools.product(first, second))


def test_pairs_keep_pytest_marks():
    (param,) = pairs("a, b", [pytest.param(1, marks=pytest.mark.skip)], [2]).args[1]
    assert param.values == (1, 2) and param.marks[0].name == "skip"


def test_types_of_internal_functions(monkeypatch):
    array = lambda *shape: np.zeros(shape, np.float32)

    @checked
    def rows(
        x: Float[np.ndarray, "m n"], n: Float[np.ndarray, " n"], m=3
    ) -> Float[np.ndarray, " m"]:
        return array(m)

    @checked
    def items(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]):
        yield from zip(x, y, strict=False)

    @checked
    @dataclasses.dataclass
    class Pair:
        x: Float[np.ndarray, " n"]
        y: Float[np.ndarray, " n"]

    good = array(3, 2), array(2)
    assert rows(*good).shape == (3,)
    assert len(list(items(array(3), array(3)))) == 3 == Pair(array(3), array(3)).x.size
    wrong = [
        lambda: rows(array(3, 2), array(3)),  # Another size of the axis `n`.
        lambda: rows(*good, m=2),  # The result has another size of the axis `m`.
        lambda: rows(array(3, 2).astype(int), array(2)),
        lambda: rows(None, array(2)),
        lambda: list(items(array(3), array(2))),
        lambda: Pair(array(3), array(2)),
    ]
    for call in wrong:
        with pytest.raises(Exception, match="Type-check|violates type hint"):
            call()
    # Axes of one call do not affect another call.
    assert rows(array(1, 4), array(4), 1).shape == (1,)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert rows(*good, m=2).shape == (2,)


def test_cache_key_depends_on_library_and_jax(monkeypatch, tmp_path):
    before = cache_key()
    assert before == cache_key() != cache_key(True)
    with monkeypatch.context() as context:
        (tmp_path / "other.so").write_bytes(b"other")
        context.setattr(_library, "library", tmp_path / "other.so")
        assert cache_key() != before
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    assert cache_key() != before


def test_changed_function_is_recompiled():
    """Functions with the same name, line and shapes are distinct programs."""
    for factor in (2.0, 3.0):
        jax.clear_caches()
        assert jax.jit(lambda x: x * factor)(5.0) == 5.0 * factor  # noqa: B023


def test_programs_share_an_mlir_context():
    modules = [jax.jit(fn).lower(5.0).compiler_ir() for fn in (abs, lambda x: x + 1)]
    first, second = (module.context for module in modules)
    assert first == second
