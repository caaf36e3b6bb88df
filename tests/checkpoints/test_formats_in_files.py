"""Formats in files and indices of shards: valid and rejected values."""

import dataclasses
import json

import numpy as np
import pytest
from eqquant.checkpoints.files._source import read_index
from eqquant.checkpoints.leaves._formats import (
    format_from_json,
    format_to_json,
    known_formats,
)
from eqquant.formats import Int8


KNOWN = known_formats((), "load")


@dataclasses.dataclass(frozen=True)
class Mine(Int8):
    name = "mine"
    extra: object = None


@dataclasses.dataclass(frozen=True)
class Forgetful(Int8):
    """A format that does not equal a format with the same fields."""

    name = "forgetful"
    __eq__ = object.__eq__


@dataclasses.dataclass(frozen=True)
class Nameless(Int8):
    pass


def round_trip(format, known):
    return format_from_json(json.loads(json.dumps(format_to_json(format))), known)


def test_formats_of_the_user():
    known = known_formats([Mine], "load")
    for format, expected in (
        (Mine(extra=(1, (2.5, "a"), None, True)), None),
        (Mine(extra=np.float32(0.5)), Mine(extra=0.5)),
        (Mine(extra=np.int8(3)), Mine(extra=3)),
        (Mine(block_size=32, extra=np.dtype("float16")), None),
    ):
        found = round_trip(format, known)
        assert type(found) is Mine
        if format.extra == np.dtype("float16"):
            # It returns as a string, because the class does not declare a dtype.
            assert found.extra == "float16" and found.block_size == 32
            continue
        assert found == (expected or format)
    with pytest.raises(ValueError, match="'mine'.*formats="):
        round_trip(Mine(), KNOWN)


@pytest.mark.parametrize(
    "format, message",
    [
        (Mine(extra=[1]), r"Mine.*\[1\]"),
        (Nameless(), "Nameless.*'int8'.*`name`"),
        (Forgetful(), "Forgetful"),
    ],
)
def test_formats_that_cannot_be_saved(format, message):
    with pytest.raises(ValueError, match=message):
        format_to_json(format)


@pytest.mark.parametrize("more", [3, "nf4", str, Int8()])
def test_formats_must_be_classes(more, untyped):
    with pytest.raises(TypeError, match="load: formats"):
        known_formats([more], "load")


def test_two_formats_with_the_same_name():
    with pytest.raises(ValueError, match="load: formats: .*'int8'"):
        known_formats([Nameless], "load")


@pytest.mark.parametrize(
    "written, message",
    [
        (["int8"], "name and fields, got"),
        ({"name": "int8"}, "name and fields, got"),
        ({"name": 3, "fields": {}}, "format .*got 3"),
        ({"name": "mine", "fields": {"extra": {"a": 1}}}, "'a': 1"),
    ],
)
def test_invalid_json_of_a_format(written, message):
    with pytest.raises(ValueError, match=message):
        format_from_json(written, known_formats([Mine], "load"))


@pytest.mark.parametrize(
    "index, message",
    [
        (None, "index.json: no such file"),
        ([], "index"),
        ({}, "weight_map"),
        ({"weight_map": {}, "metadata": []}, "weight_map"),
        (
            {"weight_map": {"w": "../a.safetensors"}},
            "weight_map: 'w' .*'../a.safetensors'",
        ),
        ({"weight_map": {}, "metadata": {"eqquant": 3}}, "eqquant .*got 3"),
    ],
)
def test_invalid_indices(index, message, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    if index is not None:
        path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        read_index(path)


def test_a_huge_index_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # Sparse, so it takes no space on the disk.
    with pytest.raises(ValueError, match="index.json: .*100000000"):
        read_index(path)
