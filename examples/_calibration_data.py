"""Calibration sentences for a sentence encoder, from the documentation of Python."""

import ast
from collections.abc import Callable, Iterator

import numpy as np
from _standard_library import modules
from jaxtyping import Bool, Int


LONGEST = 64  # Tokens.
BATCH = 40
RANDOM = 0.5  # The share of tokens that are replaced.
FIRST_WORD = 1996  # Lower token numbers are special tokens or single characters.
VOCABULARY = 30522

Batch = tuple[Int[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]


def documentation() -> Iterator[str]:
    """Return the first paragraph of each docstring that is a few sentences long."""
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
    count: int, tokenize: Callable[[list[str]], Batch], excluded: list[str]
) -> list[Batch]:
    """Return batches of tokens and masks of `count` sentences.

    Sentences in `excluded` are excluded, and a batch holds sentences of similar length.
    Random tokens replace some of the tokens, so that the batches cover the vocabulary.
    """
    texts = sorted(set(documentation()) - set(excluded))
    rng = np.random.default_rng(0)
    texts = [texts[i] for i in rng.permutation(len(texts))[:count]]
    tokens, mask = (x[:, :LONGEST] for x in tokenize(texts))
    replaced = (rng.random(tokens.shape) < RANDOM) & mask
    replaced[:, 0] = False  # The first token of every sentence.
    words = rng.integers(FIRST_WORD, VOCABULARY, tokens.shape, np.int32)
    tokens = np.where(replaced, words, tokens)
    order = np.argsort(mask.sum(1), kind="stable")
    batches = []
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        # Round lengths up, because each length is compiled.
        length = LONGEST // 2 if mask[rows].sum(1).max() <= LONGEST // 2 else LONGEST
        batches.append((tokens[rows, :length], mask[rows, :length]))
    return batches
