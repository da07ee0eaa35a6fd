"""Every worked solution earns the full reward, and none of them leaks a validation question."""

import pytest
from transformers import AutoTokenizer

from conf.data import GymData
from tlt_core.data import solutions
from tlt_core.data.gym_questions import gym_items
from tlt_core.data.solutions import worked_solution
from tlt_core.grpo.reward_styles import Item
from tlt_core.grpo.verifiers import format_reward, reasoning_gym_reward

CONFIGS = {
    "chain_sum": {"min_terms": 2, "max_terms": 12, "min_digits": 1, "max_digits": 3, "allow_negation": True},
    "letter_counting": {"min_words": 1, "max_words": 4},
    "spell_backward": {"min_word_len": 3, "max_word_len": 8},
    "leg_counting": {"min_animals": 1, "max_animals": 4},
}


def cfg(*names: str) -> GymData:
    tasks = [{"name": n, "config": CONFIGS[n]} for n in names]
    return GymData(kind="reasoning_gym", tasks=tasks, num_train=10, num_validation=10)


@pytest.mark.parametrize("task", solutions.supported_tasks())
def test_solutions_are_right(task):
    for item in gym_items(cfg(task), count=100, first_index=0, exclude=set()):
        text = worked_solution(item.task, item.metadata, item.answer)
        scored = Item(item.question, text, item.answer, item.task, item.metadata)
        assert format_reward(scored) == 1.0
        assert reasoning_gym_reward(scored) == 1.0, text
        if task in ("chain_sum", "leg_counting"):  # the reasoning leads to the answer, it is not just put there
            assert text.split("</think>")[0].rstrip().endswith(f" {item.answer}")


def test_chain_sum_by_hand():
    text = worked_solution("chain_sum", {"expression": "15 - 43 + 6"}, "-22")
    assert text == "<think>\n15 - 43 = -28\n-28 + 6 = -22\n</think>\n<answer>-22</answer>"


def test_letter_counting_by_hand():
    """A word stands as in the question, with its space before it: the very tokens that the policy has to find again."""
    text = worked_solution("letter_counting", {"span": ["No", "Sir"], "target_letter": "i"}, "1")
    assert text == "<think>\n- No n o: 0, 0\n- Sir s i r: 1, 1\n</think>\n<answer>1</answer>"


def test_examples_avoid_held_out_questions(embedded_model):
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    both = cfg("chain_sum", "spell_backward")
    probe = gym_items(both, count=20, first_index=5_000_000, exclude=set())
    held_out = {i.question for i in probe}
    pairs = solutions.examples(both, num_examples=20, tokenizer=tokenizer, vocab_size=49_152, exclude=held_out, seed=0)
    texts = [tokenizer.decode(p) for p, _ in pairs]
    assert not any(q in t for q in held_out for t in texts)
    assert all(int(c[-1]) == tokenizer.eos_token_id for _, c in pairs)
