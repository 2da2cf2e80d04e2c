"""What initialization to use for a net or a decoder of given sizes, why, and what to expect of it before the first step. Nothing is built.

Every figure is theory's (docs/theory.md), and what is advised follows from the figures by the rules stated here. Dicts are JSON-ready;
gains are in root mean square. Legend: L layers, d width.
"""

import itertools
import math

import numpy as np

from gammalm.errors import ConfigError
from gammalm.initializers import ZOO
from gammalm.theory import Decoder, Dense, Heads, balance_gamma, gamma_decoder, half_point, norm_factor, predict
from gammalm.theory.activations import c_phi, d_phi
from gammalm.theory.gradients import stream_gradients
from gammalm.theory.mlp import DIRECTIONS, Mlp, critical_std, critical_stds, signals, stable_band

FACTOR = 10.0  # beyond which signals or gradients count as shrinking or growing
SCHEMES = {  # that a net is compared with
    "kaiming_normal": ZOO["kaiming_normal"](), "xavier_normal": ZOO["xavier_normal"](), "lecun_normal": ZOO["lecun_normal"](),
    "torch_linear": ZOO["torch_linear"](), "fixed_std 0.02": ZOO["fixed_std"](0.02), "gamma_normal 1": ZOO["gamma_normal"](1.0),
}  # fmt: skip
GAMMAS = (0.5, 0.75, 1.0, 1.25)
BALANCED = "gamma 1, ffn 0.833"  # SwiGLU at the gamma that balances it beside an embedding at 1
HEAD = 64  # size of a head
SENSITIVE = 0.99  # norm factor from which ε counts as negligible


def advise_mlp(widths: tuple[int, ...], activation: str = "relu", second_moment: float = 1.0) -> dict:
    """Advice for a fully connected net: stds per layer and the rules that set them, gains by layer, the band of one std for all, schemes.

    second_moment: mean square of an input's entries, 1 where they are standardized. ConfigError for sizes or an activation that are none.
    """
    if not 0 < second_moment < math.inf:
        raise ConfigError(f"advise: the mean square of the inputs must be above 0, not {second_moment:g}.")
    stds = {direction: critical_stds(widths, activation, direction, second_moment) for direction in DIRECTIONS}
    drift = _spread(signals(Mlp(widths, activation, stds["forward"]), second_moment).gradient)
    use = "forward" if drift <= FACTOR else "compromise"
    found = signals(Mlp(widths, activation, stds[use]), second_moment)
    schemes = [_scheme(name, widths, activation, second_moment) for name in SCHEMES]
    closest = min(schemes, key=lambda row: _distance(row["stds"], stds[use]))
    c, d = float(c_phi(activation, 1.0)), float(d_phi(activation, 1.0))
    one = {direction: critical_std(widths, activation, direction, second_moment) for direction in DIRECTIONS}
    band = stable_band(widths, activation, second_moment, FACTOR)
    reasons = [
        f"{activation} passes on c = {c:.6f} of a unit variance and d = {d:.6f} of a gradient's: signals keep their size at "
        f"sigma^2 = 1/(c n_in), gradients at 1/(d n_out); the first layer's input is no activation, so that it has no c.",
        f"With the forward stds gradients differ by a factor of {drift:.3g} between layers"
        + (f", within {FACTOR:g}: keep signals." if use == "forward" else f", more than {FACTOR:g}: take the mean of both conditions."),
        f"{closest['scheme']} comes closest, within a factor of {_distance(closest['stds'], stds[use]):.3g} in every layer.",
    ]
    layers = [
        {
            "layer": n + 1, "shape": [fan_in, fan_out], **{direction: stds[direction][n] for direction in DIRECTIONS},
            "use": stds[use][n], "signal": math.sqrt(found.variance[n]), "gradient": math.sqrt(found.gradient[n]),
        }
        for n, (fan_in, fan_out) in enumerate(itertools.pairwise(widths))
    ]  # fmt: skip
    return {
        "arch": "mlp", "widths": list(widths), "activation": activation, "input_moment": second_moment, "c_phi": c, "d_phi": d,
        "use": use, "closest": closest["scheme"], "reasons": reasons, "layers": layers,
        "rules": [f"layer{row['layer']}/kernel=fixed_std(std={row['use']:.4g})" for row in layers],
        "one_std": one | {"band": list(band) if band else None, "factor": FACTOR}, "schemes": schemes,
    }  # fmt: skip


def _scheme(name: str, widths, activation: str, second_moment: float) -> dict:
    """What a named initializer makes of the net."""
    stds = tuple(float(SCHEMES[name].std(*fans)) for fans in itertools.pairwise(widths))
    found = signals(Mlp(widths, activation, stds), second_moment)
    signal, gradient = math.sqrt(found.forward_gain), math.sqrt(found.gradient[0])
    verdict = f"signals {_word(signal)}, gradients {_word(gradient)}"
    return {"scheme": name, "stds": list(stds), "signal_gain": signal, "gradient_gain": gradient, "verdict": verdict}


def _word(gain: float) -> str:
    return "shrink" if gain < 1 / FACTOR else "grow" if gain > FACTOR else "keep"


def _spread(mean_squares) -> float:
    """The largest root mean square over the smallest."""
    return float(np.sqrt(np.max(mean_squares) / np.min(mean_squares)))


