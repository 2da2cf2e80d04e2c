"""Writes _gpu_configs.json, the configs of gpu_check.py, where ml_collections is installed: a bare GPU image cannot load configs/lm.py.

    python benchmarks/_gpu_configs.py

A test compares the file with configs/lm.py; run this again when it says that they differ.
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().with_suffix(".json")
SPECS = {
    "125m": ("lm:size=125m", []),
    "1.5b": ("lm:size=1.5b", []),
    "moe-1.5b-a0.25b": ("lm:size=moe-1.5b-a0.25b", []),
    "10m": (
        "lm:size=tiny,vocab=12288",
        [("model.d_model", 256), ("model.n_layers", 8), ("model.n_heads", 4), ("model.n_kv_heads", 4), ("model.head_dim", 64),
         ("model.d_ff", 704)],
    ),
    "tiny": ("lm:size=tiny", []),
    "tiny-moe": ("lm:size=tiny-moe", []),
    "nano": ("lm:size=nano", []),
}  # fmt: skip
SECTIONS = ("model", "init", "optimizer")


def configs() -> dict[str, dict]:
    """Name -> the SECTIONS of its config, as JSON reads them back."""
    from gammalm.config import load_config, to_dict, validate

    found = {}
    for name, (spec, overrides) in SPECS.items():
        whole = to_dict(validate(load_config(spec, overrides)))
        found[name] = {section: whole[section] for section in SECTIONS}
    return json.loads(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(FILE.parents[1]))
    FILE.write_text(json.dumps(configs(), indent=1) + "\n", encoding="utf-8")
