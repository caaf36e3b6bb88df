"""The contract of subclasses of `ImplicitArray`."""

import ast
import inspect
import textwrap

import pytest
from eqquant.arrays._implicit import ImplicitArray
from eqquant.arrays._parts import ArrayInParts


def test_what_has_no_body_must_be_defined():
    empty = set()
    for cls in (ImplicitArray, ArrayInParts):
        (declared,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(declared, ast.ClassDef)
        empty |= {
            member.name
            for member in declared.body
            if isinstance(member, ast.FunctionDef)
            and all(isinstance(x, ast.Expr) for x in member.body)  # A docstring.
        }
    assert ImplicitArray.__abstractmethods__ == empty

    class Unfinished(ImplicitArray):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Unfinished()
