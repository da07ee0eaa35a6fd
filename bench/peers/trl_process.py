"""TRL's GRPOTrainer in a process of its own, in TRL's environment, to be measured: lines of JSON in and out.

stdin   {"model": ..., "prompts": [...], "token_ids": [[...], ...], ...}                      settings, once
stdout  {"ready": {"trl": version, ...}}
stdin   {"go": true}                                                                          before a step
stdout  {"score": {"rows": [...], "responses": [...]}}        of the step; the answer is {"rewards": [...]}
stdout  {"step": {"seconds": ..., "rollout_s": ..., "tokens": ..., "lengths": [...], "rewards": [...], ...}}
stdin   {"go": false}                                                                         after the last step
stdout  {"ended": true}

With "streams" in the settings (a key for each response of each step), tokens are sampled with our noise, whose code is
in the folder "code": where the logits agree, so do the tokens.  The trained model is saved.
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
    if "streams" in settings:
        trainer.save_model(settings["arguments"]["output_dir"])
    sys.stdin.readline()
    _say(replies, {"ended": True})


class _Link:
    def __init__(self, replies: TextIO) -> None:
        self._replies = replies
        self.rewards: list[float] = []
        self.responses: list[list[int]] = []
        self.rollout_s = 0.0

    def score(self, completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
        _say(self._replies, {"score": {"rows": row, "responses": completions}})
        self.rewards = json.loads(sys.stdin.readline())["rewards"]
        self.responses = completion_ids
        return self.rewards

    def tell(self, seconds: float) -> None:
        lengths = [len(ids) for ids in self.responses]
        figures = {"seconds": seconds, "rollout_s": self.rollout_s, "tokens": sum(lengths), "lengths": lengths}
        _say(self._replies, {"step": {**figures, "rewards": self.rewards, "responses": self.responses}})


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
    if "streams" in settings:
        sys.path.append(settings["code"])
        _sample_with_our_noise(trainer, settings["streams"], temperature=settings["arguments"]["temperature"])
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    return trainer, versions


def _sample_with_our_noise(trainer: Any, streams: list[list[int]], *, temperature: float) -> None:
    """Generation becomes arg-max of logits / T + noise; the token's place in its own sequence, without padding, and the
    response's key name the noise."""
    import torch
    from transformers import LogitsProcessorList

    from kernels.sampling.coupled_sample import gumbel_noise
    from tlt_core.model.sampling import row_keys

    trainer.generation_config.do_sample = False
    generate = trainer.model.generate

    def keyed(*args: Any, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        streams_B = torch.tensor(streams[trainer.state.global_step])
        padding_B = (attention_mask == 0).sum(1)

        def add_noise(input_ids: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
            keys_B2 = row_keys(streams_B, input_ids.shape[1] - padding_B)
            ids_V = torch.arange(logits_BV.shape[1], dtype=torch.int32)
            return logits_BV.float() / temperature + gumbel_noise(keys_B2, ids_V)

        noise = LogitsProcessorList([add_noise])
        return generate(*args, attention_mask=attention_mask, logits_processor=noise, **kwargs)

    trainer.model.generate = keyed


def _say(replies: TextIO, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
