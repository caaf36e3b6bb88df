"""Errors of public functions about their arguments: each names the argument, its value,
the accepted values, and a way out, on one line."""

import dataclasses
import re
import warnings

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DEFAULT_FORMATS


W = jnp.ones((64, 64))
MODEL = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
QUANTIZED = eqquant.quantize_tree(MODEL)
OTHER = eqx.nn.MLP(64, 64, 32, 1, key=jax.random.key(0))
X = jnp.ones((128, 64))


def fn(model, x):
    return jax.vmap(model)(x)


@pytest.fixture(scope="module")
def stats():
    return eqquant.calibrate(fn, MODEL, [X])


def allocated(stats, budget=40_000, formats=("nf4", "int8"), model=MODEL):
    return eqquant.allocate(model, budget, formats, stats)


# The call, and the texts in its error, in this order: argument, value, accepted, way
# out.
CALLS = {
    "a class of a format": (
        lambda _: eqquant.quantize(W, eqquant.NF4),
        ("quantize: format is the class NF4", "a format such as", "mean `NF4()`?"),
    ),
    "a dtype": (
        lambda _: eqquant.quantize(W, jnp.int8),
        ("quantize: format is the class int8", "a format", "a name such as 'int8'"),
    ),
    "a class for a model": (
        lambda _: eqquant.quantize_tree(MODEL, eqquant.Int8),
        ("quantize_tree: format is the class Int8", "a format", "mean `Int8()`?"),
    ),
    "a class in a rule": (
        lambda _: eqquant.quantize_tree(MODEL, rules={"*": eqquant.Int8}),
        ("format is the class Int8", "a format", "mean `Int8()`?"),
    ),
    "an unknown format": (
        lambda _: eqquant.quantize(W, "NF4 "),
        ("quantize: format is 'NF4 '", "'nf3', 'nf4'", "Did you mean 'nf4'?"),
    ),
    "twice": (
        lambda _: eqquant.quantize(eqquant.quantize(W)),
        (
            "array is a float32 QuantizedArray of shape (64, 64)",
            "an array",
            "quantized already. Dequantize it first",
        ),
    ),
    "a list": (
        lambda _: eqquant.quantize([[1.0, 2.0]]),
        ("quantize: array is the list [[1.0, 2.0]]", "an array", "`jnp.asarray`"),
    ),
    "a number": (
        lambda _: eqquant.quantize(1.5),
        ("quantize: array is 1.5", "an array"),
    ),
    "a model instead of an array": (
        lambda _: eqquant.quantize(MODEL),
        ("quantize: array is an MLP", "an array", "`_tree`"),
    ),
    "an abstract array": (
        lambda _: eqquant.quantize(jax.ShapeDtypeStruct((4, 64), "float32")),
        ("array is a float32 abstract array of shape (4, 64)", "`jax.eval_shape`"),
    ),
    "a shape of scales": (
        lambda _: eqquant.quantize(W, scales=np.ones((64, 1), np.float32)),
        ("scales is a float32 array of shape (64, 1)", "array (*lead, blocks) or None"),
    ),
    "an axis": (
        lambda _: eqquant.quantize(W, axis="rows"),
        ("quantize: axis is 'rows'", "an int or a sequence of int"),
    ),
    "a budget with a fraction": (
        lambda stats: allocated(stats, 40_000.5),
        ("allocate: budget is 40000.5", "a whole number of bytes"),
    ),
    "a budget that is not a number": (
        lambda stats: allocated(stats, float("nan")),
        ("allocate: budget is nan", "a whole number of bytes"),
    ),
    "a budget without a limit": (
        lambda stats: allocated(stats, float("inf")),
        ("allocate: budget is inf", "a whole number of bytes"),
    ),
    "a budget in words": (
        lambda stats: allocated(stats, "1 GB"),
        ("allocate: budget is '1 GB'", "an int or a float"),
    ),
    "one format for formats": (
        lambda stats: allocated(stats, formats="nf4"),
        ("allocate: formats is 'nf4'", "a sequence of formats", "Pass ['nf4']"),
    ),
    "one instance for formats": (
        lambda stats: allocated(stats, formats=eqquant.NF4()),
        ("formats is NF4(block_size=64)", "a sequence of", "Pass a list"),
    ),
    "a class in a list of formats": (
        lambda stats: allocated(stats, formats=[eqquant.NF4]),
        (
            "formats is the list [<class 'eqquant.NF4",
            "of Format or str",
            "mean `NF4()`?",
        ),
    ),
    "a model for statistics": (
        lambda _: allocated(MODEL),
        ("allocate: stats is an MLP", "the result of `eqquant.calibrate`"),
    ),
    "batches for statistics": (
        lambda _: eqquant.quantize_tree(MODEL, calibration=[X]),
        ("calibration is a list", "the result of `eqquant.calibrate` or None"),
    ),
    "a rule for biases": (
        lambda _: eqquant.quantize_tree(MODEL, rules={"*.bias": "int8"}),
        ("the rule '*.bias'", "layers.0.bias (a bias)", "exact path 'layers.0.bias'"),
    ),
    "a list of rules": (
        lambda _: eqquant.quantize_tree(MODEL, rules=["*.bias"]),
        ("rules is the list ['*.bias']", "a mapping or None"),
    ),
    "a rule without a match": (
        lambda _: eqquant.quantize_tree(MODEL, rules={"layer.*": "int8"}),
        ("match nothing: ['layer.*']", "Paths look like 'layers.0.weight'"),
    ),
    "swapped arguments": (
        lambda _: eqquant.calibrate(MODEL, fn, [X]),
        ("fn is an MLP and model is the function fn", "`calibrate(fn, model, "),
    ),
    "a format before the array": (
        lambda _: eqquant.quantize("nf4", W),
        ("Are format and array swapped?", "`quantize(array, format)`"),
    ),
    "a model after batches": (
        lambda _: eqquant.calibrate(fn, [X], MODEL),
        (
            "calibrate: batches is an MLP",
            "an iterable",
            "Are model and batches swapped?",
            "`calibrate(fn, model, batches)`",
        ),
    ),
    "one batch": (
        lambda _: eqquant.calibrate(fn, MODEL, X),
        (
            "calibrate: batches is a float32 array of shape (128, 64)",
            "a list",
            "Pass `[batch]`",
        ),
    ),
    "one batch with names": (
        lambda _: eqquant.report(QUANTIZED, MODEL, fn=fn, batches={"x": X}),
        ("report: batches is a dict", "a list", "Pass `[batch]`"),
    ),
    "another model": (
        lambda _: eqquant.report(QUANTIZED, OTHER),
        (
            "original must be",
            "layers.0.weight has the shape (64, 64) in model and (32, 64) in original",
            "Pass the model that `quantize_tree` was given",
        ),
    ),
    "a model of another structure": (
        lambda _: eqquant.report(QUANTIZED, MODEL.layers[0]),
        ("original must be", "layers.0.weight is in model only", "Pass the model"),
    ),
    "a function instead of a model": (
        lambda _: eqquant.report(fn),
        ("report: model is the function fn", "a pytree with floating-point arrays"),
    ),
    "swapped models": (
        lambda _: eqquant.report(MODEL, QUANTIZED),
        ("original has quantized arrays", "swapped", "report(quantized, original)"),
    ),
    "a policy": (
        lambda _: eqquant.quaxify(fn, on_materialise="no"),
        ("on_materialise is 'no'", "one of ('allow', 'warn', 'error')"),
    ),
    "a rank": (
        lambda _: eqquant.lora_tree(MODEL, 8.0, key=jax.random.key(0)),
        ("lora_tree: rank is 8.0", "an int", "Did you mean 8?"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_name_argument_value_accepted_and_way_out(name, stats):
    call, texts = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((TypeError, ValueError, UserWarning)) as caught:
            call(stats)
    message = str(caught.value)
    assert re.search(".*".join(map(re.escape, texts)), message), message
    assert len(message) < 400 and "\n" not in message


def test_missing_and_unknown_arguments(stats):
    with pytest.raises(TypeError, match=r"^allocate: .*'formats'.*\(model, budget, fo"):
        eqquant.calibration.allocate(MODEL, 20_000, stats=stats)  # pyright: ignore
    with pytest.raises(TypeError, match=r"^quantize: .*'block'.*format, axis"):
        eqquant.quantize(jnp.ones(64), block=32)  # pyright: ignore


def test_a_whole_number_of_bytes_may_be_a_float(stats):
    assert allocated(stats, 4e4).budget == 40_000
    assert allocated(stats, 4e4).within(3e4).budget == 30_000


def encode(self, blocks, absmax, counts, limit):
    del counts, limit
    return (jnp.abs(blocks) > 0.75 * absmax[..., None]).astype(jnp.uint8), absmax


def two_bits(self, *args):
    return encode(self, *args)[0] + 2, args[1]


# The fields of a format of two levels, and the texts in the error.
FORMATS = {
    "bits": ({"bits": 7}, "bits is 7, but must be one of"),
    "table": ({"codebook": (0.5, 1.0, 2.0)}, "codebook has 3 levels, but must have 2"),
    "no table": ({"codebook": None}, "neither a codebook nor a method levels"),
    "text": ({"codebook": "ab"}, "codebook must be a tuple of numbers, got 'ab'"),
    "name": ({"name": None}, "name is None, but must be a str"),
    "padding": ({"padding_code": 2}, "padding_code is 2, but must be up to 1"),
    "no levels": (
        {"levels": lambda *args: None},
        "levels is None, but must be an array",
    ),
    "largest level": (
        {"codebook": (0.5, 3.0)},
        "magnitude 3.0, but largest_level is 1",
    ),
    "integer levels": ({"integer_levels": True}, "some levels are not integers"),
    "one value": (
        {"encode": lambda self, *args: encode(self, *args)[0]},
        r"encode returned one value, but must return \(codes, scales\)",
    ),
    "float codes": (
        {"encode": lambda self, *args: (args[0], args[1])},
        "codes of encode has the dtype float32 .* must have an integer dtype",
    ),
    "shape of codes": (
        {"encode": lambda self, *args: (encode(self, *args)[0][..., :8], args[1])},
        r"codes of encode .* the shape \(3, 2, 8\), but must have .* \(3, 2, 32\)",
    ),
    "dtype of scales": (
        {
            "encode": lambda self, *args: (
                encode(self, *args)[0],
                args[1].astype("int32"),
            )
        },
        "scales of encode has the dtype int32 .* must have float32",
    ),
    "codes of two bits": (
        {"encode": two_bits},
        "encode returned codes from 2 to 3, but 1 bits hold 0 to 1",
    ),
    "shape of levels": (
        {"levels": lambda self, codes, dtype: codes[..., None].astype(dtype)},
        r"levels .* the shape \(2, 1\), but must have float32 and \(2,\)",
    ),
}


def format_with(**fields) -> eqquant.formats.Format:
    own = {"name": "halves", "bits": 1, "codebook": (0.5, 1.0), "encode": encode}
    cls = type("Halves", (eqquant.formats.Format,), {**own, **fields})
    return dataclasses.dataclass(frozen=True, repr=False)(cls)(32)


@pytest.mark.parametrize("bits", [0, -1, 4.0, "4"])
def test_bits_of_a_format_are_a_positive_integer(bits):
    with pytest.raises(TypeError, match=f"Halves: bits must be .* got {bits!r}"):
        format_with(bits=bits)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_break_the_contract(name):
    fields, message = FORMATS[name]
    with pytest.raises(TypeError, match=f"Halves.*{message}.*The contract: `encode`"):
        jax.jit(lambda w: eqquant.quantize(w, format_with(**fields)))(W)


def test_formats_that_are_not_complete():
    weight = jnp.ones((4, 64))
    cls = type("Half", (eqquant.formats.Format,), {"name": "half", "bits": 1})
    with pytest.raises(
        TypeError, match=r"Half is no.*not define encode.*`encode\(self"
    ):
        cls()
    encode = type(format_with()).encode
    own = {"encode": encode, "codebook": (0, 1)}
    for other, message in [
        ("bits", "name is None, but must be a str"),
        ("name", "bits must be a positive integer, got None"),
    ]:
        value = {"bits": 1, "name": "half"}[other]
        cls = type("Half", (eqquant.formats.Format,), {**own, other: value})
        with pytest.raises(TypeError, match=message):
            eqquant.quantize(weight, cls())


def test_a_format_that_keeps_the_contract():
    values = eqquant.quantize(W, format_with()).dequantize()
    np.testing.assert_array_equal(values, 1)


@pytest.mark.parametrize("format", DEFAULT_FORMATS, ids=repr)
def test_our_formats_keep_the_contract(format):
    class Other(type(format)):
        pass

    eqquant.formats.check_contract(Other(**vars(format)))
