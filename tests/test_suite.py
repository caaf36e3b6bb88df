"""What the suite rests on: pairs of options, and programs that are kept."""

import importlib.metadata
import itertools

import jax
import pytest
from eqquant.kernels.cpu import _library
from helpers import pairs
from programs import cache_key


def test_every_pair_of_options_is_there_and_every_option_is_fast():
    options = ["abcd", range(3), [True, False], "xy"]
    cases = pairs("a, b, c, d", *options).args[1]
    assert len(cases) < 16  # Of 48.
    fast = [case.values for case in cases if not case.marks]
    assert len(fast) == 4
    for column, values in enumerate(options):
        assert {row[column] for row in fast} == set(values)
    for (i, first), (j, second) in itertools.combinations(enumerate(options), 2):
        met = {(case.values[i], case.values[j]) for case in cases}
        assert met == set(itertools.product(first, second))


def test_marks_of_an_option_stay():
    (param,) = pairs("a, b", [pytest.param(1, marks=pytest.mark.skip)], [2]).args[1]
    assert param.values == (1, 2) and param.marks[0].name == "skip"


def test_programs_are_kept_for_one_library_and_one_jax(monkeypatch, tmp_path):
    before = cache_key()
    assert before == cache_key() != cache_key(True)
    with monkeypatch.context() as context:
        (tmp_path / "other.so").write_bytes(b"other")
        context.setattr(_library, "library", tmp_path / "other.so")
        assert cache_key() != before
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    assert cache_key() != before


def test_a_change_is_compiled_anew():
    """Of the same name, on the same line, with the same shapes."""
    for factor in (2.0, 3.0):
        jax.clear_caches()
        assert jax.jit(lambda x: x * factor)(5.0) == 5.0 * factor  # noqa: B023


def test_programs_share_a_context_of_mlir():
    modules = [jax.jit(fn).lower(5.0).compiler_ir() for fn in (abs, lambda x: x + 1)]
    first, second = (module.context for module in modules)
    assert first == second
