"""TRL's GRPOTrainer whose rollouts run on `vllm serve` with the plug-in: docs/vllm.md has the commands.

python trl_on_vllm.py http://127.0.0.1:8000 MODEL
"""

import json
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from datasets import Dataset
from safetensors.torch import save_file
from trl import GRPOConfig, GRPOTrainer

SERVER, MODEL = sys.argv[1:3]
WEIGHTS = f"{tempfile.mkdtemp()}/policy.safetensors"  # the server reads it: same machine, or a shared folder


def ask(path, **body):
    request = urllib.request.Request(SERVER + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read() or "null")


def complete(prompt, seed):
    """Sampling settings that are left out would come from the model's generation_config.json."""
    wanted = {"max_tokens": 32, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    asked = {"seed": seed, "logprobs": 0, "return_token_ids": True}
    return ask("/v1/completions", model=MODEL, prompt=prompt, **wanted, **asked)["choices"][0]


def rollout(prompts, trainer):
    """New weights into the server, then a completion for each prompt; drafts do not change it."""
    save_file({name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}, WEIGHTS)
    ask("/collective_rpc", method="tlt_load_policy", args=[WEIGHTS])
    ask("/reset_prefix_cache")
    ids = trainer.processing_class(prompts)["input_ids"]
    seeds = range(trainer.state.global_step * 1000, trainer.state.global_step * 1000 + len(ids))
    with ThreadPoolExecutor(len(ids)) as pool:
        answers = list(pool.map(complete, ids, seeds))
    tokens = [answer["token_ids"] for answer in answers]
    return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": [a["logprobs"]["token_logprobs"] for a in answers]}


if __name__ == "__main__":
    questions = Dataset.from_dict({"prompt": [f"Write a list of {n} words:" for n in range(2, 10)]})
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 32, "max_steps": 2}
    arguments = GRPOConfig(
        tempfile.mkdtemp(), **settings, learning_rate=1e-4, logging_steps=1, report_to=[], bf16=False
    )

    def short(completion_ids, **_):
        return [-len(set(ids)) / 32 for ids in completion_ids]

    GRPOTrainer(MODEL, short, args=arguments, train_dataset=questions, rollout_func=rollout).train()
