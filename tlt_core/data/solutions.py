"""Worked solutions for the cold start: short reasoning, one small step per line, then the answer.

    <think>
    15 - 43 = -28
    -28 + 61 = 33
    </think>
    <answer>33</answer>

Each line needs only the line before it.  Solutions grow with the problem, so response lengths vary as problems do.
"""

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.data import GymData
from tlt_core.data.chat import encode_question, require_embedded
from tlt_core.data.gym_questions import gym_items
from tlt_core.data.question import DataError
from tlt_core.data.response_text import continued, opening


def version() -> str:
    """Changes with this file, and so with the solutions: a cold start on other solutions is another model."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def supported_tasks() -> tuple[str, ...]:
    return tuple(sorted(_STEPS))


def worked_solution(task: str, metadata: Mapping[str, Any], answer: str) -> str:
    """The response that a policy should give.  Raises DataError for a task without solutions."""
    if task not in _STEPS:
        raise DataError(
            f"task {task!r} has no worked solutions ({', '.join(supported_tasks())} have); set "
            "coldstart.enabled=false or drop the task"
        )
    lines = "\n".join(_STEPS[task](metadata))
    return f"<think>\n{lines}\n</think>\n<answer>{answer}</answer>"


def examples(
    cfg: GymData, *, num_examples: int, tokenizer: Any, vocab_size: int, exclude: set[str], seed: int
) -> list[tuple[Tensor, Tensor]]:
    """(prompt tokens, completion tokens with the end token), int32, in the data set's mixture.

    vocab_size: tokens that the model's embedding has.  exclude: questions that must not occur (the validation split's).
    Raises DataError.
    """
    pairs = []
    for item in gym_items(cfg, count=num_examples, first_index=_FIRST_INDEX, exclude=exclude):
        prompt = encode_question(tokenizer, item.question, cfg)
        text = continued(opening(tokenizer, prompt), worked_solution(item.task, item.metadata, item.answer))
        completion = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        where = f"the worked solution {text!r}"
        require_embedded([*prompt, *completion], tokenizer, vocab_size=vocab_size, where=where)
        pairs.append((torch.tensor(prompt, dtype=torch.int32), torch.tensor(completion, dtype=torch.int32)))
    random.Random(seed).shuffle(pairs)
    return pairs


_FIRST_INDEX = 5_000_000  # far beyond the items that the RL splits take


def _chain_sum(metadata: Mapping[str, Any]) -> Sequence[str]:
    """Running total, one term a line."""
    first = re.match(r"-?\d+", metadata["expression"])
    if first is None:
        raise DataError(f"chain_sum expression {metadata['expression']!r} does not begin with a number")
    total, lines = int(first.group()), []
    for sign, digits in re.findall(r"([+-]) (-?\d+)", metadata["expression"]):
        number = int(digits)
        result = total + number if sign == "+" else total - number
        lines.append(f"{total} {sign} {number} = {result}")
        total = result
    return lines


def _letter_counting(metadata: Mapping[str, Any]) -> Sequence[str]:
    """Each word as in the question (which shows the word that comes next), its letters, its count, the total."""
    letter, total, lines = metadata["target_letter"].lower(), 0, []
    for word in metadata["span"]:
        total += word.lower().count(letter)
        lines.append(f"- {word} {' '.join(word.lower())}: {word.lower().count(letter)}, {total}")
    return lines


def _spell_backward(metadata: Mapping[str, Any]) -> Sequence[str]:
    word = metadata["word"]
    return [" ".join(word), " ".join(reversed(word))]


def _leg_counting(metadata: Mapping[str, Any]) -> Sequence[str]:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, lines = 0, []
    for animal, count in metadata["animals"].items():
        legs = ANIMALS[animal]
        lines.append(f"{animal}: {count} * {legs} = {count * legs}, {total} + {count * legs} = {total + count * legs}")
        total += count * legs
    return lines


_STEPS: dict[str, Callable[[Mapping[str, Any]], Sequence[str]]] = {
    "chain_sum": _chain_sum,
    "letter_counting": _letter_counting,
    "spell_backward": _spell_backward,
    "leg_counting": _leg_counting,
}
