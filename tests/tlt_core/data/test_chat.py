"""From a user's message to tokens: what the chat template, the tokenizer and the embedding make of it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conf.data import GymData
from tlt_core.data import dataset, solutions
from tlt_core.data.chat import check_variables, encode_prompt, encode_turn
from tlt_core.data.question import DataError

_NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
_VOCAB = 49_152


@pytest.fixture
def tokenizer(embedded_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model)


def _gym(**changes: object) -> GymData:
    sums = {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}}
    given = {"kind": "reasoning_gym", "tasks": [sums], "num_train": 20, "num_validation": 5}
    return GymData.model_validate({**given, **changes})


def _prepare(cfg: GymData, tokenizer: Any, folder: Path, *, vocab_size: int = _VOCAB) -> dataset.DataManifest:
    return dataset.prepare(cfg, tokenizer=tokenizer, vocab_size=vocab_size, max_prompt_tokens=200, out_dir=folder)


def test_a_template_that_refuses_a_system_message_is_said_with_the_key(tokenizer: Any) -> None:
    tokenizer.chat_template = _NO_SYSTEM + tokenizer.chat_template
    assert encode_prompt(tokenizer, "1 + 1 =", system_prompt=None)
    with pytest.raises(DataError, match=r"System role not supported\): leave data\.system_prompt .* out"):
        encode_prompt(tokenizer, "1 + 1 =", system_prompt="Be brief.")


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0].nothing.more }}", "{% if %}"])
def test_a_broken_template_is_named(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"chat template fails on a user's message .*edit the model's chat_template"):
        encode_prompt(tokenizer, "1 + 1 =", system_prompt=None)


def test_a_variable_of_a_kind_that_the_template_cannot_use_is_named(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ budget + 1 }}"
    with pytest.raises(DataError, match=r"mend data\.chat_template_kwargs=\{'budget': 'low'\}"):
        encode_prompt(tokenizer, "1 + 1 =", system_prompt=None, template_kwargs={"budget": "low"})


@pytest.mark.parametrize("stops", [True, False])
def test_turns_are_the_tokens_of_the_whole_conversation(tokenizer: Any, stops: bool) -> None:
    """Also where a turn was cut: its end is the environment's then."""
    talk = [
        ("user", "Guess."),
        ("assistant", "Seven?"),
        ("user", "Higher."),
        ("assistant", "Nine?"),
        ("user", "Lower."),
    ]
    end = tokenizer.encode("<|im_end|>") if stops else []
    tokens = encode_prompt(tokenizer, "Guess.", system_prompt=None)
    for role, text in talk[1:]:
        if role == "assistant":
            tokens += tokenizer.encode(text) + end
        else:
            tokens += encode_turn(tokenizer, text, ended_by=tokens[-1], template_kwargs={})
    messages = [{"role": role, "content": text} for role, text in talk]
    assert tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_template_without_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(DataError, match=r"a user's message after a response, .*leave rollout\.environment out"):
        encode_turn(tokenizer, "Higher.", ended_by=1, template_kwargs={})


def test_variables_reach_the_template_and_decide_which_data_set_it_is(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = _THINKING

    def prompt(**changes: object) -> str:
        _prepare(_gym(**changes), tokenizer, tmp_path / "d")
        return str(tokenizer.decode(dataset.load(tmp_path / "d", "train", tokenizer)[0].tokens))

    assert prompt().endswith("<|im_start|>assistant\n")
    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith("assistant\n<think>\n\n</think>\n\n")
    cfg = _gym(chat_template_kwargs={"enable_thinking": False})
    pairs = solutions.examples(cfg, num_examples=1, tokenizer=tokenizer, vocab_size=_VOCAB, exclude=set(), seed=0)
    assert tokenizer.decode(pairs[0][0]).endswith("</think>\n\n")


@pytest.mark.parametrize("name", ["enable_thinkin", "tokenize", "messages"])
def test_a_variable_that_the_template_does_not_read_is_refused(tokenizer: Any, tmp_path: Path, name: str) -> None:
    tokenizer.chat_template = _THINKING
    with pytest.raises(DataError, match=rf"data\.chat_template_kwargs: '{name}' is no variable of the model's chat"):
        _prepare(_gym(chat_template_kwargs={name: False}), tokenizer, tmp_path / "d")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"the model has no chat template; leave --x out"):
        check_variables(tokenizer, {name: False}, setting="--x")


def test_a_token_beyond_the_embedding_is_named_before_anything_is_trained(tokenizer: Any, tmp_path: Path) -> None:
    """As `add_tokens` without `resize_token_embeddings` leaves a model's folder."""
    cfg = _gym(instruction=" Use <think> tags.")
    before = _prepare(cfg, tokenizer, tmp_path / "d")
    tokenizer.add_tokens(["<think>", "</think>"])
    said = r"the prompt .* has '<think>' as token 49152, but the model's embedding ends at 49151.*resize_token_embed"
    with pytest.raises(DataError, match=said):  # though the data set is there, made by the tokenizer as it was
        _prepare(cfg, tokenizer, tmp_path / "d")
    with pytest.raises(DataError, match=r"the worked solution .* has '</think>' as token 49153"):
        solutions.examples(_gym(), num_examples=1, tokenizer=tokenizer, vocab_size=_VOCAB, exclude=set(), seed=0)
    after = _prepare(cfg, tokenizer, tmp_path / "d", vocab_size=_VOCAB + 2)
    assert after.tokenizer != before.tokenizer
    assert dataclasses.replace(after, tokenizer="", longest_prompt=0) == dataclasses.replace(
        before, tokenizer="", longest_prompt=0
    )
