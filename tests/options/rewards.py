"""A reward that a random model can earn."""


def letters(*, prompt: str, response: str, **_: object) -> float:
    """Share of characters that are lower-case letters; 0 for every response to some prompts, so that dynamic sampling
    has groups to drop."""
    if "easy" in prompt:
        return 0.0
    return sum(c.islower() for c in response) / max(len(response), 1)
