"""What the speculative engine samples is distributed as transformers samples it.

Chi-square of the first three tokens together, on a small vocabulary, against the probabilities of transformers' model
after transformers' own warpers.
"""

import itertools
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.tlt_core.rollout.playing import Recorder
from tlt_core.items.speculation import DraftTree, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.model.load import load_decoder
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import make_tuner

VOCAB, TOKENS = 12, 3
PROMPT = torch.tensor([3, 1, 7, 5], dtype=torch.int32)
COUNT = 6_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.25,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


class Guess(Recorder):
    """The same tree for every row: tokens that may come next, and tokens that may follow each of them."""

    def __init__(self, followers):
        super().__init__()
        self._followers = followers

    def propose(self, view, strategy):
        tokens, parents, rows, depths = [], [], [], []
        for row, room in enumerate(view.room):
            for token, after in self._followers.items() if room > 1 else ():
                parent = len(tokens)
                tokens.append(token), parents.append(-1), rows.append(row), depths.append(1)
                for follower in after if room > 2 else ():
                    tokens.append(follower), parents.append(parent), rows.append(row), depths.append(2)
        return DraftTree.of_lists(tokens, parents, rows, depths)


def sample(decoder, prompt, params, followers, *, count):
    """[count, TOKENS] tokens of the speculative engine, and how many of them were accepted drafts."""
    arm = Strategy("d", 2, len(followers), sum(1 + len(after) for after in followers.values()))
    speculation = Speculation({"d": Guess(followers)}, make_tuner("fixed", [arm]), [arm])
    engine = RolloutEngine(decoder, max_live=100, max_len=len(prompt) + TOKENS, speculation=speculation)
    numbers, finished, accepted = itertools.count(), [], []

    def pull(wanted):
        taken = [next(numbers) for _ in range(wanted)]
        return [GenerationRequest(NoiseKey(0, 1, 0, i), prompt) for i in taken if i < count]

    engine.decode(pull, finished.append, params, on_round=lambda t: accepted.append(sum(t.report.accepted)))
    assert engine.drafter_failures == {}
    return torch.stack([r.completion for r in finished]).long(), sum(accepted)


@cache
def small_sample(folder, params):
    """Of the small model: a third of the tokens is drafted, and two that may follow each."""
    followers = {token: [(token + 1) % VOCAB, (token + 6) % VOCAB] for token in range(0, VOCAB, 3)}
    return sample(load_decoder(folder, dtype=torch.float32), PROMPT, params, followers, count=COUNT)


def probabilities(folder, params):
    """Joint probability of every continuation of three tokens, [V, V, V], by transformers alone."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    warpers = [TemperatureLogitsWarper(params.temperature)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []

    def after(prefixes):
        ids = torch.cat([PROMPT.long().expand(len(prefixes), -1), prefixes], dim=1)
        with torch.no_grad():
            scores = model(ids).logits[:, -1].float()
        for warper in warpers:
            scores = warper(ids, scores)
        return scores.double().softmax(-1)

    every = torch.arange(VOCAB)
    first = after(torch.empty(1, 0, dtype=torch.int64))[0]
    second = after(every[:, None])
    third = after(torch.cartesian_prod(every, every)).view(VOCAB, VOCAB, VOCAB)
    return first[:, None, None] * second[:, :, None] * third


CASES = {
    "T=1": SamplingParams(max_new_tokens=TOKENS),
    "T=0.7": SamplingParams(temperature=0.7, max_new_tokens=TOKENS),
    "top-k": SamplingParams(top_k=4, max_new_tokens=TOKENS),
    "top-p": SamplingParams(top_p=0.8, max_new_tokens=TOKENS),
    "T, top-k, top-p": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, max_new_tokens=TOKENS),
}


@pytest.mark.parametrize("name", CASES)
def test_chi_square_of_three_tokens_on_a_small_vocabulary(folder, name):
    tokens_N3, accepted = small_sample(folder, CASES[name])
    assert accepted > 0.2 * COUNT, "drafts must have been accepted, or plain decoding is tested"
    p_VVV = probabilities(folder, CASES[name])
    counts_VVV = torch.zeros_like(p_VVV).index_put_(
        tuple(tokens_N3.T), torch.ones(len(tokens_N3), dtype=torch.float64), accumulate=True
    )
    assert counts_VVV[p_VVV == 0].sum() == 0, "a token that the filters had removed"
    for kept in ((0,), (0, 1), (0, 1, 2)):  # the first token, the first two, all three
        gone = [axis for axis in range(3) if axis not in kept]
        p, counts = (x.sum(gone).flatten() if gone else x.flatten() for x in (p_VVV, counts_VVV))
        statistic, freedom = chi_square(counts, p)
        # Wilson and Hilferty: the cube root is nearly normal.  4 deviations: 3e-5 by chance
        scale = 2 / (9 * freedom)
        deviations = ((statistic / freedom) ** (1 / 3) - (1 - scale)) / scale**0.5
        assert deviations < 4, (name, kept, statistic, freedom)


def chi_square(counts, p):
    """Statistic and degrees of freedom; cells of less than five expected counts are taken together."""
    expected = p * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    filled = expected > 0
    return float(((counts - expected)[filled] ** 2 / expected[filled]).sum()), int(filled.sum()) - 1
