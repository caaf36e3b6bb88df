"""The tokenizer of a model, and what belongs to it."""

import dataclasses
import pathlib

from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, its special tokens, and a chat template.

    **Fields:**

    - `where`: the file or folder, for errors.
    - `bos`, `eos`: the tokens that begin and end a text; empty if there are none.
    - `stop`: tokens that end an answer.
    - `template`: a chat template in Jinja, or `None`.
    - `begins_chats`: whether `bos` precedes a chat if the template does not contain it.
    """

    where: pathlib.Path
    tokenizer: Tokenizer
    bos: str
    eos: str
    stop: frozenset[int]
    template: str | None
    begins_chats: bool = False
