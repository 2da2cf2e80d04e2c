"""γ language models: the paper's four dense sizes and two mixtures of experts, a 16-head 1.5B for comparison with other
trainers; for CPUs `tiny`, a ladder of four widths from `nano` to `nano-384`, and the mixtures `tiny-moe` and `mini-moe`; for one GPU
a ladder from `micro-96` to `micro-768` and the mixtures `micro-moe` and `midi-moe`.

    --config lm:size=125m,gamma=1.0,eps=1e-12,gate=elementwise,batch=8,steps=1000
    --config lm:size=moe-1.5b-a0.25b,attention=mla

Every argument has a type and a default (`ARGS`); every leaf of the config changes something, and a leaf that only one kind of
attention or feed-forward layer reads exists only there. Source: GPT-3's sizes with RMSNorm, SwiGLU and RoPE, DeepSeek's experts and
latent attention (the paper, sections 4.1 and 4.3); widths, warm-up and decay reconstructed (docs/science.md, section 9).
"""

import dataclasses

from ml_collections import ConfigDict

from gammalm.config import typed_args
from gammalm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture: routed experts, how many of them a token gets, experts that every token gets, the width of one expert, the bias step."""

    n_experts: int
    top_k: int
    n_shared: int
    d_expert: int
    bias_rate: float = 1e-3  # DeepSeek-V3's, for runs of many thousand steps


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of one model: layers, width, heads, head size, FFN width, FFN width under an elementwise gate, and how it is trained."""

    n_layers: int
    d_model: int
    n_heads: int
    head_dim: int
    d_ff: int
    d_ff_gated: int  # F − H·h/3 rounded to 16: keeps the parameter count within .2 % when the elementwise gate is added
    seq_len: int
    batch_tokens: int  # tokens per optimizer step
    learning_rate: float  # peak, GPT-3's
    vocab_size: int = 50304
    tie_embeddings: bool = True
    total_tokens: float = 36e9
    warmup_share: float = 375e6 / 36e9  # GPT-3's 375M tokens of warm-up within the paper's 36B
    experts: Experts | None = None


# A mixture's dense width (its first layers may be dense) is what a token gets of the experts; learning rates are GPT-3's at the active
# size. A run of tiny-moe has a few hundred steps, in which steps of 1e-3 could not move a bias as far as affinities differ.
SIZES = {
    "nano": Size(2, 48, 2, 24, 128, 112, 128, 4096, 1e-2, vocab_size=1024, total_tokens=2e6),
    "nano-96": Size(2, 96, 4, 24, 256, 224, 128, 4096, 7e-3, vocab_size=1024, total_tokens=6.4e6),
    "nano-192": Size(2, 192, 4, 48, 512, 448, 128, 4096, 5e-3, vocab_size=1024, total_tokens=22e6),
    "nano-384": Size(2, 384, 6, 64, 1024, 896, 128, 4096, 3.5e-3, vocab_size=1024, total_tokens=79e6),
    "micro-96": Size(4, 96, 4, 24, 256, 224, 512, 2**15, 7e-3, vocab_size=4096, total_tokens=17e6),
    "micro-192": Size(4, 192, 4, 48, 512, 448, 512, 2**15, 5e-3, vocab_size=4096, total_tokens=51e6),
    "micro-384": Size(4, 384, 6, 64, 1024, 896, 512, 2**15, 3.5e-3, vocab_size=4096, total_tokens=173e6),
    "micro-768": Size(4, 768, 12, 64, 2048, 1792, 512, 2**15, 2.5e-3, vocab_size=4096, total_tokens=629e6),
    "tiny": Size(2, 64, 2, 32, 176, 160, 128, 4096, 1e-2, vocab_size=2048, total_tokens=6e6),
    "125m": Size(12, 768, 12, 64, 2048, 1792, 2048, 2**19, 6e-4),
    "350m": Size(24, 1024, 16, 64, 2752, 2416, 2048, 2**19, 3e-4),
    "760m": Size(24, 1536, 16, 96, 4096, 3584, 2048, 2**19, 2.5e-4),
    "1.5b": Size(24, 2048, 24, 128, 5440, 4416, 2048, 2**20, 2e-4),
    "1.5b-16h": Size(24, 2048, 16, 128, 5440, 4752, 2048, 2**20, 2e-4, vocab_size=64000, tie_embeddings=False),
    "tiny-moe": Size(2, 64, 2, 32, 160, 160, 128, 4096, 1e-2, vocab_size=2048, total_tokens=6e6, experts=Experts(16, 4, 1, 32, 1e-2)),
    "mini-moe": Size(2, 128, 4, 32, 320, 320, 128, 4096, 7e-3, vocab_size=2048, total_tokens=20e6, experts=Experts(16, 4, 1, 64, 1e-2)),
    "micro-moe": Size(
        4, 192, 4, 48, 480, 480, 512, 2**15, 5e-3, vocab_size=4096, total_tokens=50e6, experts=Experts(16, 4, 1, 96, 1e-2)
    ),
    "midi-moe": Size(
        4, 384, 6, 64, 960, 960, 512, 2**15, 3.5e-3, vocab_size=4096, total_tokens=168e6, experts=Experts(16, 4, 1, 192, 1e-2)
    ),
    "moe-1.5b-a0.25b": Size(
        12, 1024, 16, 64, 3456, 3456, 2048, 2**20, 3.8e-4, vocab_size=64000, total_tokens=100e9, warmup_share=375e6 / 100e9,
        experts=Experts(96, 8, 1, 384),
    ),
    "moe-3b-a0.5b": Size(
        16, 1536, 12, 128, 3456, 3456, 2048, 2**20, 2.75e-4, vocab_size=64000, total_tokens=100e9, warmup_share=375e6 / 100e9,
        experts=Experts(96, 8, 1, 384),
    ),
}  # fmt: skip

