"""The loop of training: a progress bar, and checkpoints to go on from."""

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
    """`trained, state, loss = step(i, trained, state)`, so many times. What was trained,
    and the loss of each step.

    A run that was interrupted goes on from its last checkpoint, and ends with the same
    bits: a step must not depend on anything but its arguments. `identity` says what
    else the run depends on: the checkpoint of another run is not used.
    """
    history = np.full(steps, np.nan, np.float32)
    start = trained, state, history, np.int32(0)
    identity = {**identity, "steps": steps}
    trained, state, history, done = _checkpoint.restore(path, start, **identity)
    # On the device, as the results of a step are: or the step is compiled twice.
    trained, state = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (trained, state)
    )
    if done:
        print(f"Going on from step {int(done)} of {path}")
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
