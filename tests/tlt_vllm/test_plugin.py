"""Settings of vLLM that do not go together with the plug-in's are refused before an engine starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from tlt_vllm.plugin import refuse_pairs
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
