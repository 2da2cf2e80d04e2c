"""A decoder of ours, initialized and run: the mean squares that the theory predicts. Adapter from config to theory, for the tests.

Legend: B sequences, T tokens, L layers, D width.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gammalm.initializers import init_params, init_table
from gammalm.models.decoder import Model
from gammalm.theory import Decoder, Dense, Heads, Latent, Mixture, Stack


def zipf(shape, vocab, seed=0):
    """Token ids by Zipf's law: few that repeat often, many that are rare."""
    p = 1 / np.arange(1, vocab + 1)
    return np.random.default_rng(seed).choice(vocab, shape, p=p / p.sum()).astype(np.int32)


def described(config) -> Decoder:
    """The theory's description of `config`: its sizes, and its own table of standard deviations."""
    c = config.model
    assert c.softmax_sink == "none" and c.residual == "pre", "the theory knows no softmax sink and no post-norm"
    model = Model(c)
    rows = {row["path"]: row for row in init_table(model.specs, config.init, d_model=c.d_model, n_layers=c.n_layers)}
    first = c.moe.first_k_dense if c.ffn == "moe" else 0
    attention = Latent(c.n_heads, **dict(c.mla)) if c.attention == "mla" else Heads(c.n_heads, c.head_dim, c.qk_norm)
    stacks, stds = [], []
    for name, depth, ffn in (("dense_layers", first, "dense"), ("layers", c.n_layers - first, c.ffn)):
        if depth:
            kind = Dense(c.d_ff, c.activation) if ffn == "mlp" else Dense(c.d_ff)
            if ffn == "moe":
                kind = Mixture(c.moe.n_experts, c.moe.top_k, c.moe.n_shared, c.moe.d_expert, c.moe.score, c.moe.route_scale)
            stacks.append(Stack(depth, attention, kind, c.gate))
            stds.append({path.removeprefix(f"{name}/"): row["sigma"] for path, row in rows.items()
                         if path.startswith(f"{name}/") and row["role"] not in ("norm", "bias")})  # fmt: skip
    embed = rows["embed/table"]["sigma"]
    head = None if c.tie_embeddings else rows["head/kernel"]["sigma"]
    if c.positions == "learned":
        assert rows["embed/positions"]["sigma"] == 0, "the theory knows no learned positions"
    theta = c.rope_theta if c.positions == "rope" else 1e30  # so slow that nothing turns
    return Decoder(c.d_model, c.vocab_size, tuple(stacks), tuple(stds), embed, head, c.norm_eps, theta, c.logit_softcap)


def _program(model, logits):
    def mean_square(x):
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    @jax.jit
    def run(params, tokens_BT, segments_BT, eps):
        decoder = model.bind(params)

        def look(visit):
            streams = {"attn_in": visit.before_BTD, "attn_added": visit.attention_BTD}
            streams |= {"ffn_in": visit.between_BTD, "ffn_added": visit.ffn_BTD}
            return {name: mean_square(x_BTD) for name, x_BTD in streams.items()}

        e_BTD, _ = decoder.start(tokens_BT, segments_BT)
        x_BTD, found = decoder.walk(tokens_BT, segments_BT, eps, look)
        found |= {"embed": mean_square(e_BTD), "final": mean_square(x_BTD), "flow2": mean_square(x_BTD - e_BTD)}
        if logits:
            found["logits2"] = mean_square(decoder.logits(tokens_BT, segments_BT, eps))
        return found

    return run


def measure(config, tokens_BT, seeds, segments_BT=None, logits=False) -> dict:
    """Name -> [draw, ...] mean squares of the stream and of what each branch adds, one row per draw of the parameters.

    flow2: of h_L − e. logits2: of the logits.
    """
    model = Model(config.model)
    run = _program(model, logits)
    segments_BT = np.ones_like(tokens_BT) if segments_BT is None else segments_BT
    found = []
    for seed in seeds:
        params = init_params(model.specs, config.init, seed, d_model=config.model.d_model, n_layers=config.model.n_layers)
        found.append(jax.tree.map(np.float64, run(params, tokens_BT, segments_BT, config.model.norm_eps)))
    return jax.tree.map(lambda *draws: np.stack(draws), *found)


def deviations(prediction, found) -> dict[str, np.ndarray]:
    """|predicted / measured − 1| of root mean squares, by name, less two standard errors of the measured mean over draws."""
    predicted = {name: getattr(prediction, name) for name in ("embed", "attn_in", "attn_added", "ffn_in", "ffn_added", "final")}
    predicted["flow2"] = prediction.embed * prediction.flow**2
    if "logits2" in found:
        predicted["logits2"] = prediction.logit_std**2
    over = {}
    for name, value in predicted.items():
        mean = found[name].mean(axis=0)
        error = found[name].std(axis=0, ddof=1) / np.sqrt(len(found[name])) / mean / 2 if len(found[name]) > 1 else 0.0
        over[name] = np.abs(np.sqrt(value / mean) - 1) - 2 * error
    return over
