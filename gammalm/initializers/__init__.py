"""Initializers: γ-initialization (σ = d_in^(−γ)) and the schemes people compare it with, chosen per parameter by an ordered rule table.

`zoo` holds the functions `(key, shape, dtype)`, `specs` what a model declares of a parameter, `rules` the rule language, `presets`
the named conventions, `table` the resolved table, `params` the drawing of a whole tree, `anywhere` the same for trees of other libraries.
"""

from gammalm.initializers.anywhere import init_weights, weight_table
from gammalm.initializers.params import init_params, path_hash
from gammalm.initializers.presets import PRESETS, STEP_PRESETS, rate_factors
from gammalm.initializers.specs import ROLES, ParamSpec
from gammalm.initializers.table import format_table, init_table
from gammalm.initializers.zoo import (
    ZOO,
    Initializer,
    equivalent_gamma,
    fixed_std,
    gamma_normal,
    glorot_normal,
    glorot_uniform,
    gpt2,
    he_normal,
    he_uniform,
    kaiming_normal,
    kaiming_uniform,
    lecun_normal,
    lecun_uniform,
    normal,
    ones,
    orthogonal,
    torch_linear,
    truncated_std,
    xavier_normal,
    xavier_uniform,
    zeros,
)

__all__ = [
    "PRESETS",
    "ROLES",
    "STEP_PRESETS",
    "ZOO",
    "Initializer",
    "ParamSpec",
    "equivalent_gamma",
    "fixed_std",
    "format_table",
    "gamma_normal",
    "glorot_normal",
    "glorot_uniform",
    "gpt2",
    "he_normal",
    "he_uniform",
    "init_params",
    "init_table",
    "init_weights",
    "kaiming_normal",
    "kaiming_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "ones",
    "orthogonal",
    "path_hash",
    "rate_factors",
    "torch_linear",
    "truncated_std",
    "weight_table",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]
