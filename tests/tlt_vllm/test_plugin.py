"""Settings of vLLM that do not go together with the plug-in's are refused before an engine starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from tlt_vllm.plugin import _for_first_runner, refuse_pairs
from tlt_vllm.settings import Settings

SPECULATIVE = {"method": "eagle3", "num_speculative_tokens": 3}


def args(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"data_parallel_size": 1, "logits_processors": None} | given)


@pytest.mark.parametrize(
    ("given", "speculative", "remedy"),
    [
        ({}, SPECULATIVE | {"enable_adaptive_verification": True}, "leave one of them out"),
        ({"data_parallel_size": 2}, SPECULATIVE, "start an engine for each rank"),
        ({"logits_processors": ["mine:Processor"]}, {}, "set tlt.exact to false"),
    ],
)
def test_a_pair_that_would_go_wrong_is_refused_with_the_remedy(given, speculative, remedy) -> None:
    with pytest.raises(ValueError, match=remedy):
        refuse_pairs(args(**given), Settings(), speculative)


def test_pairs_that_go_together_are_taken() -> None:
    refuse_pairs(args(), Settings(), SPECULATIVE)
    refuse_pairs(args(data_parallel_size=2), Settings(), {})
    refuse_pairs(args(logits_processors=["mine:Processor"]), Settings(exact=False), SPECULATIVE)


def test_only_what_needs_vllms_first_runner_asks_for_it() -> None:
    raw, processed = (args(logprobs_mode=mode) for mode in ("raw_logprobs", "processed_logprobs"))
    assert not _for_first_runner(raw, Settings(), "0.33.0")
    assert not _for_first_runner(processed, Settings(exact=False), "0.24.0")
    assert "processed" in _for_first_runner(processed, Settings(), "0.33.0")
    assert "0.24.0" in _for_first_runner(raw, Settings(), "0.24.0")
    assert "hidden states" in _for_first_runner(raw, Settings(capture_mb=8), "0.33.0")
