"""How a drafter does on held-out prompts: acceptance by position and temperature, the cost of a round, and from the two
the chain length to draft at each batch size (vLLM's `num_speculative_tokens_per_batch_size`).

    rate(B, K) = B (1 + s_1 + .. + s_K) / seconds(B, K)        s_j: share of the chains accepted to position j

K(B) is the shortest chain whose rate is within 2 % of the best: a draft token that gains less may cost more on the
serving machine.  K = 0 decodes plainly.

Acceptance at temperature 0 holds for every engine: a draft is right when it is the target's arg-max.  Above 0 it holds
for ours alone, whose drafts use the target's own noise.  Costs are those of the tuner's model, fitted on this machine
to rounds with chains of every length at several batch sizes.  Shapes: B batch sizes 1 .. B, K chain lengths 0 .. K.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, Prompt, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.model.sampling import NoiseStep
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine, RoundTrace, Speculation
from tlt_core.tuner.policies import RecordedTuner, make_tuner

_COST_TOKENS = 32  # of each request while costs are measured
_UNSETTLED = 2  # first rounds of a batch, whose costs do not count: the drafter reads the prompts in them
_WITHIN = 0.98  # of the best rate, for the shortest chain
_NAME = Eagle3Drafter.name


class ChainAcceptance(NamedTuple):
    """Chains verified at one temperature: offered=(10, 9), accepted=(6, 2) give survival=(0.6, 0.22)."""

    temperature: float
    responses: int
    tokens: int  # emitted
    offered: tuple[int, ...]  # chains at least 1, 2, .. drafts long
    accepted: tuple[int, ...]  # ... of which the first 1, 2, .. drafts were right

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of chains that are accepted to position 1, 2, ..; never rising."""
        shares, most = [], 1.0
        for offered, accepted in zip(self.offered, self.accepted, strict=True):
            most = min(most, accepted / offered) if offered else 0.0
            shares.append(most)
        return tuple(shares)

    @property
    def accept_length(self) -> float:
        """Tokens of a round with the longest chain, the target's own included (1: no gain)."""
        return 1.0 + sum(self.survival)


class Measured(NamedTuple):
    acceptance: tuple[ChainAcceptance, ...]  # by temperature
    seconds_BK: list[list[float]]  # of a round, entry [b - 1][k]; 0: plain
    context: int  # tokens known of a request in those rounds
    greedy: tuple[Rollout, ...]  # responses at temperature 0


class _ChainSweep(RecordedTuner):
    """Chains of each length in turn, and plain rounds."""

    def __init__(self, strategies: Sequence[Strategy]) -> None:
        super().__init__(strategies)
        self._arms, self._round = (OFF, *strategies), 0

    def begin(self) -> None:
        self._round = 0

    def choose(self, rows: Sequence[int], context: int) -> Strategy:
        # The longest chain comes first, so that the drafter reads the prompts in rounds that do not count.
        self._chosen = self._arms[-1 - self._round % len(self._arms)]
        return self._chosen

    def observe(self, rows: Sequence[int], report: RoundReport) -> None:
        self._round += 1
        if self._round > _UNSETTLED:
            super().observe(rows, report)


