"""Functions of yours, of verl and of TRL: whose arguments one takes, and how it is called."""

import asyncio
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ONE = ("prompt", "response", "answer", "metadata")  # arguments of a function of yours
MANY = ("prompts", "responses", "answers", "metadata")  # of one that takes whole batches


class Item(NamedTuple):
    prompt: str
    response: str
    answer: str
    task: str
    metadata: Mapping[str, Any]
    opening: str = ""  # what the prompt's end has of the response already
    earned: float = 0.0  # from an environment
    failure: str = ""  # why it could not go on


def load(path: str) -> Callable[..., Any]:
    """A function of yours.  Raises what importing it raises, AttributeError or TypeError."""
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{path} is not callable")
    return function  # type: ignore[no-any-return]


def require_arguments(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Raises TypeError where a call with these arguments would."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not say
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        wanted = ", ".join(f"{name}=" for name in names)
        raise TypeError(f"it is called as f({wanted}), but takes {signature}: {error}") from None


def style_of(function: Callable[..., Any]) -> str:
    """Whose arguments a function takes: verl's, TRL's or ours."""
    try:
        names = inspect.signature(function).parameters.keys()
    except ValueError:  # some functions written in C do not say
        return "tlt"
    if {"solution_str", "ground_truth"} <= names:
        return "verl"
    return "trl" if "completions" in names else "tlt"


def _verl_one(function: Callable[..., Any]) -> Callable[[Item], Any]:
    """compute_score(data_source, solution_str, ground_truth, extra_info) -> a number, or a dict with `score`."""

    def score(item: Item) -> Any:
        row = item.metadata
        truth = row["reward_model"]["ground_truth"] if isinstance(row.get("reward_model"), Mapping) else item.answer
        given = {
            "data_source": row.get("data_source", item.task),
            "solution_str": item.response,
            "ground_truth": truth,
            "extra_info": row.get("extra_info"),
        }
        value = awaited(function(**_taken(function, given)))
        return value["score"] if isinstance(value, Mapping) else value

    return score


def _taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments, those that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def trl_many(function: Callable[..., Any], items: Sequence[Item]) -> dict[str, Any]:
    """f(prompts, completions, **columns) -> list of numbers; conversations are lists of messages there."""
    columns: dict[str, list[Any]] = {"prompts": [], "completions": [], "completion_ids": [], "answer": []}
    talks = [item.metadata.get("prompt_messages") for item in items]
    for item, talk in zip(items, talks, strict=True):
        columns["prompts"].append(item.prompt if talk is None else talk)
        columns["completions"].append(
            item.response if talk is None else [{"role": "assistant", "content": item.response}]
        )
        columns["completion_ids"].append(None)
        columns["answer"].append(item.answer)
    for name in {name for item in items for name in item.metadata} - {"prompt_messages"}:
        columns[name] = [item.metadata.get(name) for item in items]
    return _taken(function, columns)


def our_many(items: Sequence[Item]) -> dict[str, Any]:
    return {
        "prompts": [item.prompt for item in items],
        "responses": [item.response for item in items],
        "answers": [item.answer for item in items],
        "metadata": [dict(item.metadata) for item in items],
    }


def _our_one(function: Callable[..., Any]) -> Callable[[Item], Any]:
    return lambda item: awaited(
        function(prompt=item.prompt, response=item.response, answer=item.answer, metadata=dict(item.metadata))
    )


def _trl_one(function: Callable[..., Any]) -> Callable[[Item], Any]:
    def score(item: Item) -> Any:
        (value,) = awaited(function(**trl_many(function, [item])))
        return 0.0 if value is None else value

    return score


@functools.cache
def _loop() -> asyncio.Runner:
    """One for the life of the process: clients that a judge keeps open belong to it."""
    return asyncio.Runner()


def awaited(value: Any) -> Any:
    """What an async function returns, or what a plain one has returned."""

    async def result() -> Any:
        return await value

    return _loop().run(result()) if inspect.isawaitable(value) else value


def alone(function: Callable[..., Any]) -> Callable[[Item], Any]:
    """It scores one response."""
    return {"tlt": _our_one, "verl": _verl_one, "trl": _trl_one}[style_of(function)](function)
