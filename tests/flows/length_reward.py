"""A reward that a random model can earn, so that its policy really moves in resume tests."""

import time


def length_reward(*, response: str, **_) -> float:
    """Share of characters that are lower-case letters."""
    return sum(c.islower() for c in response) / max(len(response), 1)


def very_slow_length_reward(*, response: str, **_) -> float:
    """The same, from a judge that leaves a busy machine the time to train a drafter."""
    time.sleep(1.2)
    return length_reward(response=response)


def slow_length_reward(*, response: str, **_) -> float:
    """The same, from a judge that takes its time."""
    time.sleep(0.4)
    return length_reward(response=response)
