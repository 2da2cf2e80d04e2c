"""What theory says of a model before its first step: flow of the stream, ε at every norm, logits; the same at γ = 1; risk of sinks; advice.

Everything is from sizes and standard deviations alone (theory/), and advice follows from the figures by the rules stated here. Dicts are
JSON-ready. Legend: L layers.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from gammalm.theory import Decoder, Latent, norm_factor, predict

CONTEXT = 256  # tokens of the text that is assumed, whose ranks have frequencies 1/(rank + 2.7)
SENSITIVE = 0.99  # factor of a norm from which its ε counts as negligible
SMALL_EPS = 1e-12
PAPER_SINK = "In the paper's 1.5B model the sink score at gamma 1 is about .11 above that at gamma .5, and gating cuts it."


def outlook(decoder: Decoder, *, distinct: bool = False, scale: float = 1.0) -> dict:
    """Prediction for `decoder`, by layer, and in `choices` a row each for it, for γ = 1 with its ε, and for γ = 1 with ε = 1e-12.

    distinct: every token counts as its own, and learned positions as large as the table are added to it. scale: what the table is
    multiplied by. Norms have `variance` of what
    enters them, `ratio` ε/variance and `factor` (1 + ratio)^(−½), a list over layers each.
    """
    tokens = _tokens(decoder.vocab_size, distinct)
    found = _predict(decoder, tokens)
    norms = {}
    for name, variance in found.norm_inputs().items():
        ratio = decoder.eps / variance
        norms[name] = {"variance": variance.tolist(), "ratio": ratio.tolist(), "factor": ((1 + ratio) ** -0.5).tolist()}
    one = at_gamma_one(decoder, scale * math.sqrt(2) if distinct else scale)
    named = {"as declared": (decoder, found)}
    named[f"gamma 1, eps {decoder.eps:g}"] = (one, _predict(one, tokens))
    if decoder.eps != SMALL_EPS:
        small = dataclasses.replace(one, eps=SMALL_EPS)
        named[f"gamma 1, eps {SMALL_EPS:g}"] = (small, _predict(small, tokens))
    return {
        "eps": decoder.eps, "embedding": math.sqrt(found.embed), "flow": found.flow, "logit_std": found.logit_std,
        "layers": {"stream": np.sqrt(found.attn_in / found.embed).tolist(), "attention": found.attn_update.tolist(),
                   "ffn": np.sqrt(found.ffn_added / found.ffn_in).tolist()},
        "norms": norms, "choices": [_choice(name, *pair) for name, pair in named.items()],
    }  # fmt: skip


def _choice(name: str, decoder: Decoder, found) -> dict:
    lowest = min(float(((1 + ratio) ** -0.5).min()) for ratio in found.eps_share().values())
    return {"init": name, "eps": decoder.eps, "embedding": math.sqrt(found.embed), "lowest_norm_factor": lowest, "flow": found.flow,
            "logit_std": found.logit_std}  # fmt: skip


def _tokens(vocab: int, distinct: bool) -> np.ndarray:
    if distinct:
        return np.arange(CONTEXT)
    p = 1 / (np.arange(vocab) + 3.7)
    return np.random.default_rng(0).choice(vocab, CONTEXT, p=p / p.sum())


def _predict(decoder: Decoder, tokens):
    latent = any(isinstance(stack.attention, Latent) for stack in decoder.stacks)
    return predict(decoder, tokens, heads=1 if latent else 2)  # in each layer: flow is a mean over layers too


def at_gamma_one(decoder: Decoder, scale: float = 1.0) -> Decoder:
    """`decoder` with the std 1/fan-in for every matrix, the width for the table and the head; its table times `scale`, as it is now."""
    d = decoder.d_model
    stds = tuple({name: 1.0 / (fan or d) for name, fan in stack.matrices().items()} for stack in decoder.stacks)
    return dataclasses.replace(decoder, stds=stds, embed=scale / d, head=None if decoder.head is None else 1.0 / d)


def sink_risk(gamma: float | None, gated: bool | None, sink: bool) -> dict:
    """{"risk": low | raised | usual | unknown, "why"}: expected of training at this γ. gated None: not known. Source: science 4."""
    if gated:
        return {"risk": "low", "why": f"Attention is gated. {PAPER_SINK}"}
    if sink:
        return {"risk": "low", "why": "The softmax has a sink of its own, so no token has to be one."}
    if gated is None:
        return {"risk": "unknown", "why": "Whether its attention is gated is not known."}
    if gamma is None:
        return {"risk": "unknown", "why": "No std of the initialization is known."}
    if gamma >= 0.8:
        return {"risk": "raised", "why": f"gamma {gamma:.2f} without a gate. {PAPER_SINK}"}
    return {"risk": "usual", "why": f"gamma {gamma:.2f} without a gate: as models of that scale have them. {PAPER_SINK}"}


def advice(facts: Mapping) -> list[str]:
    """Plain advice. `facts`: width, ffn (or None), eps, eps_key, declared (std; gamma of a config of ours), declared_key, scale (std of
    what enters the first norm over the table's), norms, gated, sink, verdict, own (a config of ours), preset (its); None: not known.
    """
    said = []
    width = facts["width"]
    if facts["verdict"] in ("trained", "just begun"):
        said.append("These weights have been trained, so their initialization is past; what follows is for a new start.")
    if width is None:
        return [*said, "Without the model's width nothing can be advised: inspect the folder with its config.json."]
    said += _on_init(facts, width) + _on_eps(facts, width)
    if facts["gated"] is False and not facts["sink"]:
        said.append(
            "At gamma 1 attention without a gate tends to sinks: gate it (config gate=elementwise; Qwen3-Next's attention has one), or "
            "watch the sink score (gammalm analyze sink)."
        )
    if facts["norms"] in ("sandwich", "post"):
        said.append(
            "A norm behind each branch makes its output one unit wide whatever the std of its last matrix: small initialization then acts "
            "through the embedding, the scores and epsilon alone, and balance at gamma 1 is not to be expected."
        )
    return said


def _on_init(facts: Mapping, width: int) -> list[str]:
    key, declared, ffn = facts["declared_key"], facts["declared"], facts["ffn"]
    if facts["own"]:
        if declared is None:
            return [f"The preset {facts['preset']} has no one gamma: init.preset=fan_in with init.gamma=1 is gamma 1 for every matrix."]
        own_fan = "; every matrix has its own fan-in" if facts["preset"] == "fan_in" else f", of the preset {facts['preset']}"
        return [f"The config's gamma is {declared:g}{own_fan} (init.gamma sets it)."]
    if width < 2:
        return []
    now = f"{key} {declared:g} is gamma {-math.log(declared) / math.log(width):.3f} at width {width}; " if declared else ""
    said = [f"{now}gamma=1 -> {key} {1 / width:.2g} (1/{width}) for what reads the stream."]
    if ffn and ffn != width:
        said.append(
            f"The feed-forward layer's last matrix reads {ffn} numbers and has std {1 / ffn:.2g} at gamma 1: one {key} cannot give both. "
            "gamma_init_ of gammalm.interop.torch draws every matrix by its own fan-in."
        )
    return said


def _on_eps(facts: Mapping, width: int) -> list[str]:
    """What ε does to the first norm at γ = 1; norms behind the branches alone do not see the embedding."""
    eps, key = facts["eps"], facts["eps_key"]
    if facts["own"] and eps is None:  # no norms
        return []
    if eps is None:
        return ["Which epsilon its norms have is not known; at gamma 1 it should be far below 1/width^2."]
    if facts["norms"] == "post":
        return [f"Set {key} to {SMALL_EPS:g}: at gamma 1 what enters the norms behind the branches is far below {eps:g}."] * (eps > 1e-10)
    variance = (facts["scale"] / width) ** 2
    factor = float(norm_factor(1.0, eps / facts["scale"] ** 2, width))
    if factor >= SENSITIVE:
        return [f"eps {eps:g} is negligible at gamma 1: the first norm sees a variance of {variance:.2g}."]
    how = f"Set {key} to {SMALL_EPS:g}" if key else f"eps {eps:g} is fixed in the model's code: change it there to {SMALL_EPS:g}"
    return [
        f"{how}: at gamma 1 the first norm sees a variance of {variance:.2g}, and eps {eps:g} leaves {factor:.3g} of its output; "
        f"at most {variance * (SENSITIVE**-2 - 1):.2g} is negligible."
    ]
