"""Asynchronous scheduling, the default on GPUs: a step begins before the outcome of the one before is known.

Tokens, and what the tuner learns, are those of the synchronous scheduler."""

import pytest

from tests.vllm.scripted import LENGTHS, told

pytestmark = pytest.mark.vllm

MIXED = [0.0, 0.7, 1.0, 0.0, 1.0, 0.7]


@pytest.fixture(scope="module")
def without_drafts(vllm_python, small):
    return told(vllm_python, small, temperatures=MIXED)["passes"][0]["tokens"]


@pytest.mark.parametrize("drafts", ["none", "scripted", "by the tuner"])
def test_tokens_are_those_of_the_synchronous_scheduler(vllm_python, small, without_drafts, drafts):
    options = {} if drafts == "none" else {"drafter": str(small.drafter)}
    lengths = LENGTHS if drafts == "scripted" else None
    found = told(vllm_python, small, asynchronous=True, temperatures=MIXED, lengths=lengths, **options)
    assert found["scheduler"] == "AsyncAdaptiveScheduler"
    assert found["passes"][0]["tokens"] == without_drafts
    assert len({len(tokens) for tokens in without_drafts}) > 1
    if drafts == "by the tuner":
        assert found["passes"][0]["counted"][0] > 0


def test_rounds_are_counted_as_vllm_counts_them(vllm_python, small):
    """A request that has ended takes part in one more step, which is no round: nobody gets its tokens."""
    options = {"drafter": str(small.drafter), "temperatures": MIXED, "lengths": LENGTHS}
    apart, found = (told(vllm_python, small, asynchronous=on, **options)["passes"][0] for on in (False, True))
    assert found["rounds"] == apart["rounds"]
    assert found["counted"] == apart["counted"]
    assert found["counted"] == [sum(r[2] for r in found["rounds"]), sum(r[3] for r in found["rounds"])]
    assert found["counted"][1] > 0
    emitted, known = (sum(len(step[2]) for step in of["steps"]) for of in (found, apart))
    assert emitted > known, "some request did take part in one more step"
