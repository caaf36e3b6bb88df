"""The public names: modules, pickles and exceptions."""

import ast
import pathlib
import pickle

import eqquant
import pytest
from eqquant.formats import _contract
from public import public_names


PACKAGE = pathlib.Path(eqquant.__file__).parent
NAMES = public_names()


@pytest.mark.parametrize("path", NAMES)
def test_the_module_of_a_name_is_public(path):
    module, _, name = path.rpartition(".")
    value = NAMES[path]
    assert (value.__module__, value.__qualname__) == (module, name)
    assert pickle.loads(pickle.dumps(value)) is value


def test_exceptions_and_warnings_are_public():
    """Exceptions with other names never leave the library."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Warning"))
    }
    assert "MaterialiseError" in classes
    assert classes <= {path.rpartition(".")[2] for path in NAMES}


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_formats_of_eqquant_need_no_contract_check(name, monkeypatch):
    """The check recognises them by their module, and takes longer than quantization."""
    monkeypatch.setattr(_contract, "problem_of", lambda format: "It was checked.")
    check_contract = _contract.check_contract.__wrapped__
    check_contract(eqquant.formats.as_format(name))
    own = type("Own", (eqquant.NF4,), {"__module__": "elsewhere"})
    with pytest.raises(TypeError, match="It was checked"):
        check_contract(own())
