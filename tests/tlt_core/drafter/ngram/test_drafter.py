"""The n-gram drafter proposes what was written before, within its limits, and shares the target's noise."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from kernels.sampling.coupled_sample import gumbel_noise
from tlt_core.drafter.ngram.drafter import NgramDrafter, clock
from tlt_core.drafter.ngram.suffix_automaton import ROOT, SuffixAutomaton
from tlt_core.items.speculation import DraftTree, LiveView, MinDraftProbs, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.model.sampling import position_key, row_keys, stream_key
from tlt_core.rollout.draft_check import check_tree

CHAIN = Strategy("ngram", depth=4, width=1, tokens=4)
TREE = Strategy("ngram", depth=4, width=2, tokens=8)
GREEDY = SamplingParams(temperature=0.0, stop_token_ids=(99,))
PROMPT = [1, 50, 51, 52]


def request(prompt_id: int = 3, sample: int = 0, prompt: Sequence[int] = PROMPT) -> GenerationRequest:
    return GenerationRequest(NoiseKey(0, 1, prompt_id, sample), torch.tensor(prompt, dtype=torch.int32))


def view(
    requests: Sequence[GenerationRequest],
    texts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    room: Sequence[int] | None = None,
) -> LiveView:
    """Texts are prompt and response; beyond them lies rubbish."""
    tokens_BC = torch.full((len(texts), 64), 77)
    for row, text in enumerate(texts):
        tokens_BC[row, : len(text)] = torch.tensor(text)
    streams_B = torch.tensor([stream_key(r.key) for r in requests])
    return LiveView(requests, tokens_BC, [len(t) for t in texts], room or [100] * len(texts), streams_B, params)


def visit(drafter: NgramDrafter, response: Sequence[int], *, row: int = 0, **of: int) -> None:
    """A request that is admitted and ends without having been asked."""
    own = request(**of)
    drafter.admit(row, own)
    drafter.release(row, torch.tensor([*own.prompt_tokens.tolist(), *response], dtype=torch.int32))


def paths(tree: DraftTree, row: int = 0) -> list[list[int]]:
    """Token paths from the root to every node of a row, in the tree's order."""
    parents = tree.parents_N.tolist()
    result: dict[int, list[int]] = {-1: []}
    for node, (token, of) in enumerate(zip(tree.tokens_N.tolist(), tree.rows_N.tolist(), strict=True)):
        if of == row:
            result[node] = [*result[parents[node]], token]
    return [result[node] for node in sorted(result) if node >= 0]


def test_proposes_what_a_sibling_writes_while_both_are_live():
    """Row 0 is ahead of row 1, which writes the same."""
    drafter, requests = NgramDrafter(), [request(sample=0), request(sample=1)]
    for row, own in enumerate(requests):
        drafter.admit(row, own)
    tree = drafter.propose(view(requests, [[*PROMPT, 60, 61, 62, 63, 64], [*PROMPT, 60]]), CHAIN)
    assert paths(tree, row=1)[-1] == [61, 62, 63, 64]
    assert paths(tree, row=0) == []  # its end is nowhere else


def test_catches_up_after_rounds_without_it():
    """Asked after every token, every seventh, or once: the same trees.  With noise, for it leaves no ties to age."""
    rng, sampled = random.Random(0), SamplingParams(temperature=1.0)
    texts = [[*PROMPT, *(rng.choice([5, 6, 7]) for _ in range(40))] for _ in range(3)]
    requests = [request(sample=i) for i in range(3)]
    final = []
    for stride in (1, 7, 40):
        drafter = NgramDrafter(min_probability=0.0)
        for row, own in enumerate(requests):
            drafter.admit(row, own)
        for known in range(stride, 41, stride):
            drafter.propose(view(requests, [text[: len(PROMPT) + known] for text in texts], sampled), TREE)
        tree = drafter.propose(view(requests, texts, sampled), TREE)
        final.append((drafter.index_tokens, [paths(tree, row) for row in range(3)]))
    assert final[0] == final[1] == final[2]
    assert [len(drafted) for drafted in final[0][1]] == [8, 8, 8]


def test_rows_move_and_are_given_again():
    """Row 0 ends, row 2 comes into its place, a new request takes row 2."""
    drafter, requests = NgramDrafter(), [request(prompt_id=i) for i in range(3)]
    texts = [[*PROMPT, 10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3, 10 * i] for i in range(1, 4)]
    for row, own in enumerate(requests):
        drafter.admit(row, own)
    drafter.propose(view(requests, texts), CHAIN)
    drafter.release(0, torch.tensor([*texts[0], 11, 99], dtype=torch.int32))
    drafter.move(2, 0)
    drafter.admit(2, request(prompt_id=0, sample=1))
    requests, texts = [requests[2], requests[1], request(prompt_id=0, sample=1)], [texts[2], texts[1], [*PROMPT, 10]]
    tree = drafter.propose(view(requests, texts), Strategy("ngram", 2, 1, 2))
    assert [paths(tree, row)[-1] for row in range(3)] == [[31, 32], [21, 22], [11, 12]]
    assert tree.rows_N.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("other", [{"prompt_id": 4}, {"prompt": [1, 50, 51, 53]}])
