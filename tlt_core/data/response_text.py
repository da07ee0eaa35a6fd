"""Responses as text: what rewards see, and what the chat template has said for the model already."""

import re
from collections.abc import Collection, Sequence
from typing import Any

_TAIL = 24  # tokens in which an opened or an empty thinking block fits, also one that is spelt in pieces
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


def response_text(tokenizer: Any, tokens: Sequence[int], *, stop_token_ids: Collection[int]) -> str:
    """Without begin, end, padding and stop tokens.  Other special tokens stay: a model may have <answer> as one."""
    left_out = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *stop_token_ids}
    return str(tokenizer.decode([token for token in tokens if token not in left_out], skip_special_tokens=False))


def opening(tokenizer: Any, prompt_tokens: Sequence[int]) -> str:
    r"""The part of a response that the prompt already holds: "<think>\n" of models that always think, an empty block
    where thinking is off; mostly nothing."""
    found = _OPENED.search(tokenizer.decode(prompt_tokens[-_TAIL:], skip_special_tokens=False))
    return found.group() if found else ""


def continued(opened: str, response: str) -> str:
    """What is left to say of a whole response, `<think>...</think><answer>...</answer>`, after the prompt's end."""
    if "</think>" in opened:
        return response.partition("</think>")[2].lstrip()
    return response.removeprefix("<think>").lstrip() if opened else response
