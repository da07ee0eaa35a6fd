"""What a user may write under `tlt` in vLLM's additional_config, and what is said when it is wrong."""

import pytest

from tlt_vllm.settings import Settings, table


def test_defaults() -> None:
    settings = Settings.read({"tlt": {}}, longest=5)
    assert settings == Settings(draft_lengths=(1, 2, 3, 5), policy="cost_model", exact=True)
    assert Settings.read({"other": 1}, longest=5) is None
    assert Settings.read({"tlt": {}}, longest=0) == Settings(), "no speculation: nothing to choose from"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tlt": 3}, "give an object"),
        ({"tlt": {"k": 1}}, "tlt.k is not known: choose from draft_lengths, policy"),
        ({"tlt": {"draft_lengths": [1, 4]}}, "num_speculative_tokens=5 in the speculative config"),
        ({"tlt": {"draft_lengths": [0, 5]}}, "list draft lengths from 1 to 32"),
        ({"tlt": {"draft_lengths": [5, True]}}, "list draft lengths"),
        ({"tlt": {"draft_lengths": "5"}}, "list draft lengths"),
        ({"tlt": {"policy": "best"}}, "choose one of cost_model"),
        ({"tlt": {"exact": "yes"}}, "say true or false"),
        ({"tlt": {"capture_mb": -1}}, "tlt.capture_mb=-1: give a number from 0 up"),
        ({"tlt": {"log_every_s": float("nan")}}, "tlt.log_every_s=nan"),
        ({"tlt": {"exact": False, "capture_mb": 8}}, "set tlt.exact to true, or tlt.capture_mb to 0"),
        ({"tlt": {"exact": False, "policy_logprobs": True}}, "set tlt.exact to true, or tlt.policy_logprobs to false"),
    ],
)
def test_what_is_wrong_is_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.read(given, longest=5)


def test_vllm_captures_graphs_for_every_length() -> None:
    """The table has all lengths, the longest for the smallest batches, and ends at the largest batch."""
    assert table((1, 3), 8) == [(1, 1, 3), (2, 2, 1), (3, 8, 0)]
    assert table((1, 3, 5), 2) == [(1, 1, 5), (2, 2, 3)]
    assert table((4,), 1) == [(1, 1, 4)]
