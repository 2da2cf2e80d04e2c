"""A fully connected net over plain dicts of arrays, its weights declared like a decoder's, so that initializers and rules serve both.

Shape legend: B examples, I inputs, O outputs, of the net or of one of its layers.
"""

import jax
import jax.numpy as jnp
import optax

from gammalm.initializers import ParamSpec
from gammalm.models.parts import ACTIVATIONS


class Net:
    """widths I … O; parameters layer1/kernel [I, O], layer1/bias [O], … in fp32, the activation between layers and not behind the last.

    `config` is `config.model` of configs/mlp.py. `specs`: path -> ParamSpec; layers are not stacked, as their shapes differ.
    """

    def __init__(self, config):
        self.config = config
        self.layers = tuple(f"layer{number}" for number in range(1, len(config.widths)))
        self.specs: dict[str, ParamSpec] = {}
        for i, layer in enumerate(self.layers):
            shape, last = tuple(config.widths[i : i + 2]), i == len(self.layers) - 1
            self.specs[f"{layer}/kernel"] = ParamSpec(shape, ("in", "out"), ("in",), ("out",), "head" if last else "ffn")
            if config.biases:
                self.specs[f"{layer}/bias"] = ParamSpec(shape[1:], ("out",), (), (), "bias")

    def __call__(self, params, x_BI):
        """Outputs [B, O] of inputs [B, I], fp32."""
        phi = ACTIVATIONS[self.config.activation]
        for layer in self.layers:
            x_BI = x_BI @ params[layer]["kernel"]
            if "bias" in params[layer]:
                x_BI = x_BI + params[layer]["bias"][None]
            if layer != self.layers[-1]:
                x_BI = phi(x_BI)
        return x_BI


def loss_and_hits(outputs_BO, y_B):
    """(loss, hit) of each example, [B] each: cross-entropy in nats and whether the likeliest class is right.

    One output is the logit of class 1 of two; several are the logits of as many classes.
    """
    if outputs_BO.shape[-1] == 1:
        logit_B = outputs_BO[:, 0]
        return optax.sigmoid_binary_cross_entropy(logit_B, y_B.astype(jnp.float32)), (logit_B > 0) == (y_B == 1)
    right_BO = jax.nn.one_hot(y_B, outputs_BO.shape[-1])
    return optax.softmax_cross_entropy(outputs_BO, right_BO), jnp.argmax(outputs_BO, axis=-1) == y_B