def measure(
    policy: Decoder,
    drafter: Eagle3Model,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    params: SamplingParams,
    depth: int,
    max_live: int,
    seed: int,
) -> Measured:
    """Decode the prompts once at each temperature with chains of `depth`, then time rounds up to `max_live` requests.

    policy: in the dtype and on the device that it is served with; its weights may be re-arranged for decoding.
    temperatures: must include 0.  params: everything but the temperature.
    """
    chains = [Strategy(_NAME, k, 1, k) for k in range(1, depth + 1)]
    longest = max(len(p.tokens) for p in prompts)
    max_len = longest + max(params.max_new_tokens, _COST_TOKENS)

    def engine_with(tuner: RecordedTuner) -> RolloutEngine:
        room = room_for(chains)
        drafters = {_NAME: Eagle3Drafter(drafter, policy, max_live=max_live, max_len=max_len, room=room)}
        return RolloutEngine(
            policy, max_live=max_live, max_len=max_len, speculation=Speculation(drafters, tuner, chains)
        )

    requests = [GenerationRequest(NoiseKey(seed, NoiseStep.EXPORT, p.id, 0), p.tokens) for p in prompts]
    acceptance, responses = [], {}
    for temperature in sorted(temperatures):
        engine = engine_with(make_tuner("fixed", chains[-1:]))
        accepted, finished = _accept(engine, requests, replace(params, temperature=temperature), depth=depth)
        acceptance.append(accepted)
        responses[temperature] = finished
    tokens = [len(r.tokens) - len(r.completion) // 2 for r in responses[0.0]]
    context = sum(tokens) // len(tokens)
    sweep = _ChainSweep(chains)
    engine = engine_with(sweep)
    _time_rounds(engine, sweep, requests, max_live=max_live)
    seconds = [
        [sweep.cost.round_seconds(arm, live, live * arm.tokens, live * context) for arm in (OFF, *chains)]
        for live in range(1, max_live + 1)
    ]
    return Measured(tuple(acceptance), seconds, context, tuple(responses[0.0]))


def expected_rates(survival: Sequence[float], seconds_BK: Sequence[Sequence[float]]) -> list[list[float]]:
    """Tokens a second for each batch size and chain length.

    survival: s_1 .. s_K; seconds_BK: of a round, entry [b - 1][k].  Raises ValueError where the two do not match.
    """
    emitted = [1.0]
    for share in survival:
        emitted.append(emitted[-1] + share)
    rates = []
    for live, seconds_K in enumerate(seconds_BK, start=1):
        if len(seconds_K) != len(emitted) or min(seconds_K) <= 0:
            raise ValueError(
                f"costs {list(seconds_K)} at batch size {live}: one positive number of seconds is needed for each "
                f"chain length from 0 to {len(survival)}"
            )
        rates.append([live * tokens / seconds for tokens, seconds in zip(emitted, seconds_K, strict=True)])
    return rates


def depth_table(rates_BK: Sequence[Sequence[float]]) -> list[list[int]]:
    """The table, from `expected_rates`: [[1, 8, 3], ...] is three draft tokens while 1 to 8 requests are decoded.

    Ranges begin at 1 and leave no gap; vLLM uses the last for larger batches.
    """
    table: list[list[int]] = []
    for size, row in enumerate(rates_BK, start=1):
        depth = next(k for k, rate in enumerate(row) if rate >= _WITHIN * max(row))
        if table and table[-1][2] == depth:
            table[-1][1] = size
        else:
            table.append([size, size, depth])
    return table


def _accept(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], params: SamplingParams, *, depth: int
) -> tuple[ChainAcceptance, list[Rollout]]:
    traces: list[RoundTrace] = []
    finished = engine.decode_all(requests, params, on_round=traces.append)
    offered, accepted = [0] * depth, [0] * depth
    for trace in traces:
        for length, hits in zip(trace.report.offered, trace.report.accepted, strict=True):
            for position in range(length):
                offered[position] += 1
                accepted[position] += hits > position
    tokens = sum(len(r.completion) for r in finished)
    return ChainAcceptance(params.temperature, len(finished), tokens, tuple(offered), tuple(accepted)), finished


def _time_rounds(
    engine: RolloutEngine, sweep: _ChainSweep, requests: Sequence[GenerationRequest], *, max_live: int
) -> None:
    """Rounds of one request, of a few and of many."""
    build.calibrate(engine)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=_COST_TOKENS)
    for live in sorted({1, min(4, max_live), max_live}):
        sweep.begin()
        batch = [(i, requests[i % len(requests)]) for i in range(live)]
        again = [GenerationRequest(one.key._replace(sample=i), one.prompt_tokens) for i, one in batch]
        engine.decode_all(again, greedy)
