"""What rewards see: tags survive that are special tokens, and blocks that the chat template has opened are counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from conf.data import FileData, GymData
from tlt_core.data import dataset, solutions
from tlt_core.data.response_text import continued, opening, response_text
from tlt_core.grpo.reward_styles import Item
from tlt_core.grpo.verifiers import exact_reward, format_reward, math_verify_reward
from tlt_core.items.types import Prompt
from tlt_core.run.prompts import Prompts

WHOLE = "<think>\nso 2 + 2 = 4\n</think>\n<answer>4</answer>"


@pytest.fixture
def tokenizer(embedded_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model)


def opens(tokenizer: Any, end: str) -> None:
    start = "'<|im_start|>assistant\n'"
    assert start in tokenizer.chat_template.replace("\\n", "\n")
    tokenizer.chat_template = tokenizer.chat_template.replace("\\n", "\n").replace(start, f"{start[:-1]}{end}'")


def test_tags_that_are_special_tokens_reach_the_rewards(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    stop = tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = [tokenizer.bos_token_id, *tokenizer.encode(WHOLE, add_special_tokens=False), stop, tokenizer.eos_token_id]
    assert tokenizer.convert_tokens_to_ids("<answer>") in ids
    text = Prompts([], [], tokenizer, (stop,)).text(torch.tensor(ids))
    assert text == WHOLE
    item = Item("q", text, "4", "file", {})
    assert [reward(item) for reward in (exact_reward, math_verify_reward, format_reward)] == [1, 1, 1]


@pytest.mark.parametrize("end", ["", "<think>\n", "<think>", "<think>\n\n</think>\n\n"])
def test_the_format_is_that_of_prompt_and_response_together(tokenizer: Any, tmp_path: Path, end: str) -> None:
    if end:
        opens(tokenizer, end)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"q{i}", "answer": 4}) + "\n" for i in range(4)))
    cfg = FileData(kind="file", train_path=str(tmp_path / "rows.jsonl"), instruction=" Use <think> and </think>.")
    dataset.prepare(cfg, tokenizer=tokenizer, vocab_size=49_152, max_prompt_tokens=512, out_dir=tmp_path / "data")
    prompt: Prompt = dataset.load(tmp_path / "data", "train", tokenizer)[0]
    assert prompt.opening == end

    def earned(response: str) -> float:
        return format_reward(Item(prompt.text, response, "4", "file", {}, prompt.opening))

    assert earned(continued(prompt.opening, WHOLE)) == 1
    assert earned(WHOLE) == (0 if end else 1)  # a second block
    assert earned("4") == 0


def test_a_cold_start_does_not_open_the_block_again(tokenizer: Any) -> None:
    opens(tokenizer, "<think>\n")
    tasks = [{"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 3}}]
    cfg = GymData(kind="reasoning_gym", tasks=tasks, num_train=10, num_validation=10)
    for prompt, completion in solutions.examples(
        cfg, num_examples=5, tokenizer=tokenizer, vocab_size=49_152, exclude=set(), seed=0
    ):
        opened = opening(tokenizer, prompt.tolist())
        text = response_text(tokenizer, completion.tolist(), stop_token_ids=())
        assert (opened, text.count("<think>")) == ("<think>\n", 0)
        assert format_reward(Item("q", text, "", "chain_sum", {}, opened)) == 1
