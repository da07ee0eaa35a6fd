"""TRL's GRPOTrainer in a process of its own, in TRL's environment, to be measured: lines of JSON in and out.

stdin   {"model": ..., "prompts": [...], "token_ids": [[...], ...], ...}                      settings, once
stdout  {"ready": {"trl": version, ...}}
stdin   {"go": true}                                                                          before a step
stdout  {"score": {"rows": [...], "responses": [...]}}        of the step; the answer is {"rewards": [...]}
stdout  {"step": {"seconds": ..., "rollout_s": ..., "tokens": ..., "lengths": [...], "rewards": [...]}}
"""

import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever TRL prints must not look like a reply
    settings = json.loads(sys.stdin.readline())
    trainer, versions = _trainer(settings, _Link(replies))
    _say(replies, {"ready": versions})
    trainer.train()


class _Link:
    def __init__(self, replies: TextIO) -> None:
        self._replies = replies
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.rollout_s = 0.0

    def score(self, completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        _say(self._replies, {"score": {"rows": row, "responses": completions}})
        self.rewards = json.loads(sys.stdin.readline())["rewards"]
        self.lengths = [len(ids) for ids in completion_ids]
        return self.rewards

    def tell(self, seconds: float) -> None:
        figures = {"seconds": seconds, "rollout_s": self.rollout_s, "tokens": sum(self.lengths)}
        _say(self._replies, {"step": {**figures, "lengths": self.lengths, "rewards": self.rewards}})


def _trainer(settings: dict[str, Any], link: _Link) -> tuple[Any, dict[str, str]]:
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(settings["threads"])

    class _Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                raise SystemExit(1)
            self.began_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            link.tell(time.perf_counter() - self.began_s)

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["weights"]))
    if tokenizer(text=settings["prompts"])["input_ids"] != settings["token_ids"]:
        raise SystemExit("TRL's tokens of the prompts are not ours")
    rows = Dataset.from_dict({"prompt": settings["prompts"], "row": list(range(len(settings["prompts"])))})
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=link.score,
        args=trl.GRPOConfig(**settings["arguments"]),
        train_dataset=rows,
        callbacks=[_Steps()],
    )
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        result = generate(*args, **kwargs)
        link.rollout_s = time.perf_counter() - began_s
        return result

    trainer._generate = timed
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    return trainer, versions


def _say(replies: TextIO, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
