"""The papers' tables of hyperparameters (tables 2 and 3), read from the grids' own configs: a table cannot say another thing than a run.

The source's tables are lost; captions and rows are what its text names (docs/science.md, section 9).
"""

from gammalm.config import call
from gammalm.errors import ConfigError
from gammalm.models.decoder import Model

# Id -> (caption, the grid whose cells are its columns).
TABLES = {
    "table2": ("Architecture and training hyperparameters of the dense models", "grids/paper_dense"),
    "table3": ("Architecture and training hyperparameters of the mixture-of-experts models", "grids/paper_moe"),
}


def hyperparameters(table: str, arg: str = "") -> dict:
    """{"id", "caption", "columns": sizes, "rows": [{"name", "values"}]} of a table in TABLES; `arg` goes to its grid.

    One column per size. Where the arms of a size differ (ε, gate, FFN width, parameters) a value lists them, plain first.
    Raises ConfigError for another table.
    """
    if table not in TABLES:
        raise ConfigError(f"figure {table!r} is none of {', '.join(TABLES)}.")
    caption, grid = TABLES[table]
    by_size: dict[str, list] = {}
    for cell in call(f"{grid}:{arg}", "get_grid").cells:
        by_size.setdefault(cell.labels["size"], []).append(cell.config())
    columns = [[_facts(config) for config in configs] for configs in by_size.values()]
    names = list(dict.fromkeys(name for column in columns for facts in column for name in facts))
    rows = [{"name": name, "values": [_merged(column, name) for column in columns]} for name in names]
    return {"id": table, "caption": caption, "columns": list(by_size), "rows": rows}


def _merged(column: list[dict], name: str) -> str:
    """The different values that a size's runs have of one fact, in their order."""
    return " / ".join(dict.fromkeys(facts[name] for facts in column if name in facts))


def _facts(config) -> dict[str, str]:
    """Name -> printed value of everything that a reader needs to repeat the run."""
    m, o, tokens = config.model, config.optimizer, config.batch.sequences * config.data.seq_len
    model = Model(m)
    total, active = model.parameter_count, model.active_parameter_count
    facts = {"parameters": f"{total:,}"}
    if active != total:
        facts["active parameters"] = f"{active:,}"
    facts |= {"layers": f"{m.n_layers}", "width d": f"{m.d_model}"}
    if m.attention == "mla":
        facts |= {
            "attention": f"MLA, {m.n_heads} heads of {m.mla.nope_dim}+{m.mla.rope_dim}, values of {m.mla.v_dim}",
            "latent ranks": f"queries {m.mla.q_rank or 'none'}, keys and values {m.mla.kv_rank}",
        }
    else:
        facts["attention"] = f"MHA, {m.n_heads} heads of {m.head_dim}"
    if m.ffn == "moe":
        facts |= {
            "routed experts": f"{m.moe.n_experts}",
            "experts per token": f"{m.moe.top_k}",
            "shared experts": f"{m.moe.n_shared}",
            "expert width": f"{m.moe.d_expert}",
            "router": f"{m.moe.score}, bias step {m.moe.bias_rate:g}, balance loss {m.moe.balance_loss:g}",
        }
    else:
        facts["FFN width F"] = f"{m.d_ff}"
    return facts | {
        "norm eps": f"{m.norm_eps:g}",
        "attention gate": m.gate,
        "vocabulary": f"{m.vocab_size}, {'tied' if m.tie_embeddings else 'untied'}",
        "initialization rate": f"{config.init.gamma:g}",
        "tokens": f"{config.train.steps * tokens / 1e9:.1f}B",
        "sequence length": f"{config.data.seq_len}",
        "tokens per step": f"{tokens:,}",
        "steps": f"{config.train.steps:,}",
        "peak learning rate": f"{o.learning_rate:g}",
        "schedule": f"{o.schedule} to {o.final_fraction:g}, warm-up {o.warmup_steps:,} steps",
        "AdamW": f"beta {o.b1:g}, {o.b2:g}, eps {o.eps:g}, decay {o.weight_decay:g}",
        "gradient clip": f"{o.clip:g}",
        "compute": f"{m.dtype}, fp32 parameters, sums and softmax",
        "data mixture": f"{config.data.mixture}, {config.data.packing}",
    }


def format_hyperparameters(table: dict) -> str:
    """The table as a Markdown table under its caption."""
    lines = [["", *table["columns"]], *([row["name"], *row["values"]] for row in table["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return f"{table['id']}: {table['caption']}\n\n" + "\n".join(text) + "\n"
