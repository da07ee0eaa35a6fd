"""Rollout engines side by side: the same requests decoded under several speculation policies, interleaved.

Every repeat runs each configuration once, in turn forwards and backwards, so that a machine that slows down affects all
of them alike.  A near-tie may flip a token and end a response early or late, so every response is decoded to the length
that it has in plain decoding (`fix_lengths`).
"""

import dataclasses
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from conf.rollout import SpeculationConfig
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.rollout import build
from tlt_core.rollout.engine import RoundTrace

log = logging.getLogger(__name__)

_TAIL_LIVE = 4  # rounds with at most so many live requests are the tail
_BANDS = {"1 live": (1, 1), "2 live": (2, 2), "3-4 live": (3, 4), "5-8 live": (5, 8), "above": (9, 1 << 30)}


class Workload(NamedTuple):
    """What is decoded."""

    name: str
    decoder: Decoder
    requests: Sequence[GenerationRequest]
    params: SamplingParams
    max_live: int


class Measured(NamedTuple):
    """One configuration's run over the workload."""

    figures: dict[str, float]
    rollouts: Mapping[NoiseKey, Rollout]
    tuner: Mapping[str, Any]  # what its tuner knows at the end


def compare(
    workload: Workload,
    configurations: Mapping[str, SpeculationConfig],
    *,
    repeats: int,
    seed: int,
    kept: Collection[str] = (),
) -> dict[str, list[Measured]]:
    """Measurements of every configuration, by name, in the order of the repeats.

    kept: configurations whose tuner keeps what it learnt in the repeat before, as it does from step to step in a run.
    They begin with a repeat that is not measured."""
    results: dict[str, list[Measured]] = {name: [] for name in configurations}
    names = list(configurations)
    knows = {name: run(workload, configurations[name], seed=seed).tuner for name in kept}
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            measured = run(workload, configurations[name], seed=seed, tuner=knows.get(name))
            if name in knows:
                knows[name] = measured.tuner
            results[name].append(measured)
            log.info("repeat %d, %s, %s: %.1f tokens/s", repeat, workload.name, name, measured.figures["tokens_per_s"])
    return results


def fix_lengths(workload: Workload, *, seed: int) -> Workload:
    """The same requests, each cut at the length that plain decoding gives it."""
    plain = run(workload, SpeculationConfig(policy="off"), seed=seed).rollouts
    requests = [dataclasses.replace(r, max_new_tokens=len(plain[r.key].completion)) for r in workload.requests]
    return workload._replace(requests=requests, params=dataclasses.replace(workload.params, stop_token_ids=()))


def run(workload: Workload, cfg: SpeculationConfig, *, seed: int, tuner: Mapping[str, Any] | None = None) -> Measured:
    """Decode the workload with a new engine, drafter and tuner.  tuner: state of another run's tuner to go on with."""
    longest = max(len(r.prompt_tokens) for r in workload.requests)
    max_len = longest + workload.params.max_new_tokens
    engine = build.make_engine(workload.decoder, cfg, max_live=workload.max_live, max_len=max_len, seed=seed)
    if engine.speculation is not None and tuner is not None:
        engine.speculation.tuner.load_state_dict(tuner)
    elif cfg.policy == "cost_model":  # the others choose without knowing what a round costs
        build.calibrate(engine)
    rounds: list[RoundTrace] = []
    started_s = time.perf_counter()
    finished = {r.key: r for r in engine.decode_all(workload.requests, workload.params, on_round=rounds.append)}
    seconds = time.perf_counter() - started_s
    tokens = sum(len(r.completion) for r in finished.values())
    tail = [r for r in rounds if r.report.live <= _TAIL_LIVE]
    active = [r.report for r in rounds if not r.report.strategy.is_off]
    figures = {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tail_tokens_per_s": sum(r.tokens for r in tail) / max(sum(r.seconds for r in tail), 1e-9),
        "tokens_per_request_round": tokens / sum(r.report.live for r in rounds),
        "accept_length": 1 + sum(sum(r.accepted) for r in active) / max(sum(r.live for r in active), 1),
        "active_frac": len(active) / len(rounds),
        "rounds": float(len(rounds)),
        "tokens": float(tokens),
    }
    for band, (fewest, most) in _BANDS.items():
        own = [r for r in rounds if fewest <= r.report.live <= most]
        figures |= {f"{band}: {name}": value for name, value in _band(own).items()} if own else {}
    return Measured(figures, finished, {} if engine.speculation is None else engine.speculation.tuner.state_dict())


def _band(own: Sequence[RoundTrace]) -> dict[str, float]:
    """Means over these rounds."""
    count, seconds = len(own), sum(r.seconds for r in own)
    return {
        "rounds": float(count),
        "live": sum(r.report.live for r in own) / count,
        "tokens_per_s": sum(r.tokens for r in own) / seconds,
        "tokens_per_round": sum(r.tokens for r in own) / count,
        "pass_tokens": sum(r.report.live + sum(r.report.drafted) for r in own) / count,
        "draft_ms": 1e3 * sum(r.report.draft_s + r.report.backlog_s for r in own) / count,
        "verify_ms": 1e3 * sum(r.report.verify_s for r in own) / count,
    }


def differing(reference: Mapping[NoiseKey, Rollout], other: Mapping[NoiseKey, Rollout]) -> float:
    """Share of responses whose tokens differ."""
    return sum(not torch.equal(r.tokens, other[key].tokens) for key, r in reference.items()) / len(reference)
