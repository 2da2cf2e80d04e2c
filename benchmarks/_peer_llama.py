"""The peer of train_step.py: a `transformers` Llama trained by plain torch on the CPU, one step for each line on stdin.

Runs in an interpreter of its own that has torch and transformers. Eager mode, sdpa attention, fused AdamW, gradient clipping; in bf16
under torch.autocast over fp32 parameters. Protocol: see train_step.py.
"""

import json
import sys
import time

import numpy as np
import torch
import transformers


def main(spec: dict) -> None:
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=spec["vocab_size"],
        hidden_size=spec["d_model"],
        intermediate_size=spec["d_ff"],
        num_hidden_layers=spec["n_layers"],
        num_attention_heads=spec["n_heads"],
        num_key_value_heads=spec["n_heads"],
        head_dim=spec["head_dim"],
        max_position_embeddings=spec["seq_len"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    batches = torch.from_numpy(np.load(spec["tokens"]).astype(np.int64))  # [batches, B, T + 1]

    def step(i: int) -> float:
        tokens = batches[i % len(batches)]
        with torch.autocast("cpu", torch.bfloat16, enabled=spec["dtype"] == "bfloat16"):
            logits = model(input_ids=tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}), flush=True)
    for i, _ in enumerate(sys.stdin):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(i)
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": loss}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
