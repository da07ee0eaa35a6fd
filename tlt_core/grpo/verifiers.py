"""The reward functions, as scoring processes run them.

Nothing heavy is imported at the top (no torch), so a scoring process starts quickly.
"""

import contextlib
import functools
import importlib
import os
import re
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlt_core.grpo import code_tests, confinement, judge, math_answer
from tlt_core.grpo.reward_styles import (
    MANY,
    ONE,
    Item,
    alone,
    awaited,
    load,
    our_many,
    require_arguments,
    style_of,
    trl_many,
)

OK, UNPARSEABLE, TIMEOUT, ERROR = range(4)  # as `types.ScoreStatus`
LARGEST_REWARD = 1e6  # of one function, in absolute value
_MESSAGE_CHARS = 300
_RIGHT = 0.99  # only a full score counts: a policy can game reasoning-gym's partial credit
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FORMAT = re.compile(
    r"\A\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*\Z", re.DOTALL
)


class Outcome(NamedTuple):
    """Result of one response, before weighting."""

    components: tuple[float, ...]
    status: int  # one of the four above: the worst over the functions
    message: str  # first error, for the log
    seconds: float


class Unparseable(ValueError):
    """No answer could be found in the response."""


def start(functions: Sequence[tuple[str, str]], max_memory_gb: float, pass_variables: Sequence[str]) -> None:
    """Prepare a new scoring process: confine it, silence it and import all that the functions need, before the first
    response, so that imports do not count against a sample's time limit.  It calls no reward function."""
    confinement.confine(max_memory_gb=max_memory_gb, pass_variables=pass_variables)
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what a reward function prints must not garble the terminal
        os.dup2(sink, stream)
    for kind, path in functions:
        # Every replacement would fail here again, so failures are left to scoring, which reports them.
        with contextlib.suppress(BaseException):
            if kind in ("reasoning_gym", "math_verify"):
                importlib.import_module(kind)
            resolve(kind, path)


def score_response(functions: Sequence[tuple[str, str]], item: Item) -> Outcome:
    """Score with every (kind, path).  A function that raises gives 0 for its component and does no other harm."""
    started_s, components, status, message = time.perf_counter(), [], OK, ""
    for kind, path in functions:
        value = 0.0
        try:
            value = checked(resolve(kind, path)(item))
        except Unparseable:
            status = max(status, UNPARSEABLE)
        except BaseException as error:  # users' code may raise anything, SystemExit included
            status, message = ERROR, message or f"{path or kind}: {in_words(error)}"
        components.append(value)
    return Outcome(tuple(components), status, message, time.perf_counter() - started_s)


def score_each(functions: Sequence[tuple[str, str]], items: Sequence[Item]) -> list[Outcome]:
    return [score_response(functions, item) for item in items]


def score_batch(functions: Sequence[tuple[str, str]], items: Sequence[Item]) -> list[Outcome]:
    """Score all items by one call of the one function.  Where that fails, each is scored by a call of its own, so that
    a bad one costs no other its score."""
    started_s, ((_, path),) = time.perf_counter(), functions
    try:
        values = _called_together(path, items)
    except BaseException as error:  # users' code may raise anything, SystemExit included
        if len(items) > 1:
            return [outcome for item in items for outcome in score_batch(functions, [item])]
        return [Outcome((0.0,), ERROR, f"{path}: {in_words(error)}", time.perf_counter() - started_s)]
    seconds = (time.perf_counter() - started_s) / len(items)
    return [Outcome((value,), OK, "", seconds) for value in values]


def _called_together(path: str, items: Sequence[Item]) -> list[float]:
    function = load(path)
    style = style_of(function)
    values = list(awaited(function(**(trl_many(function, items) if style == "trl" else our_many(items)))))
    if style == "trl":  # None: it does not judge this prompt
        values = [0.0 if value is None else value for value in values]
    if len(values) != len(items):
        raise ValueError(f"it returned {len(values)} rewards for {len(items)} responses; return one for each")
    return [checked(value) for value in values]


def first_unusable(functions: Sequence[tuple[str, str, bool]]) -> tuple[str, str] | None:
    """(path, reason) of the first (kind, path, batch) that cannot be called as it will be; None: all can."""
    for kind, path, batch in functions:
        try:
            if kind == "code_tests":
                code_tests.require_apart()
            if kind == "environment" and path:
                made = load(path)()
                require_arguments(made.reset, ("prompt", "answer", "metadata"))
                require_arguments(functools.partial(made.step, ""), ())
            if kind == "python":
                function = load(path)
                style = style_of(function)
                if style == "verl" and batch:
                    raise TypeError("a compute_score of verl's takes one response; leave batch out")
                if style == "tlt":
                    require_arguments(function, MANY if batch else ONE)
        except BaseException as error:  # importing runs the user's module, which may raise anything
            return path or kind, in_words(error)
    return None


