"""Text to tokens and back: the tokenizer of a model, its chat template, and the stop
tokens."""

import json
import pathlib
import time
from collections.abc import Sequence

from load import Model, open_model


class Text:
    """A tokenizer with a chat template.

    **Arguments:**

    - `model`: a GGUF file; or a folder that contains `tokenizer.json`, and optionally
        `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja`.
    - `stop`: additional stop tokens.
    """

    def __init__(self, model: pathlib.Path | Model, stop: Sequence[str] = ()):
        self._vocabulary = open_model(model).vocabulary()
        self.tokenizer = self._vocabulary.tokenizer
        self.stop = set(self._vocabulary.stop)
        for token in stop:
            index = self.tokenizer.token_to_id(token)
            if index is None:
                raise ValueError(f"stop: {token!r} is not a token of this model.")
            self.stop.add(index)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Encode messages, each with a `role` and `content`, and the start of an
        answer."""
        return self._encode_rendered(messages, add_generation_prompt=True)

    def encode_document(self, text: str | Sequence[dict[str, str]]) -> list[int]:
        """Encode a text or a whole chat for training, with the final stop token."""
        if isinstance(text, str):
            ids = self.encode(text)
        else:
            ids = self._encode_rendered(text, add_generation_prompt=False)
        end = self._vocabulary.eos
        index = self.tokenizer.token_to_id(end) if end else min(self.stop, default=None)
        return ids if index is None or ids[-1:] == [index] else [*ids, index]

    def _encode_rendered(self, messages, **options) -> list[int]:
        text = self._render(messages, **options)
        # The template contains the special tokens.
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        begin = self.tokenizer.token_to_id(self._vocabulary.bos)
        if self._vocabulary.begins_chats and ids[:1] != [begin]:
            return [begin, *ids]
        return ids

    def _render(self, messages: Sequence[dict[str, str]], **options) -> str:
        try:
            from jinja2.exceptions import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ImportError(
                "A chat template needs jinja2: pip install jinja2"
            ) from None

        def raise_exception(message):
            raise TemplateError(message)

        vocabulary = self._vocabulary
        if vocabulary.template is None:
            raise ValueError(
                f"{vocabulary.where} has no chat template: the model is not a chat "
                "model."
            )
        # A template is untrusted code. The sandbox denies access to attributes of
        # Python objects, and to mutation.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True
        )
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = time.strftime
        environment.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
        try:
            return environment.from_string(vocabulary.template).render(
                messages=messages,
                bos_token=vocabulary.bos,
                eos_token=vocabulary.eos,
                **options,
            )
        except TemplateError as error:
            raise ValueError(f"The chat template: {error}") from None
