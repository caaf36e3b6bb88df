"""The `config.json` beside a checkpoint, which describes how weights are packed."""

from collections.abc import Sequence
from typing import Any

from ..files import Source


class PackingConfig:
    """`quantization_config` of the `config.json` beside a checkpoint.

    **Fields:**

    - `where`: the path, for errors.
    - `method`: `quant_method`, the library that packed the weights.
    """

    where: str
    method: Any

    def __init__(self, source: Source, weights: str, setting: str):
        path = source.path.parent / "config.json"
        self.where = str(path)
        config = source.config()
        if config is None:
            raise ValueError(
                f"{source.path}: has {weights}, but no {path.name} beside it. That "
                f"file specifies {setting}."
            )
        found = config.get("quantization_config")
        self._values = found if isinstance(found, dict) else {}
        self.method = self._values.get("quant_method")
        if not isinstance(self.method, str):
            raise ValueError(
                f"{path}: quantization_config must be an object with a quant_method, "
                f"because {source.path.name} has {weights}."
            )

    def one_of(self, name: str, allowed: Sequence[Any], default: Any = ...) -> Any:
        """Return a value, which must be one of `allowed`."""
        value = self._values.get(name, default)
        # `True == 1` and `4.0 == 4` in Python, so compare types also.
        if not any(value == x and type(value) is type(x) for x in allowed):
            given = "nothing" if value is ... else repr(value)
            raise ValueError(
                f"{self.where}: {name} of quantization_config must be one of "
                f"{', '.join(map(repr, allowed))}, got {given}."
            )
        return value

    def block_size(self, name: str = "group_size") -> int | None:
        """Return the number of weights per scale; `None` (-1 in the file) for a whole
        row."""
        value = self._values.get(name)
        if type(value) is not int or (value != -1 and not 0 < value < 2**31):
            raise ValueError(
                f"{self.where}: {name} of quantization_config must be a positive "
                f"integer or -1, got {value!r}."
            )
        return None if value == -1 else value

    def check_layout(self, names: Sequence[str], allowed: Sequence[str]) -> str:
        """Return the layout of packed integers, from the first of `names` that is set.
        Versions of a library have used several names. The default is `allowed[0]`."""
        name = next((n for n in names if self._values.get(n) is not None), names[0])
        value = self._values.get(name, allowed[0])
        value = value.lower() if isinstance(value, str) else value
        if value not in allowed:
            raise ValueError(
                f"{self.where}: {name} of quantization_config must be one of "
                f"{', '.join(map(repr, allowed))}, got {value!r}. Convert the "
                "checkpoint with the library that wrote it."
            )
        return value
