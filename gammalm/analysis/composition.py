"""What a model answers in the composition task: rightly on pairs of functions it was shown, and how on the pair it was not.

Shape legend: B examples, T tokens of an example without its answer; int32 arrays.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

AT_ONCE = 1024  # examples of a forward pass


@dataclasses.dataclass(frozen=True)
class Answers:
    """Shares of answers, each from 0 to 1.

    seen: of right ones over all pairs that were shown, which count alike. by_pair: of right ones for each of them. composed, mirrored: of
    those on the unseen pair that follow from its functions, or from what its mirror image was given; the rest is `other`.
    """

    seen: float
    by_pair: dict[tuple[int, int], float]
    composed: float
    mirrored: float
    examples: int  # of the unseen pair

    @property
    def other(self) -> float:
        return 1.0 - self.composed - self.mirrored


def answer(model, params, buffers, tokens_BT) -> np.ndarray:
    """int32 [B]: the likeliest token after each example, by the model's own forward pass."""

    @jax.jit
    def likeliest(params, buffers, tokens_BT):
        logits_BTV = model.bind(params, buffers).logits(tokens_BT, None, jnp.float32(model.config.norm_eps))
        return jnp.argmax(logits_BTV[:, -1], axis=-1).astype(jnp.int32)

    parts = [likeliest(params, buffers, tokens_BT[at : at + AT_ONCE]) for at in range(0, len(tokens_BT), AT_ONCE)]
    return np.concatenate([np.asarray(part) for part in parts])


def judge(given_B, pair_B2, unseen: tuple[int, int], expected_B, mirrored_B) -> Answers:
    """Counts the answers `given_B` to examples of the pairs `pair_B2`: `expected_B` is right for a pair that was shown, and composed for
    the pair `unseen`, for which `mirrored_B` is what the mirror image was given.

    Raises ValueError where the unseen pair, or every other, has no example.
    """
    right_B = given_B == expected_B
    of = {pair: (pair_B2 == np.array(pair)).all(axis=1) for pair in dict.fromkeys(map(tuple, pair_B2.tolist()))}
    if unseen not in of or len(of) == 1:
        raise ValueError(f"examples of {unseen} and of other pairs are needed; there are those of {sorted(of)}")
    own_B = of.pop(unseen)
    by_pair = {pair: float(right_B[rows_B].mean()) for pair, rows_B in of.items()}
    mirrored = float((given_B == mirrored_B)[own_B].mean())
    return Answers(float(np.mean(list(by_pair.values()))), by_pair, float(right_B[own_B].mean()), mirrored, int(own_B.sum()))