def in_words(error: BaseException) -> str:
    """In one line, with the setting where memory was short."""
    cause = " ".join("".join(traceback.format_exception_only(error)).split())  # works when __str__ raises, too
    if isinstance(error, MemoryError) or "allocate memory" in cause:  # the second is torch's
        most = f"reward.max_memory_gb={confinement.limit_gb():g}"
        cause = f"it needs more memory than {most}; raise that ({cause})"
    return cause[:_MESSAGE_CHARS]


def resolve(kind: str, path: str) -> Callable[[Item], float]:
    """The function of one reward term.  For a bad path raises what importing it raises, AttributeError or TypeError."""
    if kind in _WITH_SETTINGS:
        return functools.partial(_WITH_SETTINGS[kind], path)
    if kind != "python":
        return _BUILT_IN[kind]
    return alone(load(path))


def extract_answer(response: str) -> str:
    """The last <answer> of a response, stripped.  Raises Unparseable."""
    found: list[str] = _ANSWER.findall(response)
    if not found:
        raise Unparseable("no <answer>...</answer> in the response")
    return found[-1].strip()


def checked(value: float) -> float:
    """One NaN would spread through the group's advantages into every weight, and so would a number that is infinite
    in float32.  Raises ValueError."""
    value = float(value)
    if not abs(value) <= LARGEST_REWARD:  # a NaN does not pass either
        raise ValueError(f"the reward is {value:g}; return a finite number of at most {LARGEST_REWARD:g} in size")
    return value


def reasoning_gym_reward(item: Item) -> float:
    """1 when the task's own scorer gives the extracted answer full marks, else 0.

    Most scorers take all marks for a period at the end ("4."), which no task means: it is tried without, too.
    """
    answer = extract_answer(item.response)
    import reasoning_gym

    entry = {"question": item.prompt, "answer": item.answer, "metadata": dict(item.metadata)}
    score = reasoning_gym.get_score_answer_fn(item.task)
    unreadable: ValueError | None = None
    for said in dict.fromkeys((answer, answer.removesuffix(".").rstrip())):
        try:
            if score(said, entry) >= _RIGHT:
                return 1.0
            unreadable = None
        except ValueError as error:  # some scorers raise for an answer that is not a number
            unreadable = error
    if unreadable is not None:
        raise Unparseable(str(unreadable))
    return 0.0


def exact_reward(item: Item) -> float:
    """1 when the extracted answer equals the reference, character by character."""
    return float(extract_answer(item.response) == item.answer.strip())


def math_verify_reward(item: Item) -> float:
    """1 when the extracted answer (or else the end of the response) says what the reference says (`math_answer`).

    Raises ValueError for a reference that cannot be read: its group would score 0 whatever the policy says.
    """
    try:
        text = extract_answer(item.response)
    except Unparseable:
        text = item.response
    if not math_answer.readable(item.answer):
        raise ValueError(f"math_verify cannot read the reference answer {item.answer!r}; mend its row or remove it")
    same = math_answer.equal(item.answer, text)
    if same is None:
        raise Unparseable("no mathematical expression in the response")
    return float(same)


def format_reward(item: Item) -> float:
    """1 when the response is exactly one <think> block followed by one <answer> block.  Where the chat template has
    opened the first, or closed it too, the response goes on from there."""
    return float(_FORMAT.match(item.opening + item.response) is not None)


def judge_reward(settings: str, item: Item) -> float:
    """What another model says (`judge`)."""
    try:
        return judge.ask(settings, prompt=item.prompt, response=item.response, answer=item.answer)
    except judge.NoScore as error:
        raise Unparseable(str(error)) from None


def code_tests_reward(timeout_s: str, item: Item) -> float:
    """1 when the response's last ```python block passes all tests, which are the reference."""
    try:
        name = str(item.metadata.get("entry_point", ""))
        return float(code_tests.passes(item.response, item.answer, timeout_s=float(timeout_s), entry_point=name))
    except code_tests.NoCode as error:
        raise Unparseable(str(error)) from None


_WITH_SETTINGS: dict[str, Callable[[str, Item], float]] = {"judge": judge_reward, "code_tests": code_tests_reward}


def environment_reward(item: Item) -> float:
    """What the episode earned."""
    return item.earned


_BUILT_IN: dict[str, Callable[[Item], float]] = {
    "reasoning_gym": reasoning_gym_reward,
    "math_verify": math_verify_reward,
    "exact": exact_reward,
    "format": format_reward,
    "environment": environment_reward,
}
