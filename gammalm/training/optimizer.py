"""AdamW, or Muon for the matrices of the layers and AdamW for the rest; decoupled decay by parameter role; learning-rate schedules.

Peak rate and decay are traced scalars, so that runs which differ in them share one program.
"""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from gammalm.errors import ConfigError
from gammalm.initializers import ROLES, rate_factors
from gammalm.initializers.rules import nearest
from gammalm.trees import flat, nested

# Muon's, as in its author's code (Jordan et al. 2024, kellerjordan.github.io/posts/muon): which parameters get it, momentum of the
# gradients. Gates and routers stay with Adam: their columns are decisions of their own. The size of an update is Moonlight's: an entry
# moves by about MUON_RMS · rate, as much as under AdamW, so that one learning rate serves both (Liu et al. 2025, arXiv:2502.16982).
MUON_ROLES = ("qk", "vo", "ffn")
MUON_MOMENTUM = 0.95
MUON_RMS = 0.2


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


def muon(c, specs) -> optax.GradientTransformation:
    """Muon's direction for the parameters of `specs`: their momentum (Nesterov, fp32) with all singular values near 1.

    What is made orthogonal is the fan-in × fan-out matrix of each layer and expert: q [L, D, H, K] is L matrices of D × HK. Five
    Newton–Schulz steps leave singular values between .7 and 1.2, but for those below a few thousandths of the largest.
    """
    numbers = {p: MuonDimensionNumbers(*(tuple(map(s.axes.index, fan)) for fan in (s.fan_in, s.fan_out))) for p, s in specs.items()}
    return scale_by_muon(beta=MUON_MOMENTUM, eps=c.eps, weight_dimension_numbers=nested(numbers))


def _part(tree, paths) -> dict:
    """The parameters `paths` of a nested dict, nested."""
    found = flat(tree)
    return nested({path: found[path] for path in paths})


def _shares(c, specs) -> dict[str, list[str]]:
    """Which parameters follow Adam and which Muon; no Muon under kind adamw."""
    if c.kind == "adamw":
        return {"adam": list(specs)}
    matrices = [path for path, spec in specs.items() if spec.role in MUON_ROLES]
    return {"adam": [path for path in specs if path not in matrices], "muon": matrices}


def direction(config, specs) -> optax.GradientTransformation:
    """What a step goes against, before the rate: gradients -> direction, both nested as the parameters are.

    Its state is {"adam": …}, and {"muon": …} under kind muon, each with the moments of its own parameters alone, in fp32. A preset
    of init that sets learning rates (`rate_factors`) scales directions here; decoupled decay is as strong whatever it says.
    """
    c = config.optimizer
    shares = _shares(c, specs)
    transforms = {"adam": adam(c)} | ({"muon": muon(c, {path: specs[path] for path in shares["muon"]})} if "muon" in shares else {})
    factors = rate_factors(config.init, specs, config.model.d_model, orthogonal=shares.get("muon", ()))
    for path in shares.get("muon", ()):
        factors[path] *= MUON_RMS * max(specs[path].fans()) ** 0.5

    def init(params):
        return {name: transform.init(_part(params, shares[name])) for name, transform in transforms.items()}

    def update(gradients, state, params=None):
        found, moments = {}, {}
        for name, transform in transforms.items():
            part, moments[name] = transform.update(_part(gradients, shares[name]), state[name])
            found |= flat(part)
        return nested({path: d if factors[path] == 1.0 else d * factors[path] for path, d in found.items()}), moments

    return optax.GradientTransformation(init, update)


def moments_like(config, specs, parameters, rest) -> dict:
    """The state of `direction` with the leaves of `parameters` (nested, one per parameter) where moments are, `rest` elsewhere."""
    made = {}
    for name, paths in _shares(config.optimizer, specs).items():
        part = _part(parameters, paths)
        made[name] = optax.ScaleByAdamState(rest, part, part) if name == "adam" else MuonState(rest, part, rest)
    return made


def decay_mask(specs, no_decay) -> dict:
    """1.0 for parameters that weight decay reaches, 0.0 for the roles in `no_decay`; nested like the parameters.

    Logits of softmax sinks never decay: their 0 is a sink of weight exp(0), no absence of one. Raises ConfigError for what is no role.
    """
    for role in no_decay:
        if role not in ROLES:
            raise ConfigError(f"optimizer.no_decay: {role!r} is no role of a parameter.{nearest(role, ROLES)}")
    return nested({path: 0.0 if spec.role in (*no_decay, "sink") else 1.0 for path, spec in specs.items()})


def apply_adamw(params, direction, mask, rate, decay):
    """params − rate · (direction + decay · mask · params): decay is decoupled (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return jax.tree.map(lambda p, d, m: p - rate * (d + decay * m * p), params, direction, mask)
