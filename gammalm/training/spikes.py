"""When a loss counts as a spike: far above the middle of the last steps' losses. Pure and on the device, so that no step waits.

Rule: loss > median + `spike_sigma` · spread, over the losses of the last N = `spike_window` steps; spread = 1.4826 · median |loss − median|
(the standard deviation, if the losses were normal), at least LEAST of the median, for losses that hardly differ. Fewer than N steps
judge nothing. A spike's own loss is remembered like any other: should the loss stay high, it is the middle after N/2 steps, and training
goes on.

Shape legend: N steps remembered. Source: OLMo-core's skip-step optimizer has the window of 128 steps and the 6 sigma, with mean and
standard deviation; a median is not moved by the spikes themselves. Rolling back and leaving batches out: PaLM (arXiv:2204.02311, 5.1).
"""

import jax.numpy as jnp

TO_SIGMA = 1.4826  # 1 / Φ⁻¹(3/4)
LEAST = 1e-3


def nothing_seen(window: int):
    """What is remembered before the first step: fp32 [N], infinite where there was no step yet."""
    return jnp.full((window,), jnp.inf, jnp.float32)


def bound(recent_N, sigma: float):
    """The loss above which a step is a spike, fp32 scalar; infinite until N losses are remembered."""
    middle = jnp.median(recent_N)
    spread = TO_SIGMA * jnp.median(jnp.abs(recent_N - middle))
    spread = jnp.maximum(spread, LEAST * jnp.abs(middle))
    return jnp.where(jnp.all(jnp.isfinite(recent_N)), middle + sigma * spread, jnp.inf)


def remember(recent_N, step, loss):
    """`recent_N` with the loss of the step after `step` steps in place of the oldest."""
    return recent_N.at[step % recent_N.shape[0]].set(loss)
