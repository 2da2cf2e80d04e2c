"""Small supervised nets on real tables: fully connected, any activation, any initializer (the second source, docs/second_source.md).

    mlp:data=mnist,std=0.1,optimizer=adam         784-64-32-32-10 on MNIST, every matrix of std .1
    mlp:data=wine-quality,preset=xavier_normal    11-16-32-32-1 on UCI Wine Quality

The source has these widths and this activation; batch, rates, epochs and how inputs are scaled are not in it, and are ours.
"""

from ml_collections import ConfigDict

from gammalm.config import typed_args
from gammalm.errors import ConfigError

WINE = (11, 16, 32, 32, 1)
WIDTHS = {"mnist": (784, 64, 32, 32, 10), "wine-red": WINE, "wine-quality": WINE}
BATCH = {"mnist": 64, "wine-red": 32, "wine-quality": 32}
EPOCHS = {"mnist": 5, "wine-red": 30, "wine-quality": 30}
RATES = {"sgd": 0.05, "adam": 1e-3}

# Argument -> default. Zero means "as the data or the optimizer say".
ARGS = {
    "data": "mnist",  # mnist | wine-red (red or white) | wine-quality (quality of at least 6)
    "preset": "kaiming_normal",  # the initializer of every matrix
    "std": 0.0,  # of every matrix, in place of the preset's
    "gamma": 1.0,  # read by preset fan_in, σ = fan_in^(−γ), and by rules
    "optimizer": "sgd",  # sgd | adam
    "lr": 0.0,  # of every step
    "epochs": 0,  # passes over the training examples
    "seed": 0,  # of the draw, the order and the split
    "path": "",  # a folder of `gammalm data prepare`; empty: the cache, fetched if need be
}


def get_config(arg: str = "") -> ConfigDict:
    """The locked config of one net; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name or a wrong type."""
    args = typed_args(arg, ARGS, where="configs/mlp.py")
    for name, given, known in (("data", args.data, WIDTHS), ("optimizer", args.optimizer, RATES)):
        if given not in known:
            raise ConfigError(f"configs/mlp.py: {name}={given!r} is none of {', '.join(known)}.")

    c = ConfigDict()
    c.seed = args.seed  # of the draw, of the order of the examples, and of which wines are kept for testing

    c.model = ConfigDict()
    c.model.widths = WIDTHS[args.data]  # inputs, hidden layers, outputs
    c.model.activation = "relu"  # relu | gelu | gelu_tanh | silu | tanh | elu
    c.model.biases = True  # they start at 0

    c.init = ConfigDict()
    c.init.preset = args.preset  # of every matrix (docs/initializers.md); rules come first
    c.init.gamma = args.gamma  # read by preset fan_in, σ = fan_in^(−γ), and by rules
    c.init.truncate = 0.0  # in standard deviations; 0: untruncated
    c.init.rules = (f"kernel=fixed_std(std={args.std!r})",) if args.std else ()  # "pattern=initializer", before the preset

    c.data = ConfigDict()
    c.data.name = args.data  # mnist | wine-red | wine-quality
    c.data.path = args.path  # folder of `gammalm data prepare`; empty: the cache, fetched if need be
    c.data.standardize = True  # inputs of mean 0 and variance 1 over the training examples: each feature, or all pixels together

    c.batch = ConfigDict()
    c.batch.examples = BATCH[args.data]  # of one optimizer step

    c.optimizer = ConfigDict()
    c.optimizer.kind = args.optimizer  # sgd (plain) | adam (optax's defaults)
    c.optimizer.learning_rate = args.lr or RATES[args.optimizer]  # of every step

    c.train = ConfigDict()
    c.train.epochs = args.epochs or EPOCHS[args.data]  # passes over the training examples
    return c.lock()
