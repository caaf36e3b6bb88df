"""Run-time checks of the public functions.

`jaxtyping` turns them off: set the environment variable `JAXTYPING_DISABLE=1`, or call
`jaxtyping.config.update("jaxtyping_disable", True)` before eqquant is imported.
"""

from beartype import beartype
from jaxtyping import jaxtyped


typed = jaxtyped(typechecker=beartype)
