"""Reward functions that take many responses at once, and others that are called in unusual ways."""

import asyncio
import os
import time


def lengths(*, prompts, responses, answers, metadata):
    """How many were scored together, and a digit of each: 302 for the second of three with two characters."""
    assert len(prompts) == len(responses) == len(answers) == len(metadata)
    return [100.0 * len(responses) + len(response) for response in responses]


def fragile(*, responses, **_):
    """Fails, hangs or ends its process for the whole batch if one response says so."""
    if "raise" in responses:
        raise KeyError("no such thing")
    if "sleep" in responses:
        time.sleep(600)
    if "crash" in responses:
        os._exit(3)
    return [float("nan") if response == "nan" else float(len(responses)) for response in responses]


def too_few(*, responses, **_):
    return [1.0] * (len(responses) - 1)


async def judge(*, prompt, response, answer, metadata):
    await asyncio.sleep(0.01)
    return 1.0 if response == answer else 0.5


async def judges(*, prompts, responses, answers, metadata):
    """As many clients do: all at once, on one loop."""
    return await asyncio.gather(
        *(
            judge(prompt=p, response=r, answer=a, metadata={})
            for p, r, a in zip(prompts, responses, answers, strict=True)
        )
    )


def positional(prompt, response, answer):
    return 1.0