def _distance(stds, others) -> float:
    """The factor within which two lists of stds agree."""
    return max(max(a / b, b / a) for a, b in zip(stds, others, strict=True))


def advise_decoder(d: int, n_layers: int, *, d_ff: int = 0, activation: str = "swiglu", gate: str = "elementwise", eps: float = 1e-12,
                   vocab: int = 50304, context: int = 256) -> dict:  # fmt: skip
    """Advice for a pre-norm decoder with heads of 64: γ, ε and depth scaling, and what γ's make of stream, branches and gradients.

    d_ff: 0 for 8d/3 of SwiGLU and 4d of two matrices. context: tokens of the text that is assumed, whose ranks have frequencies 1/(rank +
    2.7). The advice is γ = 1 with a small ε, which the paper proposes [S], and what theory finds beside it [C]. ConfigError.
    """
    if d % HEAD or n_layers < 1 or not 0 < eps < math.inf:
        raise ConfigError(f"advise: width {d} must be a multiple of {HEAD}, layers {n_layers} at least 1, and eps {eps:g} above 0.")
    swiglu = activation == "swiglu"
    d_ff = d_ff or (round(8 * d / 3 / 16) * 16 if swiglu else 4 * d)
    p = 1 / (np.arange(vocab) + 3.7)
    tokens = np.random.default_rng(0).choice(vocab, context + 1, p=p / p.sum())

    def decoder(gamma: float, **kind) -> Decoder:
        return gamma_decoder(d_model=d, vocab_size=vocab, n_layers=n_layers, attention=Heads(d // HEAD, HEAD), ffn=Dense(d_ff, activation),
                             gamma=gamma, eps=eps, gate=gate, **kind)  # fmt: skip

    balanced = {BALANCED: decoder(1.0, gammas={"ffn": balance_gamma(3, 1.0)})} if swiglu else {}
    described = {f"gamma {gamma:g}": decoder(gamma) for gamma in GAMMAS} | balanced
    described["gamma 1, depth scaling"] = decoder(1.0, depth_scale=True)
    rows, streams = [], {}
    for name, one in described.items():
        found, gradient = predict(one, tokens[:-1]), stream_gradients(one, tokens[:-1], tokens[1:])
        streams[name] = (found, gradient)
        rows.append({"init": name, "norm_factor": math.sqrt(found.embed / (found.embed + eps)), "logit_std": found.logit_std,
                     "flow": found.flow, "attention": float(found.attn_update[0]), "ffn": float(found.ffn_update[0]),
                     "gradient_gain": float(np.sqrt(gradient[0] / gradient[-1]))})  # fmt: skip
    found, gradient = streams["gamma 1"]
    layers = [
        {"layer": n, "stream": math.sqrt(found.attn_in[n] / found.embed), "attention": float(found.attn_update[n]),
         "ffn": float(found.ffn_update[n]), "gradient": math.sqrt(gradient[n] / gradient[-1])}
        for n in range(n_layers)
    ]  # fmt: skip
    factor, highest = float(norm_factor(1.0, eps, d)), float(d**-2.0 * (SENSITIVE**-2 - 1))
    by_name = {row["init"]: row for row in rows}
    use = {"gamma": 1.0, "eps": eps if factor >= SENSITIVE else float(f"{10 ** math.floor(math.log10(highest)):.0e}")}
    return {
        "arch": "decoder", "d_model": d, "n_layers": n_layers, "d_ff": d_ff, "activation": activation, "gate": gate, "eps": eps,
        "vocab": vocab, "context": context, "use": use, "reasons": _decoder_reasons(d, eps, factor, highest, gate, swiglu, by_name),
        "inits": rows, "layers": layers,
    }  # fmt: skip


def _decoder_reasons(d: int, eps: float, factor: float, highest: float, gate: str, swiglu: bool, rows: dict) -> list[str]:
    one, scaled = rows["gamma 1"], rows["gamma 1, depth scaling"]
    reasons = [
        f"gamma 1: sigma = 1/d_in for every matrix. A branch of two matrices then neither grows nor vanishes with the width against the "
        f"embedding (balance at gamma {balance_gamma(2):g}), and logits start at std {one['logit_std']:.3g} instead of about 1.",
        f"eps {eps:g} leaves {factor:.3g} of the first norm's output at gamma 1"
        + (
            ": it is negligible."
            if factor >= SENSITIVE
            else f": it hides the scale, half of it from gamma {float(half_point(eps, d)):.3g} up. Take eps of at most {highest:.2g}."
        ),
        f"At gamma 1 the branches together are {one['flow']:.3g} of the embedding"
        + (" with the gate, which halves attention's part." if gate != "none" else "; a sigmoid gate would halve attention's part.")
        + f" Gradients grow {one['gradient_gain']:.3g}-fold on their way down. Depth scaling, 1/sqrt(2L) on what writes into the stream, "
        f"would make that {scaled['flow']:.3g} and {scaled['gradient_gain']:.3g}.",
    ]
    if swiglu:
        reasons.append(
            f"SwiGLU multiplies three matrices: at gamma 1 its part falls as d^-1/2, to {one['ffn']:.2g} of the stream here. Beside an "
            f"embedding at gamma 1 it balances at {balance_gamma(3, 1.0):.3g}, with {rows[BALANCED]['ffn']:.2g}; as a rule: "
            f"layers/ffn=gamma_normal(gamma={balance_gamma(3, 1.0):.4g})."
        )
    return reasons
