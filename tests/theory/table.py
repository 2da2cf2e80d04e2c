"""Prints the table of docs/theory.md: where d^(1−γ) does not hold, the recursion's ratios beside measured ones.

    python -m tests.theory.table
"""

import numpy as np

from gammalm.config import apply_overrides, load_config
from gammalm.theory import predict

from .measured import described, measure, zipf

WIDTHS = (128, 512, 2048)
DRAWS = {128: 8, 512: 3, 2048: 1}
CASES = [  # label, what is compared, arguments of the config, leaves
    ("attention", "attn_added", "gamma=1.0,eps=1e-12", {}),
    ("attention", "attn_added", "gamma=1.0,eps=1e-5", {}),
    ("SwiGLU", "ffn_added", "gamma=1.0,eps=1e-12", {}),
    ("SwiGLU", "ffn_added", "gamma=1.0,eps=1e-5", {}),
    ("latent attention, rank 32", "attn_added", "gamma=1.0,eps=1e-12,attention=mla", {"model.mla.kv_rank": 32}),
    ("whole model, depth scaling", "flow2", "gamma=1.0,eps=1e-12", {"init.depth_scale": True}),
    ("whole model", "flow2", "gamma=1.0,eps=1e-12", {}),
    ("whole model", "flow2", "gamma=0.75,eps=1e-12", {}),
]


def config(d: int, spec: str, leaves: dict):
    """A model of width d with two layers, heads of 64, F = 8d/3, no gate."""
    c = load_config(f"lm:size=tiny,vocab=2048,gate=none,{spec}")
    sizes = {"model.d_model": d, "model.n_heads": d // 64, "model.d_ff": 8 * d // 3 // 16 * 16, "model.dtype": "float32",
             "model.residual_dtype": "float32"}  # fmt: skip
    if c.model.attention == "mla":
        sizes |= {"model.mla.nope_dim": 64, "model.mla.rope_dim": 32, "model.mla.v_dim": 64}
    else:
        sizes |= {"model.n_kv_heads": d // 64, "model.head_dim": 64}
    return apply_overrides(c, list((sizes | leaves).items()))


def main() -> None:
    tokens = zipf((2, 64), 2048)
    print("| part | settings | " + " | ".join(f"d = {d}: predicted, measured" for d in WIDTHS) + " |\n|" + "---|" * (2 + len(WIDTHS)))
    for label, name, spec, leaves in CASES:
        cells = []
        for d in WIDTHS:
            c = config(d, spec, leaves)
            found = measure(c, tokens, range(DRAWS[d]))
            prediction = predict(described(c), tokens)
            ours = prediction.flow if name == "flow2" else np.sqrt(getattr(prediction, name)[0] / prediction.embed)
            theirs = np.sqrt(np.mean(found[name] if name == "flow2" else found[name][:, 0]) / np.mean(found["embed"]))
            cells.append(f"{ours:.3g}, {theirs:.3g}")
        print(f"| {label} | {spec} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
