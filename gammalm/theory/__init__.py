"""What a model is like before training, computed without building it: closed forms, activation moments, the covariance recursion.

    closed_forms.py   norm factor, step-0 logits, the law of residual flow, balance points
    activations.py    moments and covariance kernels of activations
    mlp.py            fully connected nets and stacks of pre-norm branches, forward and backward
    description.py    sizes and standard deviations of a decoder, from plain numbers
    mixing.py, routing.py, recursion.py   the recursion over the covariance of the actual tokens
    gradients.py      the same recursion downwards, for the loss's gradient
    branches.py       one branch alone over many widths, and the exponent of the width

The room imports no other: a caller that has one of our configs translates it. Docs: docs/theory.md.
"""

from gammalm.theory.closed_forms import (
    attention_ratio,
    balance_gamma,
    branch_exponent,
    half_point,
    latent_attention_ratio,
    log_sum_exp_excess,
    logit_std,
    norm_factor,
    swiglu_ratio,
    two_matrix_ratio,
)
from gammalm.theory.description import Decoder, Dense, Heads, Latent, Mixture, Stack, gamma_decoder
from gammalm.theory.recursion import Prediction, predict

__all__ = [
    "Decoder", "Dense", "Heads", "Latent", "Mixture", "Prediction", "Stack", "attention_ratio", "balance_gamma", "branch_exponent",
    "gamma_decoder", "half_point", "latent_attention_ratio", "log_sum_exp_excess", "logit_std", "norm_factor", "predict", "swiglu_ratio",
    "two_matrix_ratio",
]  # fmt: skip