def test_prompts_never_mix(other):
    """Neither another prompt, nor another text under the same id."""
    drafter = NgramDrafter()
    visit(drafter, [60, 61, 62, 63])
    own = request(**other)
    drafter.admit(0, own)
    texts = [[*own.prompt_tokens.tolist(), 60]]
    assert paths(drafter.propose(view([own], texts), TREE)) == []
    drafter.admit(1, request(sample=5))
    both = view([own, request(sample=5)], [*texts, [*PROMPT, 60]])
    tree = drafter.propose(both, TREE)
    assert paths(tree, row=0) == []
    assert paths(tree, row=1)[0] == [61]


def test_greedy_ranks_by_count_then_by_age():
    drafter = NgramDrafter(min_match=2)
    for response in ([60, 61], [60, 62], [60, 61], [60, 63], [60, 62], [60, 61]):
        visit(drafter, response)
    own = request(sample=9)
    drafter.admit(0, own)
    strategy = Strategy("ngram", 1, 4, 4)
    assert paths(drafter.propose(view([own], [[*PROMPT, 60]]), strategy)) == [[61], [62], [63]]
    visit(drafter, [60, 63], row=1)
    assert paths(drafter.propose(view([own], [[*PROMPT, 60]]), strategy)) == [[61], [63], [62]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_limits_and_tree_invariants(seed, temperature):
    """Depth, width, tokens and room are kept; parents first, rows ascending, siblings distinct."""
    rng = random.Random(seed)
    drafter = NgramDrafter(min_probability=0.0)
    for _ in range(6):
        visit(drafter, [rng.choice([5, 6, 7]) for _ in range(40)])
    requests = [request(sample=10 + row) for row in range(5)]
    texts = [[*PROMPT, *(rng.choice([5, 6, 7]) for _ in range(rng.randint(1, 20)))] for _ in requests]
    for row, own in enumerate(requests):
        drafter.admit(row, own)
    room = [1, 2, 3, 100, 100]
    params = SamplingParams(temperature=temperature)
    for depth, width, tokens in [(4, 1, 4), (4, 2, 8), (3, 3, 30), (8, 2, 5), (1, 2, 1)]:
        asked, strategy = view(requests, texts, params, room), Strategy("ngram", depth, width, tokens)
        tree = drafter.propose(asked, strategy)
        check_tree(tree, asked, strategy, vocab_size=100)
        rows, depths = tree.rows_N.tolist(), tree.depths_N.tolist()
        children = Counter(zip(rows, tree.parents_N.tolist(), strict=True))
        assert max(children.values()) <= width
        for row in range(5):
            deepest = max((d for d, r in zip(depths, rows, strict=True) if r == row), default=0)
            assert deepest == min(depth, room[row] - 1) or (deepest and rows.count(row) == tokens)
        assert rows.count(4) == tokens or (width, depth) == (3, 3)


def test_improbable_nodes_are_not_drafted():
    """Twenty different continuations: each has a chance of less than 0.05.  The tuner's least says so as well."""
    for threshold, least, expected in ((0.05, 0.0, 0), (0.0, 0.05, 0), (0.0, 0.0, 4), (0.0, 0.001, 4)):
        drafter = NgramDrafter(min_probability=threshold)
        for token in range(20):
            visit(drafter, [40, 100 + token])
        own = request(sample=9)
        drafter.admit(0, own)
        seen = view([own], [[*PROMPT, 40]])._replace(min_draft_probs=MinDraftProbs(token=least))
        assert len(drafter.propose(seen, Strategy("ngram", 1, 4, 4)).tokens_N) == expected


def test_memory_is_bounded_and_old_prompts_go_first():
    """30 tokens: two visits of 14 fit beside each other; the one not seen for longest is dropped whole."""
    drafter = NgramDrafter(max_index_tokens=30)
    answers = {prompt_id: [100 * prompt_id + k for k in range(1, 11)] for prompt_id in (1, 2, 3)}
    for prompt_id in (1, 2, 1, 3):  # 1 is seen again, so 2 has to go
        visit(drafter, answers[prompt_id], prompt_id=prompt_id)
        assert drafter.index_tokens <= 30
    assert drafter.index_tokens == 28

    def remembers(prompt_id: int) -> bool:
        own = request(prompt_id=prompt_id, sample=1)
        drafter.admit(0, own)
        text = [*PROMPT, answers[prompt_id][0]]
        drafted = len(drafter.propose(view([own], [text]), CHAIN).tokens_N)
        drafter.release(0, torch.tensor(text, dtype=torch.int32))
        return drafted == 4

    assert [remembers(1), remembers(3), remembers(2)] == [True, True, False]


def test_live_prompts_survive_and_stop_growing():
    """Room for 14 tokens: prompt 1 is live, and goes on matching when nothing more is indexed."""
    drafter, own = NgramDrafter(max_index_tokens=14), request(prompt_id=1)
    drafter.admit(0, own)
    text = [*PROMPT, *range(60, 70)]
    drafter.propose(view([own], [text]), CHAIN)
    assert drafter.index_tokens == 14
    visit(drafter, range(10), row=1, prompt_id=2)
    text += [80, 81, 82, 63]
    tree = drafter.propose(view([own], [text]), CHAIN)
    assert paths(tree)[-1] == [64, 65, 66, 67]
    text += [64, 65]
    assert paths(drafter.propose(view([own], [text]), CHAIN))[-1] == [66, 67, 68, 69]
    assert drafter.index_tokens == 14
    drafter.release(0, torch.tensor(text, dtype=torch.int32))
    visit(drafter, range(10), row=0, prompt_id=2)
    visit(drafter, range(10), row=0, prompt_id=4)  # nobody is live: the others make room
    assert drafter.index_tokens == 14


def test_noise_is_the_targets():
    """position_key and clock against the tensors that the target samples with; odd streams and ids included."""
    rng = random.Random(0)
    streams = [stream_key(NoiseKey(0, 1, 2, sample)) for sample in range(200)] + [0, -1, 2**63 - 1, -(2**63)]
    positions = [rng.randrange(1, 40_000) for _ in streams]
    ids = torch.tensor([0, 1, 2, 63, 49_151, 151_935], dtype=torch.int32)
    keys_N2 = row_keys(torch.tensor(streams), torch.tensor(positions))
    own = [position_key(stream, position) for stream, position in zip(streams, positions, strict=True)]
    assert (keys_N2.long() & 0xFFFFFFFF).tolist() == [list(key) for key in own]
    noise_NV = -torch.tensor([[clock(*key, token) for token in ids.tolist()] for key in own]).log()
    torch.testing.assert_close(noise_NV, gumbel_noise(keys_N2, ids), atol=1e-5, rtol=1e-5)


def counted_drafter(counts: dict[int, int]) -> NgramDrafter:
    """After 60, the tokens were seen that often; matches of 5 tokens at least, so that nothing is blended in."""
    drafter = NgramDrafter(min_match=5, min_probability=0.0)
    for token, times in counts.items():
        for _ in range(times):
            visit(drafter, [60, token])
    return drafter


COUNTS = {61: 8, 62: 4, 63: 3, 64: 1}


def test_coupled_draft_is_arg_max_of_log_q_plus_noise():
    """4,000 streams: the child of width 1 equals arg-max(log q + Gumbel noise) each time, and its frequencies are q
    (chi-square, 16.3 is the 0.999 quantile at 3 degrees of freedom)."""
    drafter = counted_drafter(COUNTS)
    requests = [request(sample=100 + i) for i in range(4_000)]
    for row, own in enumerate(requests):
        drafter.admit(row, own)
    live = view(requests, [[*PROMPT, 60]] * len(requests), SamplingParams(temperature=1.0))
    tree = drafter.propose(live, Strategy("ngram", 1, 1, 1))
    ids, q = torch.tensor(list(COUNTS), dtype=torch.int32), torch.tensor(list(COUNTS.values())) / 16
    position = len(PROMPT) + 1  # the index that the target samples next
    scores = q.log() + gumbel_noise(row_keys(live.streams_B, torch.full((len(requests),), position)), ids)
    assert tree.tokens_N.tolist() == ids[scores.argmax(1)].tolist()
    seen = torch.tensor([(tree.tokens_N == token).sum() for token in ids]).double()
    expected = q.double() * len(requests)
    assert ((seen - expected) ** 2 / expected).sum() < 16.27
    wide = drafter.propose(live, Strategy("ngram", 1, 3, 3))
    assert wide.tokens_N.tolist() == ids[scores.argsort(1, descending=True)[:, :3]].flatten().tolist()


def test_min_match_is_the_shortest_text_recognised():
    """The row's last two tokens are a sibling's, the one before is not."""
    for min_match, expected in ((2, [[62]]), (3, [])):
        drafter = NgramDrafter(min_match=min_match)
        visit(drafter, [60, 61, 62])
        own = request(sample=9)
        drafter.admit(0, own)
        tree = drafter.propose(view([own], [[*PROMPT, 59, 60, 61]]), Strategy("ngram", 1, 1, 1))
        assert paths(tree) == expected


def test_estimate_by_hand():
    """After 5 6 once 7; after 6 alone three times 8 and once 7.

    m = 2: N = T = 1, g = 2, k = 2 / 3.  m = 1: N = 4, T = 2, g = 1.5, k = 6 / 8.
    """
    automaton, end = SuffixAutomaton(), ROOT
    for token in (5, 6, 7, 6, 8, 6, 8, 6, 8):
        end = automaton.append(end, token)
    state = automaton.next[automaton.next[ROOT][5]][6]
    found, escape = NgramDrafter(min_match=1).candidates(automaton, state, 2)
    assert [candidate.token for candidate in found] == [7, 8]
    assert [candidate.matched for candidate in found] == [3, 2]
    assert found[0].probability == pytest.approx(2 / 3 + 1 / 3 * 3 / 4 * 1 / 4)
    assert found[1].probability == pytest.approx(1 / 3 * 3 / 4 * 3 / 4)
    assert escape == pytest.approx(1 / 3 * 1 / 4)
