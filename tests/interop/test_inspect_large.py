"""A model of seven billion weights in files that are mostly holes: read within 2 GiB of memory, and right where numbers were written."""

import json
import math
import struct
import subprocess
import sys

import numpy as np
import pytest

from gammalm.analysis.stored import random_stable_rank

D, F, V, LAYERS = 4096, 11008, 32000, 32
SHARD = 4 * 10**9  # bytes
PROGRAM = """
import json, resource, sys
from gammalm.inspection import inspect_model
found = inspect_model(sys.argv[1])
print(json.dumps({"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "total": found["parameters"]["total"],
                  "rows": [r for r in found["matrices"] if r["std"]],
                  "ranked": [r["layer"] for r in found["matrices"] if r["stable_rank"] is not None],
                  "count": len(found["matrices"])}))
"""


def shapes():
    yield "model.embed_tokens.weight", (V, D)
    for i in range(LAYERS):
        for name, shape in (("self_attn.q_proj", (D, D)), ("self_attn.k_proj", (D, D)), ("self_attn.v_proj", (D, D)),
                            ("self_attn.o_proj", (D, D)), ("mlp.gate_proj", (F, D)), ("mlp.up_proj", (F, D)),
                            ("mlp.down_proj", (D, F))):  # fmt: skip
            yield f"model.layers.{i}.{name}.weight", shape
        yield f"model.layers.{i}.input_layernorm.weight", (D,)
        yield f"model.layers.{i}.post_attention_layernorm.weight", (D,)
    yield "model.norm.weight", (D,)
    yield "lm_head.weight", (V, D)


def write_sparse(folder, filled):
    """Shards of F16 whose bytes are holes but for the tensors `filled`, name -> std; a hole reads as zeros and takes no disk."""
    shards, size = [[]], 0
    for name, shape in shapes():
        nbytes = 2 * math.prod(shape)
        if size + nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append((name, shape, nbytes))
        size += nbytes
    where = {}
    for n, shard in enumerate(shards):
        header, end, file = {}, 0, f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        for name, shape, nbytes in shard:
            header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
            end += nbytes
            where[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for name, shape, _ in shard:
                if name in filled:
                    stream.seek(8 + len(text) + header[name]["data_offsets"][0])
                    rng = np.random.default_rng(0)
                    for _ in range(shape[0] // 64):
                        stream.write((rng.standard_normal((64, shape[1]), np.float32) * filled[name]).astype(np.float16).tobytes())
            stream.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    llama = {"model_type": "llama", "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS,
             "num_attention_heads": 32, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(llama))


@pytest.mark.long
def test_seven_billion_weights_within_two_gib(tmp_path):
    filled = {"model.layers.0.self_attn.q_proj.weight": 0.02, "model.layers.31.mlp.down_proj.weight": 0.001, "lm_head.weight": 0.02}
    write_sparse(tmp_path, filled)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total"] == sum(math.prod(shape) for _, shape in shapes()) == 6_738_415_616
    assert found["rss"] < 2 * 2**30, f"{found['rss'] / 2**30:.2f} GiB"
    assert found["count"] == 2 + 7 * LAYERS and sorted({layer for layer in found["ranked"] if layer is not None}) == [0, 8, 16, 23, 31]
    assert {row["name"]: row["std"] for row in found["rows"]} == pytest.approx(filled, rel=1e-3)
    for row in found["rows"]:
        assert row["gamma"] == pytest.approx(-math.log(filled[row["name"]]) / math.log(row["fan_in"]), abs=1e-3)
        assert row["stable_rank"] == pytest.approx(random_stable_rank(row["rows"], row["columns"]), rel=0.02)
        assert row["near_zero"] == pytest.approx(math.erf(0.1 / 2**0.5), abs=1e-3)
