"""Inputs for libraries that quantize models of transformers."""

from collections.abc import Iterator
from typing import Any

from . import Model


def placeholder_tokenizer() -> Any:
    """Return a tokenizer with one word, for libraries that require one although they
    get tokens."""
    from tokenizers import models, Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    special = {name: "<unk>" for name in ("unk_token", "eos_token", "pad_token")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def batches(model: Model) -> Iterator[dict]:
    import torch

    for tokens, mask in model.batches:
        yield {
            "input_ids": torch.from_numpy(tokens).long(),
            "attention_mask": torch.from_numpy(mask).long(),
        }
