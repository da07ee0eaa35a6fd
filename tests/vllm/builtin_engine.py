"""Our engine on the same prompts, and its chains counted the way vLLM counts them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.vllm.counters import SpecCounters
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.load import load_decoder
from tlt_core.rollout import build
from tlt_core.rollout.engine import RoundTrace

DEPTH = 3


class Decoded(NamedTuple):
    """Responses in the order of the prompts, and every round."""

    rollouts: list[Rollout]
    rounds: list[RoundTrace]


def decode(
    folder: Path, prompts: Sequence[Sequence[int]], cfg: SpeculationConfig, *, max_tokens: int, max_live: int = 32
) -> Decoded:
    """Greedy, float32, past any stop token."""
    decoder = load_decoder(folder, dtype=torch.float32)
    max_len = max(map(len, prompts)) + max_tokens + 1
    engine = build.make_engine(decoder, cfg, max_live=max_live, max_len=max_len, seed=0)
    waiting = [GenerationRequest(NoiseKey(0, 0, i, 0), torch.tensor(list(p)).int()) for i, p in enumerate(prompts)]
    rollouts: list[Rollout] = []
    rounds: list[RoundTrace] = []

    def pull(wanted: int) -> list[GenerationRequest]:
        taken, waiting[:] = waiting[:wanted], waiting[wanted:]
        return taken

    params = SamplingParams(temperature=0.0, max_new_tokens=max_tokens)
    engine.decode(pull, rollouts.append, params, on_round=rounds.append)
    assert not engine.drafter_failures
    return Decoded(sorted(rollouts, key=lambda r: r.key.prompt_id), rounds)


def chain_counters(
    folder: Path, prompts: Sequence[Sequence[int]], firsts: Sequence[int], drafter: Path, *, max_tokens: int
) -> SpecCounters:
    """What vLLM would count with this drafter on these prompts, the first token of each answer given.

    vLLM samples the first token in the prompt's own pass and drafts from there on: so the first token is part of the
    prompt here.  It drafts full chains up to the end and counts what is accepted beyond it: so some tokens more are
    decoded here, and rounds are counted that begin before the end.
    """
    chain = StrategyConfig(drafter="eagle3", depth=DEPTH, tokens=DEPTH)
    cfg = SpeculationConfig(policy="fixed", strategies=(chain,), drafter_path=str(drafter))
    begun = [[*prompt, first] for prompt, first in zip(prompts, firsts, strict=True)]
    emitted: dict[int, int] = {}
    drafts = draft_tokens = 0
    per_pos = [0] * DEPTH
    for trace in decode(folder, begun, cfg, max_tokens=max_tokens + DEPTH).rounds:
        report = trace.report
        for number, drafted, accepted in zip(trace.numbers, report.drafted, report.accepted, strict=True):
            if emitted.setdefault(number, 1) < max_tokens:
                drafts += drafted > 0
                draft_tokens += drafted
                for position in range(accepted):
                    per_pos[position] += 1
            emitted[number] += 1 + accepted
    return SpecCounters(drafts, draft_tokens, sum(per_pos), tuple(per_pos))
