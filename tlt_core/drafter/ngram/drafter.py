"""N-gram drafter: what followed this text elsewhere?  It needs no model and no training and works from the first token.

Each prompt has one suffix automaton, which holds the prompt, its live responses as they grow, its finished ones, and
those of earlier visits of the prompt.  The end of a request's text is one of its states.  The nearest state up the
links that has a continuation is the longest suffix of the text that was written elsewhere.

    end of the text -> longest match -> estimate of the next token -> best-first tree, most probable node first

Estimate.  With N continuations, T of them different, after a match of m tokens; Witten-Bell blending with ever shorter
matches:

    q(c) = k n(c) / N + (1 - k) q_shorter(c),    k = N g / (N g + T),    g = 1 + m / 2

What is left after the shortest match is q's escape: the probability of a token that was never seen here.

Coupling.  The target takes the token whose log p + Gumbel noise is largest.  With noise -log E, that is the smallest
E_c / p_c: a race of exponential clocks with rates p.  The drafter knows the clocks E, so it ranks the children by
E_c / q_c.  All unseen tokens together are one clock whose rate is the escape, so the first child beats them with
probability exp(-escape E_c / q_c).

Shapes: B live requests, one slot each; W new tokens of the request that lags most.
"""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_core.drafter.ngram.suffix_automaton import ROOT, SuffixAutomaton
from tlt_core.items.hidden_states import HiddenStates
from tlt_core.items.speculation import DraftTree, LiveView, Strategy
from tlt_core.items.types import GenerationRequest
from tlt_core.model.sampling import position_key

_BLENDED_MATCHES = 4
_NEGLIGIBLE = 0.02  # escape below which shorter matches are not consulted
_NEGLIGIBLE_TOKEN = 0.01  # of hundreds of continuations that a short match can have, most are not worth ranking
_MASK_32 = (1 << 32) - 1

Node = tuple[int, int, int, int]  # of a `DraftTree` in the making: token, parent, row, depth


class Candidate(NamedTuple):
    """A token that may come next.  Sorts by probability, then by age."""

    probability: float  # q; over all tokens, and with the escape, they sum to one
    recent: int  # larger: seen later
    token: int
    state: int  # from which the draft continues
    matched: int  # tokens of the match in that state


@dataclass(slots=True)
class _Cursor:
    """End of a text in its group's automaton."""

    state: int = ROOT
    matched: int = 0  # tokens of the text that the state stands for
    grows: bool = True  # its tokens become part of the index


@dataclass(slots=True)
class _Group:
    """Index of one prompt."""

    automaton: SuffixAutomaton
    start: _Cursor  # end of the prompt
    live: int = 0
    tokens: int = 0  # indexed


@dataclass(slots=True)
class _Live:
    """A live request."""

    group: _Group
    cursor: _Cursor
    fed: int  # tokens that the cursor has passed


