"""Pure scoring functions, run in the scoring processes.

Nothing heavy is imported at the top (no torch), so a scoring process starts quickly.  `score_response` is the one
entry: one response in, one number per reward function out.
"""

import importlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

OK, UNPARSEABLE, ERROR = "ok", "unparseable", "error"
_RIGHT = 0.99  # reasoning-gym gives partial credit that can be gamed; only a full score counts
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT = re.compile(
    r"\A\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*\Z", re.DOTALL
)


class Item(NamedTuple):
    """What is to be scored."""

    prompt: str
    response: str
    answer: str
    task: str
    metadata: Mapping[str, Any]


class Outcome(NamedTuple):
    """Result of one response, before weighting."""

    components: tuple[float, ...]
    status: str  # OK, UNPARSEABLE or ERROR: the worst over the functions
    message: str  # first error, for the log
    seconds: float


class Unparseable(ValueError):
    """No answer could be found in the response."""


def score_response(functions: Sequence[tuple[str, str]], item: Item) -> Outcome:
    """Score with every (kind, path); a function that raises costs 0 for its component, nothing more."""
    started_s, components, status, message = time.perf_counter(), [], OK, ""
    for kind, path in functions:
        try:
            components.append(float(resolve(kind, path)(item)))
        except Unparseable:
            components.append(0.0)
            status = UNPARSEABLE if status == OK else status
        except Exception as error:  # the boundary to users' code: recorded, counted, never the run's end
            components.append(0.0)
            status, message = ERROR, message or f"{kind} {path}: {type(error).__name__}: {error}"
    return Outcome(tuple(components), status, message, time.perf_counter() - started_s)


def resolve(kind: str, path: str) -> Callable[[Item], float]:
    """The function of one reward term.  Raises ImportError, AttributeError or TypeError for a bad path."""
    if kind != "python":
        return _BUILT_IN[kind]
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{path} is not callable")
    return lambda item: function(
        prompt=item.prompt, response=item.response, answer=item.answer, metadata=dict(item.metadata)
    )


def extract_answer(response: str) -> str:
    """The last <answer> of a response, stripped.  Raises Unparseable."""
    found = _ANSWER.findall(response)
    if not found:
        raise Unparseable("no <answer>...</answer> in the response")
    return found[-1].strip()


def reasoning_gym_reward(item: Item) -> float:
    """1 when the task's own scorer gives the extracted answer full marks, else 0."""
    answer = extract_answer(item.response)
    import reasoning_gym

    entry = {"question": item.prompt, "answer": item.answer, "metadata": dict(item.metadata)}
    return float(reasoning_gym.get_score_answer_fn(item.task)(answer, entry) >= _RIGHT)


def exact_reward(item: Item) -> float:
    """1 when the extracted answer equals the reference, character by character."""
    return float(extract_answer(item.response) == item.answer.strip())


def math_verify_reward(item: Item) -> float:
    """1 when the extracted answer (or else the whole response) is symbolically equal to the reference."""
    from math_verify import parse, verify

    try:
        text = extract_answer(item.response)
    except Unparseable:
        text = item.response
    # The pool has a time limit of its own; math-verify's uses signals, which only the main thread may.
    found = parse(text, parsing_timeout=None)
    if not found:
        raise Unparseable("no mathematical expression in the response")
    return float(verify(parse(item.answer, parsing_timeout=None), found, timeout_seconds=None))


def format_reward(item: Item) -> float:
    """1 when the response is exactly one <think> block followed by one <answer> block."""
    return float(_FORMAT.match(item.response) is not None)


_BUILT_IN: dict[str, Callable[[Item], float]] = {
    "reasoning_gym": reasoning_gym_reward,
    "math_verify": math_verify_reward,
    "exact": exact_reward,
    "format": format_reward,
}
