"""Distillation of language models: logits, stored or in pieces, and short scales."""

import functools as ft

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eqquant.training import distill, kl_divergence, store_logits, StoredLogits
from helpers import assert_identical, slow


VOCABULARY = 50
TEACHER = eqx.nn.MLP(16, VOCABULARY, 32, 1, key=jax.random.key(0))
RNG = np.random.default_rng(0)
BATCHES = list(RNG.normal(size=(6, 2, 10, 16)).astype(np.float32))
# Gradients of float32 scales are not rounded.
INT2 = eqquant.Int2(scale_dtype="float32")
STUDENT = eqquant.quantize_tree(TEACHER, INT2, min_size=1)
OPTIMISER = optax.adam(3e-3)
# Float32 sums of products, in another order.
ROUNDING = 1e-5


def forward(model, batch):
    """Return 3 times the logits, `(2, 10, vocabulary)`."""
    return 3 * jax.vmap(jax.vmap(model))(batch)


def hidden(model, batch):
    return jax.vmap(jax.vmap(lambda x: jax.nn.relu(model.layers[0](x))))(batch)


def head(model, rows):
    return 3 * jax.vmap(model.layers[1])(rows)


def store(folder, batches=BATCHES, **how):
    return store_logits(folder, forward, TEACHER, batches, **({"k": 8} | how))


def distilled(
    teacher=TEACHER,
    batches=BATCHES,
    fn=forward,
    student=STUDENT,
    optimiser=OPTIMISER,
    **how,
):
    return distill(student, teacher, fn, batches, optimiser, **how)


def log_softmax(logits, temperature=1.0) -> np.ndarray:
    x = np.asarray(logits, np.float64).reshape(-1, VOCABULARY) / temperature
    return x - np.log(np.sum(np.exp(x), -1, keepdims=True))


#
# The divergence
#


def grouped(log_p, order, k):
    """Return probabilities of the first `k` outcomes in `order`, and of all others."""
    p = np.take_along_axis(np.exp(log_p), order, -1)
    return np.concatenate([p[:, :k], p[:, k:].sum(-1, keepdims=True)], -1)


@pytest.mark.parametrize("temperature", [slow(1.0), 2.5])
def test_the_divergence_equals_its_definition(temperature, tmp_path):
    outputs, expected = forward(STUDENT, BATCHES[0]), forward(TEACHER, BATCHES[0])
    log_q, log_p = (log_softmax(x, temperature) for x in (outputs, expected))
    whole = np.mean(np.sum(np.exp(log_p) * (log_p - log_q), -1))
    kl = ft.partial(kl_divergence, temperature=temperature)
    np.testing.assert_allclose(kl(outputs, expected), whole, ROUNDING, 1e-7)
    order = np.argsort(-log_p)
    least = 0.0
    for k in 1, 8, VOCABULARY:
        p, q = grouped(log_p, order, k), grouped(log_q, order, k)
        has = p > 0
        terms = p[has] * (np.log(p[has]) - np.log(q[has]))
        known = store(tmp_path / str(k), k=k, temperature=temperature).of(BATCHES[0])
        value, gradient = jax.value_and_grad(kl)(outputs, known)
        np.testing.assert_allclose(value, terms.sum() / len(p), ROUNDING, 1e-7)
        assert least < value <= whole + 1e-7 and jnp.isfinite(gradient).all()
        least = value
        # Equal predictions have no divergence and no gradient.
        value, gradient = jax.value_and_grad(kl)(expected, known)
        assert abs(value) < 1e-6 and jnp.max(jnp.abs(gradient)) < 1e-6
    np.testing.assert_allclose(least, whole, ROUNDING, 1e-7)


def test_a_tiny_rest_keeps_its_digits(tmp_path):
    # The probability of the rest is 1e-9: its difference from 1 has no digits.
    logits = jnp.zeros((1, VOCABULARY)).at[0, 3].set(25.0)
    fn = lambda model, batch: logits
    known = store_logits(tmp_path, fn, TEACHER, BATCHES[:1], k=1).of(BATCHES[0])
    rest = np.log(49) - 25
    np.testing.assert_allclose(known.log_probabilities[0, 1], rest, rtol=1e-6)


