"""`distill`: training against the outputs of another model."""

import io
import pathlib

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_identical


KEY = jax.random.key(0)
LAYER = eqx.nn.Linear(16, 8, key=KEY)
RNG = np.random.default_rng(0)
# Correlated inputs, so that training can improve the model.
INPUTS = RNG.normal(size=(8, 32, 16)) @ RNG.normal(size=(16, 16))
BATCHES = list(INPUTS.astype(np.float32))
OPTIMISER = optax.adam(3e-3)
AFFINE = eqquant.Int2(affine=True, block_size=8, scale_dtype="bfloat16")


def forward(model, batch):
    return jax.vmap(model)(batch)


def error(model, teacher=LAYER, batches=BATCHES) -> float:
    """Return the relative squared error over all batches."""
    x = np.concatenate(batches)
    out, expected = forward(model, x), forward(teacher, x)
    return float(jnp.sum((out - expected) ** 2) / jnp.sum(expected**2))


def plain(format, **options):
    return eqquant.quantize_tree(LAYER, format, min_size=1, **options)


def fake(format, **how):
    return eqquant.FakeQuantized(LAYER, format, min_size=1, **how)


def distilled(student, batches=BATCHES, optimiser=OPTIMISER, fn=forward, **how):
    return eqquant.training.distill(student, LAYER, fn, batches, optimiser, **how)


@pytest.mark.parametrize("rotate", [False, True])
def test_scales_offsets_and_biases_are_trained_and_codes_stay(rotate):
    student = eqquant.quantize_tree(LAYER, AFFINE, min_size=1, rotate=rotate)
    out, state = distilled(student, 4 * BATCHES)
    assert error(out) < 0.9 * error(student)
    assert state.steps == 32
    before, after = (getattr(x.weight, "base", x.weight) for x in (student, out))
    assert_identical(after.codes, before.codes)
    assert after.scales.dtype == after.offsets.dtype == jnp.bfloat16
    assert (after.scales != before.scales).any()
    assert (after.offsets != before.offsets).any()
    assert (out.bias != student.bias).all()


def test_a_step_is_that_of_the_formulas():
    # The reference is float64 in NumPy. Products at "highest" have a float32 error of
    # about 1e-6.
    student = plain(eqquant.Int2(scale_dtype="float32"), precision="highest")
    out, state = distilled(student, BATCHES[:1], optax.sgd(0.5))
    x = BATCHES[0].astype(np.float64)
    scales = np.asarray(student.weight.scales, np.float64)
    levels = np.asarray(student.weight.dequantize(), np.float64) / scales
    bias = np.asarray(student.bias, np.float64)
    expected = x @ np.asarray(LAYER.weight, np.float64).T + bias
    wrong = x @ (levels * scales).T + bias - expected
    power = (expected**2).sum()
    by_scale = (2 * wrong * (x @ levels.T) / power).sum(0)
    by_bias = (2 * wrong / power).sum(0)
    np.testing.assert_allclose(state.loss, (wrong**2).sum() / power, rtol=1e-5)
    new = scales[:, 0] - 0.5 * by_scale
    np.testing.assert_allclose(out.weight.scales[:, 0], new, rtol=1e-5)
    np.testing.assert_allclose(out.bias, bias - 0.5 * by_bias, rtol=1e-5, atol=1e-6)


def test_quantization_aware_training_gives_the_quantized_model():
    # Inputs of rank 8, for which many roundings of 64 weights are exact.
    layer = eqx.nn.Linear(64, 32, key=KEY)
    inputs = RNG.normal(size=(32, 32, 8)) @ RNG.normal(size=(8, 64))
    batches = list(inputs.astype(np.float32))
    student = eqquant.FakeQuantized(layer, "ternary")
    rate = optax.cosine_decay_schedule(3e-3, 32)
    out, state = eqquant.training.distill(
        student, layer, forward, batches, optax.adam(rate)
    )
    assert type(out) is eqx.nn.Linear
    assert out.weight.format == eqquant.Ternary()
    before = student.quantized()
    assert error(out, layer, batches) < error(before, layer, batches) / 3
    assert_identical(state.model(student), out)
    assert (out.weight.codes != before.weight.codes).any()


