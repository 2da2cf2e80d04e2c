"""Model FLOP of training, by the convention printed beside every MFU: 6 per matrix parameter and token, causal attention counted once.

No recomputation, no norms, no softmax; the embedding look-up costs nothing, the head its product. A query sees T/2 keys on average. Of a
mixture's experts the chosen ones count.
"""

import math

from gammalm.models.kernels import head_sizes

CONVENTION = "6 FLOP per active matrix parameter and token, causal attention counted once, no recomputation"


def without_product(model) -> int:
    """Parameters that no matrix product reads: norms, biases, sinks, positions, and an embedding that is not the head too."""
    roles = {"norm", "bias", "sink", "position"} | (set() if model.config.tie_embeddings else {"embed"})
    return sum(math.prod(spec.shape) for spec in model.specs.values() if spec.role in roles)


def training_flops_per_token(model, seq_len: int) -> float:
    """FLOP of forward and backward pass per token at sequence length `seq_len` (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
    c = model.config
    per_score, per_value = head_sizes(c)
    attention = 2 * (per_score + per_value) * c.n_layers * c.n_heads * seq_len / 2  # scores and weighted values, half of the square
    return 6 * (model.active_parameter_count - without_product(model)) + 3 * attention
