"""Sentences to calibrate a sentence encoder on: the documentation of Python itself."""

import ast
from collections.abc import Callable, Iterator

import numpy as np
from _standard_library import modules
from jaxtyping import Bool, Int


LONGEST = 64  # Tokens.
BATCH = 40
RANDOM = 0.5  # Which part of the tokens are replaced.
FIRST_WORD = 1996  # Tokens before it are special ones, or single characters.
VOCABULARY = 30522

Batch = tuple[Int[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]


def documentation() -> Iterator[str]:
    """The first paragraph of each docstring, where it is a sentence or a few."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for _, tree in modules():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if not text or ">>>" in text.split("\n\n")[0]:
                continue
            text = " ".join(text.split("\n\n")[0].split())
            if 40 <= len(text) <= 300 and text.endswith("."):
                yield text


def calibration_batches(
    count: int, tokenize: Callable[[list[str]], Batch], but: list[str]
) -> list[Batch]:
    """Tokens and masks of so many sentences, and none of `but`; those of about a length
    together. Random tokens take the place of some, so that they cover the
    vocabulary."""
    texts = sorted(set(documentation()) - set(but))
    rng = np.random.default_rng(0)
    texts = [texts[i] for i in rng.permutation(len(texts))[:count]]
    tokens, mask = (x[:, :LONGEST] for x in tokenize(texts))
    replaced = (rng.random(tokens.shape) < RANDOM) & mask
    replaced[:, 0] = False  # What every sentence begins with.
    words = rng.integers(FIRST_WORD, VOCABULARY, tokens.shape, np.int32)
    tokens = np.where(replaced, words, tokens)
    order = np.argsort(mask.sum(1), kind="stable")
    batches = []
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        # Few different lengths: each is compiled.
        length = LONGEST // 2 if mask[rows].sum(1).max() <= LONGEST // 2 else LONGEST
        batches.append((tokens[rows, :length], mask[rows, :length]))
    return batches