# Argument -> default. Zero (or an empty text) means "as the size says".
ARGS = {
    "size": "125m",  # a dozen values at once: the table of sizes
    "gamma": 1.0,  # σ = d_in^(−γ)
    "style": "gamma",  # gamma | gpt2: LayerNorm, two-matrix GELU layers with biases, learned positions
    "preset": "",  # of init; fixup and deepnorm set what they change of the model as well. Empty: fan_in
    "eps": 0.0,  # 0: 1e-12, of style gpt2 1e-5
    "gate": "",  # none | headwise | elementwise; empty: elementwise, of style gpt2 none
    "attention": "mha",  # mha | mla
    "match_width": True,  # shrink F under the elementwise gate so that parameter counts match
    "vocab": 0,  # rows of the embedding
    "seq_len": 0,  # predicted tokens of a sequence
    "batch": 0,  # sequences per step
    "steps": 0,  # of the optimizer; 0: as many as the size's tokens take
    "lr": 0.0,  # at the peak
    "seed": 0,  # of the draw and of the order of the text
    "data": "data/open-mix",  # folder that `gammalm data prepare` wrote
    "mixture": "paper_dense",  # natural, a named one, or weights: web:3,code:1
    "packing": "concat",  # concat | documents
}

SHORT_RUN = 100  # a run of fewer steps is a trial: validating it on the whole split would take longer than training it


