"""A reward that a random model can earn."""


def letters(*, prompt: str, response: str, **_: object) -> float:
    """Share of characters that are lower-case letters; 0 for every response to some prompts, so that dynamic sampling
    has groups to drop."""
    if "easy" in prompt:
        return 0.0
    return sum(c.islower() for c in response) / max(len(response), 1)


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """As verl calls it."""
    assert data_source
    assert int(str(ground_truth)) >= 0
    return letters(prompt="", response=solution_str)


def of_trl(completions: list, prompts: list, **columns: list) -> list[float]:
    """As TRL calls it."""
    assert all(len(values) == len(prompts) for values in columns.values())
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [letters(prompt="", response=text) for text in texts]
