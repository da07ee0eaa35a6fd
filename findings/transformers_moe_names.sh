#!/usr/bin/env bash
# transformers 5.23.0: the weights of a mixture of experts have other names in the model than in the folder it saves.
#
# In memory the experts of a Qwen3-MoE or Mixtral layer are one tensor of three dimensions, `experts.gate_up_proj`;
# `save_pretrained` writes one matrix an expert, `experts.0.gate_proj.weight`, as older releases did.  Code that sends
# `model.named_parameters()` to a serving engine (vLLM's load_weights reads the names of folders), or writes its
# `state_dict()` with safetensors, gets names and shapes that nobody reads.  Let `save_pretrained(state_dict=...)` write
# them, or split the tensors.  Dense families have the same names in both places.
# Exits with 0 while this is so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
"$work/venv/bin/python" - "$work/model" <<'EOF'
import sys
from pathlib import Path

from safetensors import safe_open
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config, Qwen3MoeConfig

sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
sizes |= dict(num_key_value_heads=2, head_dim=4, tie_word_embeddings=False)
configs = {
    "qwen3_moe": Qwen3MoeConfig(**sizes, moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1),
    "mixtral": MixtralConfig(**sizes, num_local_experts=2, num_experts_per_tok=1),
    "qwen3": Qwen3Config(**sizes),
}
same = {}
for name, config in configs.items():
    model = AutoModelForCausalLM.from_config(config)
    folder = Path(sys.argv[1]) / name
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = set(file.keys())
    held = {name for name, _ in model.named_parameters()}
    same[name] = held == saved
    print(name, "only in memory:", sorted(held - saved)[:2], "only in the folder:", sorted(saved - held)[:2])
assert same == {"qwen3_moe": False, "mixtral": False, "qwen3": True}, f"transformers has changed: {same}"
EOF