def by_equinox(state, like, path):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


def by_eqquant(state, like, path):
    eqquant.save(path, state)
    return eqquant.load(path, like=like)


@pytest.mark.parametrize(
    "student, stored",
    [
        (plain(AFFINE), by_equinox),
        (fake("ternary"), by_eqquant),
        (fake("ternary", learn_scales=True), by_equinox),
    ],
    ids=["codes stay", "ternary", "learned scales"],
)
def test_an_interrupted_run_goes_on_bit_for_bit(student, stored, tmp_path):
    whole = distilled(student)
    _, state = distilled(student, BATCHES[:3])
    like = eqquant.training.DistillationState(student, OPTIMISER)
    path: pathlib.Path = tmp_path / "state.safetensors"
    state = stored(state, like, path)
    assert state.steps == 3
    assert_identical(distilled(student, iter(BATCHES[3:]), state=state), whole)
    assert like.steps == 0 and like.loss == 0  # A NaN would stop `debug_nans`.


def test_steps_smaller_than_bfloat16_resolves_add_up():
    student = plain(eqquant.Int8(scale_dtype="bfloat16"))
    shrink = lambda outputs, expected: 0.5 * jnp.mean(outputs**2)
    rate = 1e-3 * float(student.weight.scales.max())
    descent = optax.chain(optax.scale_by_sign(), optax.scale(-rate))
    out, _ = distilled(student, 2 * BATCHES, descent, loss=shrink)
    # 16 steps change a bfloat16 scale by 2 to 4 units in the last place; one step
    # changes it by at most a quarter.
    assert (out.weight.scales < student.weight.scales).all()


def test_where():
    student = plain("int2")
    where = eqx.tree_at(lambda m: m.bias, jax.tree.map(lambda _: False, student), True)
    out, state = distilled(student, where=where)
    assert_identical(out.weight, student.weight)
    assert (out.bias != student.bias).all()
    assert len(jax.tree.leaves(state.trained)) == 1


def test_a_teacher_of_another_structure_and_outputs_of_several_kinds():
    teacher = eqx.nn.MLP(16, 8, 12, 1, key=KEY)

    def fn(model, batch):
        return {"out": forward(model, batch), "tokens": jnp.arange(3), "name": "a"}

    def loss(outputs, expected):
        assert outputs["name"] == "a"
        return jnp.mean(optax.huber_loss(outputs["out"], expected["out"]))

    for how in {}, {"loss": loss}:
        student = plain("int2")
        first = eqquant.training.distill(
            student, teacher, fn, BATCHES[:1], OPTIMISER, **how
        )
        last = eqquant.training.distill(
            student, teacher, fn, 4 * BATCHES, OPTIMISER, **how
        )
        assert last[1].loss < first[1].loss


def test_progress(capsys):
    distilled(plain("int2"), BATCHES[:2], progress=True)
    assert "distilling: 100%" in capsys.readouterr().err


def sums(model, batch):
    return forward(model, batch).sum(1 if hasattr(model.weight, "codes") else 0)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"batches": []}, "at least one batch, got none"),
        ({"where": lambda x: False}, "nothing is trained"),
        ({"student": jnp.arange(3)}, "nothing is trained"),
        ({"fn": lambda model, batch: None}, "must return floating-point arrays"),
        (
            {"fn": sums},
            r"same shapes .* got .*\[\(32,\)\].* and .*\[\(8,\)\]",
        ),
        ({"batches": [BATCHES[0], BATCHES[1] * np.nan]}, "batch 1 has the loss nan"),
        ({"optimiser": optax.sgd(1e30)}, "lower the learning rate"),
        (
            {"state": eqquant.training.DistillationState(plain("int3"), OPTIMISER)},
            "state belongs to another student",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input(how, message):
    how = {"student": plain("int2")} | how
    with pytest.raises(ValueError, match=f"distill: .*{message}"):
        distilled(**how)


def test_bad_types():
    student = plain("int2")
    with pytest.raises(TypeError, match=r"a real number, got float32\[32, 8\]"):
        distilled(student, loss=lambda outputs, expected: outputs)
    with pytest.raises(Exception, match="optimiser"):
        distilled(student, optimiser=1e-3)
