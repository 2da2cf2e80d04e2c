"""The peer of moe.py: the mixture layer of `transformers`' DeepSeek-V3 on torch CPU, forward and backward for each line on stdin.

Runs in an interpreter of its own that has torch and transformers. The experts run through `grouped_mm`, what `transformers` takes by
default and ten times as fast as its `eager` loop. bf16 is torch.autocast over fp32 parameters, which leaves grouped_mm in fp32, or
parameters in bf16. Protocol: see train_step.py.
"""

import json
import sys
import time

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE


def layer(spec: dict, arrays) -> DeepseekV3MoE:
    config = transformers.DeepseekV3Config(
        hidden_size=spec["d_model"],
        moe_intermediate_size=spec["d_expert"],
        n_routed_experts=spec["n_experts"],
        num_experts_per_tok=spec["top_k"],
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    config._experts_implementation = "grouped_mm"
    moe = DeepseekV3MoE(config)
    own = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    with torch.no_grad():
        moe.gate.weight.copy_(own["router"].T)
        moe.experts.gate_up_proj.copy_(torch.cat([own["gate"], own["up"]], 2).mT)
        moe.experts.down_proj.copy_(own["down"].mT)
        for name in ("gate", "up", "down"):
            getattr(moe.shared_experts, f"{name}_proj").weight.copy_(own[f"shared_{name}"].T)
    return moe


def main(spec: dict) -> None:
    torch.set_num_threads(spec["threads"])
    arrays = np.load(spec["arrays"])
    dtype = torch.bfloat16 if spec["parameters"] == "bfloat16" else torch.float32
    moe = layer(spec, arrays).to(dtype)
    x_BTD, d_y_BTD = (torch.from_numpy(arrays[name]).to(dtype) for name in ("x", "d_y"))
    x_BTD.requires_grad_()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=spec["dtype"] == "bfloat16" and dtype == torch.float32):
            y_BTD = moe(x_BTD)
        loss = (y_BTD.float() * d_y_BTD.float()).sum()
        loss.backward()
        return loss.item()

    def norm() -> float:
        return torch.sqrt(sum(p.grad.double().square().sum() for p in (x_BTD, *moe.parameters()))).item()

    step()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    print(json.dumps(versions | {"gradient_norm": norm()}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        moe.zero_grad(set_to_none=True)
        x_BTD.grad = None
        loss = step()
        print(json.dumps({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": loss}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
