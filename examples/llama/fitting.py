"""The training loop, with a progress bar and checkpoints."""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm


sys.path.append(str(pathlib.Path(__file__).parents[1]))
import _checkpoint


def fit(
    step: Callable,
    trained: Any,
    state: Any,
    *,
    path: pathlib.Path,
    steps: int,
    save_every: int,
    **identity,
) -> tuple[Any, np.ndarray]:
    """Run `trained, state, loss = step(i, trained, state)` for `steps` steps.

    Returns the trained arrays, and the loss of each step.

    An interrupted run resumes from its last checkpoint, and gives the same bits,
    because a step must depend on its arguments only. `identity` describes all other
    inputs of the run. Checkpoints of another run are ignored.
    """
    history = np.full(steps, np.nan, np.float32)
    start = trained, state, history, np.int32(0)
    identity = {**identity, "steps": steps}
    trained, state, history, done = _checkpoint.restore(path, start, **identity)
    # Committed to the device like the results of a step; otherwise the step compiles
    # twice.
    trained, state = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (trained, state)
    )
    if done:
        print(f"Resuming from step {int(done)} of {path}")
    progress = tqdm(total=steps, initial=int(done), unit="step")
    for i in range(int(done), steps):
        trained, state, loss = step(i, trained, state)
        history[i] = loss
        if not np.isfinite(history[i]):
            raise FloatingPointError(f"The loss of step {i} is {history[i]}.")
        if (i + 1) % save_every == 0 or i + 1 == steps:
            saved = trained, state, history, np.int32(i + 1)
            _checkpoint.save(path, saved, **identity)
        progress.set_postfix_str(f"loss {history[max(0, i - 19) : i + 1].mean():.3f}")
        progress.update()
    progress.close()
    return trained, history
