"""A drafter that our code exported, served by vLLM over HTTP: the same text, and the chains that our engine drafts."""

import pytest

from conf.rollout import SpeculationConfig
from tests.vllm.builtin_engine import DEPTH, chain_counters, decode
from tests.vllm.servers import MAX_TOKENS

pytestmark = pytest.mark.vllm


def tokens_of(told):
    return [completion.tokens for completion in told.greedy]


def test_plain_vllm_says_what_our_engine_says(plain, target):
    ours = decode(target.folder, target.prompts, SpeculationConfig(policy="off"), max_tokens=MAX_TOKENS)
    assert tokens_of(plain) == [tuple(r.completion.tolist()) for r in ours.rollouts]
    assert len(set(tokens_of(plain))) >= 20


def test_our_drafter_changes_no_token(plain, with_eagle3):
    assert tokens_of(with_eagle3) == tokens_of(plain)
    assert all(len(tokens) == MAX_TOKENS for tokens in tokens_of(plain))


def test_it_accepts_what_our_engine_accepts(plain, with_eagle3, target, drafter):
    """Position by position: a wrong tap, offset or norm in the layout would show here."""
    firsts = [tokens[0] for tokens in tokens_of(plain)]
    expected = chain_counters(target.folder, target.prompts, firsts, drafter, max_tokens=MAX_TOKENS)
    print("accepted per position:", with_eagle3.counters, "ours:", expected)
    assert with_eagle3.counters == expected
    assert expected.accepted_per_pos[0] > 0.3 * expected.drafts, "a drafter that is hardly ever right proves little"
    assert len(expected.accepted_per_pos) == DEPTH
    assert expected.accepted_per_pos[-1] > 0


def test_n_grams_change_no_token(plain, with_ngram):
    assert tokens_of(with_ngram) == tokens_of(plain)
    assert with_ngram.counters.accepted > 0