def get_config(arg: str = "") -> ConfigDict:
    """The locked config of one run; `arg` is `name=value,…` over `ARGS`. Raises ConfigError for an unknown name or a wrong type."""
    args = typed_args(arg, ARGS, where="configs/lm.py")
    if args.size not in SIZES:
        raise ConfigError(f"configs/lm.py: size={args.size!r} is none of {', '.join(SIZES)}.")
    if args.style not in ("gamma", "gpt2"):
        raise ConfigError(f"configs/lm.py: style={args.style!r} is none of gamma, gpt2.")
    if args.attention not in ("mha", "mla"):
        raise ConfigError(f"configs/lm.py: attention={args.attention!r} is none of mha, mla.")
    size = SIZES[args.size]
    gpt2 = args.style == "gpt2"
    if gpt2 and (size.experts or args.attention == "mla"):
        raise ConfigError("configs/lm.py: style=gpt2 has multi-head attention and dense layers; choose a dense size and attention=mha.")
    gate = args.gate or ("none" if gpt2 else "elementwise")
    seq_len = args.seq_len or size.seq_len
    batch = args.batch or max(1, size.batch_tokens // seq_len)
    steps = args.steps or max(1, round(size.total_tokens / (batch * seq_len)))

    c = ConfigDict()
    c.seed = args.seed  # of the draw of the weights, and of the order of the text

    c.model = ConfigDict()
    c.model.vocab_size = args.vocab or size.vocab_size  # rows of the embedding: at least the tokens of the corpus's tokenizer
    c.model.d_model = size.d_model  # width D of the residual stream
    c.model.n_layers = size.n_layers  # blocks: attention and a feed-forward layer each
    c.model.n_heads = size.n_heads  # query heads
    c.model.attention = args.attention  # mha | mla
    if args.attention == "mla":
        c.model.mla = ConfigDict()
        c.model.mla.q_rank = 0  # of the queries' latent; 0: none
        c.model.mla.kv_rank = size.d_model // 4  # of the latent of keys and values
        c.model.mla.nope_dim = size.head_dim  # of each query and key, without position
        c.model.mla.rope_dim = size.head_dim // 2  # of each query and key, rotated; all heads share the key's
        c.model.mla.v_dim = size.head_dim  # of each value
    else:
        c.model.n_kv_heads = size.n_heads  # key and value heads, each for as many queries; fewer than n_heads: grouped queries
        c.model.head_dim = size.head_dim  # of each query, key and value
        c.model.qk_norm = False  # RMSNorm of each query and key before RoPE
    c.model.attention_kernel = "auto"  # auto | blockwise | cudnn | splash
    c.model.ffn = "moe" if size.experts else "mlp" if gpt2 else "dense"  # dense: SwiGLU | mlp: two matrices | moe
    if gpt2:
        c.model.activation = "gelu_tanh"  # relu | gelu | gelu_tanh | silu | tanh
        c.model.biases = True  # of attention's matrices and the feed-forward layer's
    if size.experts:
        c.model.moe = ConfigDict()
        c.model.moe.n_experts = size.experts.n_experts  # routed experts of a layer
        c.model.moe.top_k = size.experts.top_k  # experts that a token gets
        c.model.moe.n_shared = size.experts.n_shared  # experts that every token gets
        c.model.moe.d_expert = size.experts.d_expert  # feed-forward width of one expert
        c.model.moe.first_k_dense = 0  # layers before the first mixture, with an FFN of width d_ff
        c.model.moe.score = "sigmoid"  # sigmoid | softmax
        c.model.moe.route_scale = 1.0  # of the gates, which sum to 1 before
        c.model.moe.bias_rate = size.experts.bias_rate  # step of the selection bias against unequal load; 0: none
        c.model.moe.balance_loss = 1e-4  # weight of the sequence-wise balance loss; 0: none
        c.model.moe.backend = "auto"  # auto | dense | blocked | ragged | tokamax
    # feed-forward width F; of a mixture, of its first dense layers
    c.model.d_ff = 4 * size.d_model if gpt2 else size.d_ff_gated if gate == "elementwise" and args.match_width else size.d_ff
    # rms | layer | none | fixup: what normalises, or stands in its place
    c.model.norm = "fixup" if args.preset == "fixup" else "layer" if gpt2 or args.preset == "deepnorm" else "rms"
    c.model.norm_eps = args.eps or (1e-5 if gpt2 else 1e-12)  # added to the mean square (or variance) under the norms' root
    c.model.residual = "deepnorm" if args.preset == "deepnorm" else "pre"  # pre | post | deepnorm: where a branch is normalised
    c.model.gate = gate  # none | headwise | elementwise
    c.model.softmax_sink = "none"  # one more term in the softmax's denominator: none | one (exp 0) | learned (exp s, an s per head)
    c.model.tie_embeddings = size.tie_embeddings and args.preset != "fixup"  # head and embedding are one; fixup's head starts at 0
    c.model.positions = "learned" if gpt2 else "rope"  # rope | learned
    if gpt2:
        c.model.max_positions = seq_len  # that are learned
    else:
        c.model.rope_theta = 10_000.0  # base of RoPE's wavelengths
    c.model.logit_softcap = 0.0  # 0: none
    c.model.dtype = "bfloat16"  # of matrix products; norms, softmax and loss are fp32 always
    c.model.residual_dtype = "bfloat16"  # of the residual stream between blocks
    c.model.remat = "none" if args.size.startswith(("nano", "tiny", "mini")) else "full"  # none | dots | full
    c.model.scan_unroll = 1  # layers compiled side by side per scan step
    c.model.loss_chunk = 1024  # tokens whose logits exist at one time; 0: all

    c.init = ConfigDict()
    c.init.preset = args.preset or "fan_in"  # who gets which initializer (docs/initializers.md)
    c.init.gamma = args.gamma  # σ = base^(−γ), base: what the preset says, of fan_in the fan-in
    c.init.group_gammas = (args.gamma,) * 4  # embedding+head, qk, vo, ffn: read by preset "groups" alone
    c.init.base_width = 256  # d_model at which preset "mup" is "fan_in": read by it alone
    c.init.depth_scale = False  # whether outputs into the residual stream are divided by √(2·n_layers)
    c.init.truncate = 0.0  # in standard deviations; 0: untruncated
    c.init.rules = ()  # "pattern=initializer" texts, first match wins, before the preset's own rules

    c.data = ConfigDict()
    c.data.path = args.data  # folder that `gammalm data prepare` wrote
    c.data.mixture = args.mixture  # natural, a named one such as paper_dense, or weights: web:3,code:1
    c.data.packing = args.packing  # concat | documents
    c.data.loss = "all"  # all | last: every token of a document is predicted, or its last one alone
    c.data.seq_len = seq_len  # predicted tokens of a sequence

    c.batch = ConfigDict()
    c.batch.sequences = batch  # of one optimizer step
    c.batch.micro_batches = 1  # parts of a batch whose gradients are summed, one after another

    c.optimizer = ConfigDict()
    c.optimizer.kind = "adamw"  # adamw | muon (of the layers' matrices; the rest follows AdamW)
    c.optimizer.learning_rate = args.lr or size.learning_rate  # at the peak, after warm-up
    c.optimizer.b1 = 0.9  # decay of AdamW's first moment
    c.optimizer.b2 = 0.95  # decay of AdamW's second moment
    c.optimizer.eps = 1e-8  # beside the root of AdamW's second moment; of Muon, beside the norm
    c.optimizer.weight_decay = 0.1  # times the learning rate; not of the roles in no_decay
    c.optimizer.no_decay = ("norm", "bias") if gpt2 or args.preset in ("fixup", "deepnorm") else ("norm",)  # roles without weight decay
    c.optimizer.clip = 1.0  # global gradient norm; 0: none
    c.optimizer.schedule = "cosine"  # cosine | wsd | constant
    c.optimizer.warmup_steps = round(steps * size.warmup_share)  # linear from 0
    c.optimizer.final_fraction = 0.1  # of the peak rate, at the last step
    c.optimizer.cooldown_share = 0.2  # share of the steps that wsd spends decaying

    c.train = ConfigDict()
    c.train.steps = steps  # optimizer steps of the run
    c.train.log_every = max(1, min(10, steps // 100))  # steps
    c.train.validate_every = 0  # steps; 0: at the end alone
    c.train.validation_batches = 0 if steps >= SHORT_RUN else 1  # per domain; 0: the whole split
    c.train.checkpoint_every = max(1, min(1000, steps // 4))  # steps; the last is saved always
    c.train.checkpoints_kept = 2  # the newest so many
    c.train.stall_timeout = 1800.0  # seconds without a finished step after which a run is ended; 0: never
    c.train.tracker = "none"  # none | wandb: where numbers go beside TensorBoard (docs/training.md)
    c.train.spike = "off"  # off | skip | rollback: what to do about a loss far above those of the steps before
    c.train.spike_window = 128  # steps before, from whose losses the bound comes
    c.train.spike_sigma = 6.0  # the bound: their median and so many times their spread
    c.train.spike_rollbacks = 3  # after so many the next spike ends the run

    c.monitor = ConfigDict()  # what is measured of the model while it trains (docs/analysis.md)
    c.monitor.kinds = ()  # of sink, flow, norm, condensation, weights
    c.monitor.points = 24  # steps, log-spaced from 1 to train.steps; and step 0

    c.downstream = ConfigDict()  # benchmarks that the model is tested on while it trains (docs/evaluation.md)
    c.downstream.tasks = ()  # of lm-evaluation-harness
    c.downstream.steps = ()  # after these steps (0: before the first), and after the last
    c.downstream.limit = 0  # the first items of each task; 0: all
    c.downstream.offline = False  # items from the package registry, as gammalm eval --offline
    c.downstream.include = ""  # folder of further tasks as YAML files; empty: none

    c.mesh = ConfigDict()  # sizes of the mesh axes; -1: what is left of the devices
    c.mesh.data = -1  # shares out rows of the batch
    c.mesh.fsdp = 1  # rows of the batch, and parameters along D
    c.mesh.expert = 1  # rows of the batch, and routed experts
    c.mesh.context = 1  # tokens of each sequence
    c.mesh.tensor = 1  # parameters along V, H, G, F
    c.mesh.dcn_data = 1  # of mesh.data, the factor that lies between slices (or hosts) and not within one
    c.mesh.dcn_fsdp = 1  # of mesh.fsdp, likewise
    return c.lock()