class NgramDrafter:
    """`tlt_core.items.speculation.Drafter` over the rollouts of the same prompt."""

    name = "ngram"
    backlog_s = 0.0
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        max_index_tokens: int = 500_000,
        min_match: int = 1,
        min_probability: float = 0.05,
    ) -> None:
        """max_index_tokens: bound over all prompts, at about 0.5 kB per token.  The prompts that were used longest ago
        are forgotten first; prompts with live requests are kept, but stop growing.  min_match: shortest text to
        recognise.  min_probability: nodes with a lower estimated chance of acceptance are not drafted."""
        self._max_index_tokens = max_index_tokens
        self._min_match = min_match
        self._min_probability = min_probability
        self._groups: dict[tuple[int, bytes], _Group] = {}  # the most recently used is last
        self._rows: dict[int, _Live] = {}
        self._index_tokens = 0

    @property
    def index_tokens(self) -> int:
        """Tokens indexed now, shared beginnings counted once."""
        return self._index_tokens

    def admit(self, row: int, request: GenerationRequest) -> None:
        prompt = request.prompt_tokens
        key = (request.key.prompt_id, prompt.numpy().tobytes())  # prompts never mix, even if ids are reused
        group = self._groups.pop(key, None)
        if group is None:
            group = _Group(SuffixAutomaton(), _Cursor(), live=1)
            self._advance(group, group.start, prompt.tolist())
        else:
            group.live += 1
        self._groups[key] = group
        start = group.start
        self._rows[row] = _Live(group, _Cursor(start.state, start.matched, start.grows), fed=len(prompt))

    def borrow(self, hidden: HiddenStates) -> None:
        """Does nothing: this drafter needs no hidden states."""

    def propose(self, view: LiveView, strategy: Strategy) -> DraftTree:
        """Read what was decoded since the last call, then draft where the text was seen before."""
        streams = self._catch_up(view)
        coupled = view.params.temperature > 0
        tree: list[Node] = []
        for row, stream in enumerate(streams):
            self._draft(row, view, strategy, stream if coupled else None, tree)
        return DraftTree.of_lists(*zip(*tree, strict=True)) if tree else DraftTree.empty()

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows.pop(source)

    def release(self, row: int, tokens: Tensor) -> None:
        """Add the rest of the finished response to the index, for its siblings and for the next visit."""
        done = self._rows.pop(row)
        self._advance(done.group, done.cursor, tokens[done.fed :].tolist())
        done.group.live -= 1

    def candidates(self, automaton: SuffixAutomaton, state: int, matched: int) -> tuple[list[Candidate], float]:
        """What may follow the longest suffix that has a continuation, most probable first, and the escape.

        matched: tokens of the text that `state` stands for.  Tokens with q below 0.01 are left out.
        """
        next_, link, length, count = automaton.next, automaton.link, automaton.length, automaton.count
        q: dict[int, float] = {}
        heads: dict[int, tuple[int, int]] = {}  # of the longest match that knows the token
        escape, blended = 1.0, 0
        while state != ROOT and matched <= length[link[state]]:
            state = link[state]  # the state was split after this text, which is not indexed, had reached it
        while matched >= self._min_match and blended < _BLENDED_MATCHES and escape > _NEGLIGIBLE:
            after = next_[state]
            if after:
                counts = [count[target] for target in after.values()]
                total, kinds = sum(counts), len(after)
                weight = total * (1 + matched / 2)
                share = escape * weight / ((weight + kinds) * total)
                for (token, target), times in zip(after.items(), counts, strict=True):
                    if token in q:
                        q[token] += share * times
                    else:
                        q[token] = share * times
                        heads[token] = target, matched + 1
                escape *= kinds / (weight + kinds)
                blended += 1
            state = link[state]
            matched = length[state]
        recent = automaton.recent
        found = [
            Candidate(share, recent[heads[token][0]], token, *heads[token])
            for token, share in q.items()
            if share >= _NEGLIGIBLE_TOKEN
        ]
        found.sort(reverse=True)
        return found, escape

    def _draft(self, row: int, view: LiveView, strategy: Strategy, stream: int | None, tree: list[Node]) -> None:
        """Best-first: take the node with the highest estimated chance, and queue its children.

        stream: base of the request's noise; None: rank by probability alone."""
        live = self._rows[row]
        automaton, last = live.group.automaton, len(tree) + strategy.tokens
        deepest, stops = min(strategy.depth, view.room[row] - 1), view.params.stop_token_ids
        least = max(self._min_probability, view.min_draft_probs.token)
        queue: list[tuple[float, int, int, int, Candidate]] = []  # -chance, tie-break, parent, depth, what
        parent, depth, chance, state, matched = -1, 0, 1.0, live.cursor.state, live.cursor.matched
        pushed = 0
        while len(tree) < last:
            if depth < deepest and (parent < 0 or tree[parent][0] not in stops):
                found, escape = self.candidates(automaton, state, matched)
                ranked = (
                    [(c.probability, c) for c in found]
                    if stream is None
                    else _ranked(found, escape, stream, view.lengths[row] + depth)
                )
                for share, candidate in ranked[: strategy.width]:
                    if chance * share >= least:
                        pushed += 1
                        heapq.heappush(queue, (-chance * share, pushed, parent, depth + 1, candidate))
            if not queue:
                return
            chance, _, above, depth, (_, _, token, state, matched) = heapq.heappop(queue)
            chance, parent = -chance, len(tree)
            tree.append((token, above, row, depth))

    def _catch_up(self, view: LiveView) -> list[int]:
        """Feed what was decoded since the last call; returns the base of each request's noise."""
        requests = [self._rows[row] for row in range(len(view.lengths))]
        behind = [length - live.fed for live, length in zip(requests, view.lengths, strict=True)]
        width = max(behind, default=0)
        starts_B = torch.tensor([live.fed for live in requests], dtype=torch.int64, device=view.tokens_BC.device)
        at_BW = starts_B[:, None] + torch.arange(width, device=starts_B.device)
        new_BW = view.tokens_BC.gather(1, at_BW.clamp_max(view.tokens_BC.shape[1] - 1))
        values = torch.cat([new_BW, view.streams_B[:, None]], dim=1).tolist()  # the only host sync
        for live, count, (*tokens, _) in zip(requests, behind, values, strict=True):
            self._advance(live.group, live.cursor, tokens[:count])
            live.fed += count
        return [stream for *_, stream in values]

    def _advance(self, group: _Group, cursor: _Cursor, tokens: Iterable[int]) -> None:
        """Pass tokens.  Once the index is full, a text is only matched and no longer indexed."""
        automaton = group.automaton
        for token in tokens:
            if cursor.grows and automaton.is_new(cursor.state, token):
                if self._has_room():
                    group.tokens += 1
                    self._index_tokens += 1
                else:
                    cursor.grows = False
            if cursor.grows:
                cursor.state = automaton.append(cursor.state, token)
                cursor.matched = automaton.length[cursor.state]
            else:
                cursor.state, cursor.matched = automaton.step(cursor.state, cursor.matched, token)

    def _has_room(self) -> bool:
        """Whether one more token fits; forgets the prompts that were used longest ago."""
        while self._index_tokens >= self._max_index_tokens:
            oldest = next((key for key, group in self._groups.items() if not group.live), None)
            if oldest is None:
                return False
            self._index_tokens -= self._groups.pop(oldest).tokens
        return True


def _ranked(found: list[Candidate], escape: float, stream: int | None, position: int) -> list[tuple[float, Candidate]]:
    """Candidates in the order in which the noise of a position favours them, each with its chance of being chosen."""
    if stream is None:
        return [(candidate.probability, candidate) for candidate in found]
    low, high = position_key(stream, position)
    timed = sorted([(clock(low, high, candidate.token) / candidate.probability, candidate) for candidate in found])
    total = sum([1 / time for time, _ in timed])
    return [(math.exp(-escape * time) / (time * total), candidate) for time, candidate in timed]


def clock(low: int, high: int, token: int) -> float:
    """E > 0 of the module docstring: `kernels.sampling.coupled_sample.gumbel_noise` is -log of it, in float32."""
    bits = (token * 0x9E3779B1 & _MASK_32) ^ low
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B & _MASK_32) ^ high
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _MASK_32
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    return -math.log1p(-min((bits + 0.5) * 2.0**-31, 1 - 2.0**-24))
