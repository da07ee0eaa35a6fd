"""A reward that a random model can earn, so that its policy really moves in resume tests."""


def length_reward(*, response: str, **_) -> float:
    """Share of characters that are lower-case letters."""
    return sum(c.islower() for c in response) / max(len(response), 1)
