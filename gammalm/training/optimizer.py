"""AdamW with decoupled decay by parameter role, and the learning-rate schedules.

Peak rate and decay are traced scalars, so that runs which differ in them share one program.
"""

import jax
import jax.numpy as jnp
import optax

from gammalm.trees import nested


def schedule_factor(c, steps: int, step):
    """Learning rate at `step` (0-based) as a fraction of its peak, fp32.

    Warm-up is linear and reaches the peak at its last step; `cosine` then falls to `final_fraction` at the last step of the run,
    `wsd` stays and falls linearly over the last `cooldown_share` of the steps, `constant` stays.
    """
    done = step.astype(jnp.float32) + 1
    warmup = c.warmup_steps
    up = jnp.minimum(1.0, done / max(warmup, 1))
    if c.schedule == "constant":
        return up
    if c.schedule == "cosine":
        share = jnp.clip((done - warmup) / max(steps - warmup, 1), 0, 1)
        fall = 0.5 * (1 + jnp.cos(jnp.pi * share))
    else:
        cooldown = max(1, round(c.cooldown_share * steps))
        fall = jnp.clip((steps - done) / cooldown, 0, 1)
    return up * (c.final_fraction + (1 - c.final_fraction) * fall)


def adam(c) -> optax.GradientTransformation:
    """Adam's direction, moments in fp32 (Kingma & Ba 2015, arXiv:1412.6980)."""
    return optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps)


def decay_mask(specs, no_decay) -> dict:
    """1.0 for parameters that weight decay reaches, 0.0 for the roles in `no_decay`; nested like the parameters."""
    return nested({path: 0.0 if spec.role in no_decay else 1.0 for path, spec in specs.items()})


def apply_adamw(params, direction, mask, rate, decay):
    """params − rate · (direction + decay · mask · params): decay is decoupled (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return jax.tree.map(lambda p, d, m: p - rate * (d + decay * m * p), params, direction, mask)
