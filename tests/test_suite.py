"""Tests of the test helpers: pairs of options, and the program cache."""

import importlib.metadata
import itertools

import jax
import pytest
from eqquant.kernels.cpu import _library
from helpers import pairs
from programs import cache_key


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