#
# Stored logits
#


def test_training_with_stored_logits_equals_training_with_the_model(tmp_path):
    logits = store(tmp_path, k=VOCABULARY)
    assert (logits.positions, logits.vocabulary) == (120, VOCABULARY)
    _, state = distilled(logits)
    _, expected = distilled(loss=kl_divergence)
    # Adam divides by the root of squared gradients, which amplifies rounding.
    trained = jax.tree.leaves(state.trained), jax.tree.leaves(expected.trained)
    for a, b in zip(*trained, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    kl = lambda model: kl_divergence(forward(model, BATCHES[0]), logits.of(BATCHES[0]))
    many, _ = distilled(logits, 10 * BATCHES)
    assert kl(many) < 0.7 * kl(STUDENT)
    assert state.steps == len(BATCHES)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_teacher_continues(tmp_path):
    def interrupted():
        yield from BATCHES[:2]
        raise KeyboardInterrupt

    store(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path / "parts", interrupted())
    for name, unfinished in (("indices.bin", b"123"), ("batches.txt", b"f00 40")):
        with (tmp_path / "parts" / name).open("ab") as file:
            file.write(unfinished)
    assert StoredLogits(tmp_path / "parts").positions == 40
    store(tmp_path / "parts")
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    store(tmp_path / "whole", BATCHES[::-1])  # All are known.
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_large_vocabulary_has_indices_of_32_bits(tmp_path):
    fn = lambda model, batch: jnp.zeros((1, 70_000)).at[0, 66_000].set(1)
    logits = store_logits(tmp_path, fn, TEACHER, BATCHES[:1], k=1)
    assert logits.of(BATCHES[0]).indices[0, 0] == 66_000


@pytest.mark.parametrize("is_stored", [slow(False), True])
def test_logits_in_pieces(is_stored, tmp_path, monkeypatch):
    monkeypatch.setattr("eqquant.training._pieces.AT_ONCE", 8)
    monkeypatch.setattr("eqquant.training._store_logits.AT_ONCE", 8)
    shapes = []

    def recorded(model, rows):
        shapes.append(rows.shape)
        return head(model, rows)

    teacher = TEACHER
    if is_stored:
        how = {"k": 8, "head": recorded}
        teacher = store_logits(tmp_path / "a", hidden, TEACHER, BATCHES, **how)
        whole = store(tmp_path / "b")
        for batch in BATCHES:
            np.testing.assert_allclose(
                teacher.of(batch).log_probabilities,
                whole.of(batch).log_probabilities,
                rtol=ROUNDING,
            )
        assert set(shapes) == {(20, 32), (8, 32), (4, 32)}  # The first is abstract.
        shapes.clear()
    _, state = distilled(teacher, BATCHES[:1], hidden, head=recorded)
    loss = None if is_stored else kl_divergence
    _, expected = distilled(teacher, BATCHES[:1], loss=loss)
    assert set(shapes) == {(8, 32), (4, 32)}
    np.testing.assert_allclose(state.loss, expected.loss, rtol=ROUNDING)
    # Adam's first step has the sign of the gradient, so compare its first moment.
    first = lambda state: jax.tree.leaves(state.optimiser_state[0].mu)
    for a, b in zip(first(state), first(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


#
# Resuming
#


def test_an_interrupted_run_resumes_from_its_checkpoint(tmp_path):
    whole = distilled()

    def interrupted():
        yield from BATCHES[:5]
        raise KeyboardInterrupt

    how = {"checkpoint": tmp_path / "state.safetensors", "save_every": 2}
    with pytest.raises(KeyboardInterrupt):
        distilled(batches=interrupted(), **how)
    like = eqquant.training.DistillationState(STUDENT, OPTIMISER)
    assert eqquant.load(how["checkpoint"], like=like).steps == 4
    assert_identical(distilled(batches=iter(BATCHES), **how), whole)
    # Everything is done: the file holds the result.
    assert_identical(distilled(**how), whole)


#
# Scales in few bits
#


@pytest.mark.parametrize(
    "format",
    [
        eqquant.NF4(8, double_quantization=True),
        slow(eqquant.NF3(8, affine=True, double_quantization=True)),
        slow(eqquant.Int4(16, affine=True, unsigned=True, double_quantization="k")),
        slow(eqquant.NVFP4()),
    ],
    ids=lambda format: format.name,
)
def test_short_scales_are_trained_as_decoded_values(format):
    student = eqquant.quantize_tree(TEACHER, format, min_size=1)
    batches = [3 * batch for batch in BATCHES]
    how = {"student": student, "optimiser": optax.adam(3e-4), "loss": kl_divergence}
    out, _ = distilled(batches=8 * batches, **how)
    before, after = student.layers[1].weight, out.layers[1].weight
    assert_identical(after.codes, before.codes)
    assert type(after.scales) is type(before.scales)
    assert_identical(after.scales.outer, before.scales.outer)
    assert (after.scales.codes != before.scales.codes).any()
    if before.offsets is not None:
        assert (after.offsets.codes != before.offsets.codes).any()
    kl = lambda m: kl_divergence(forward(m, batches[0]), forward(TEACHER, batches[0]))
    assert kl(out) < kl(student)
    # The last loss is the loss of the model with rounded scales.
    _, one = distilled(batches=batches[:1], **how)
    np.testing.assert_allclose(one.loss, kl(student), rtol=1e-4)
    is_scale = jax.tree.map(lambda _: False, student)
    is_scale = eqx.tree_at(lambda m: m.layers[0].weight.scales.codes, is_scale, True)
    out, state = distilled(where=is_scale, **how)
    assert len(jax.tree.leaves(state.trained)) == 1
    assert_identical(out.layers[1], student.layers[1])


def test_powers_of_two_are_frozen():
    student = eqquant.quantize_tree(TEACHER, "mxfp4", min_size=1)
    out, _ = distilled(student=student)
    assert_identical(out.layers[0].weight, student.layers[0].weight)
    assert (out.layers[0].bias != student.layers[0].bias).any()


#
# Errors
#


def test_bad_logits(tmp_path):
    logits = store(tmp_path / "a")
    for how, message in (
        ({"k": 9}, "k=9.* has k=8"),
        ({"temperature": 2.0}, "temperature=2.0.* has temperature=1.0"),
        ({"k": 0}, "from 1 to the vocabulary of 50, got 0"),
        ({"temperature": 0.0}, "temperature must be a positive number, got 0.0"),
        ({"batches": []}, "at least one batch"),
    ):
        with pytest.raises(ValueError, match=message):
            store(tmp_path / "a", **how)
    with pytest.raises(ValueError, match="with model="):
        store_logits(tmp_path / "a", forward, STUDENT, BATCHES, k=8)
    with pytest.raises(ValueError, match="batch 1 has NaN"):
        store(tmp_path / "nan", [BATCHES[0], BATCHES[1] * np.nan])
    with pytest.raises(TypeError, match="one floating-point array of logits"):
        store_logits(tmp_path / "b", lambda *_: None, TEACHER, BATCHES)
    with pytest.raises(ValueError, match="has 6, but one is not"):
        logits.of(BATCHES[0] + 1)
    with pytest.raises(ValueError, match="20 positions and a vocabulary of 50"):
        distilled(logits, fn=lambda m, x: forward(m, x)[:, 1:])
    with pytest.raises(ValueError, match=r"temperature must be 1.0, .* got 2.0"):
        distilled(logits, loss=ft.partial(kl_divergence, temperature=2.0))
    with pytest.raises(ValueError, match="must be made by"):
        StoredLogits(tmp_path)
    (tmp_path / "a" / "indices.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match="indices.bin .* must have 1920 bytes"):
        StoredLogits(tmp_path / "a")


def test_bad_checkpoints(tmp_path):
    path = tmp_path / "state.safetensors"
    for how, message in (
        ({"checkpoint": tmp_path}, "must end with '.safetensors'"),
        ({"checkpoint": path, "save_every": 0}, "save_every .* got 0"),
        (
            {
                "checkpoint": path,
                "state": eqquant.training.DistillationState(STUDENT, OPTIMISER),
            },
            "state must be None",
        ),
        ({"head": head, "fn": lambda m, x: None}, "one floating-point array of hidden"),
    ):
        with pytest.raises(ValueError, match=message):
            distilled(**how)
