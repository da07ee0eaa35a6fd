"""Plain and adaptive decoding at the sizes of real models, with fixed numbers of live requests.

Weights are random and acceptance is simulated (`planted.py`).  Launches, bytes and arithmetic are those of the real
model and of an EAGLE-3 drafter of its width.  Both engines decode the same requests on the same decoder, in turn.  A
round counts while all requests are live.  Its time is measured from the end of the previous round, so it
includes the host's work in between; the first round, which waits for the prompts, does not count.  Beside them is the
floor of a plain round: weights and known keys are read once at the speed of a large copy, and each launch takes as long
as the smallest one in a replayed graph.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bench.kernels import ops as bench_kernels
from bench.kernels.ops import QWEN_7B, SMALL, Clock
from bench.sizes import launches, planted
from bench.verdicts import summarise, verdict
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.model.decoder import Decoder
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine, RoundTrace, Speculation
from tlt_core.tuner.policies import make_tuner

log = logging.getLogger(__name__)

CHAINS = tuple(Strategy("eagle3", depth, 1, depth) for depth in (2, 4, 6, 8))
_BOUNDS = {1: 2.0, 4: 2.0}  # adaptive over plain, by live requests: the tail
_NEVER_BELOW = 0.97
_OF_FLOOR = 0.5


class Sizes(NamedTuple):
    """How much is decoded."""

    live: tuple[int, ...]
    prompt: int  # tokens of each
    response: int
    draft_vocab: int


ON_CPU = Sizes((1, 2, 4), 12, 20, 128)

Written = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], None]
"""Gets all rows and verdicts so far."""


class Bench:
    """One shape on one device."""

    def __init__(self, shape: str, device: torch.device, *, acceptance: float, sizes: Sizes) -> None:
        """acceptance: mean tokens per round of the deepest chain.  Raises ValueError if it is impossible."""
        self.config, self.device, self.sizes = planted.SHAPES[shape], device, sizes
        self.chance = planted.chance_for(acceptance, depth=CHAINS[-1].depth)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.decoder = planted.planted_target(self.config, dtype=dtype, device=device)
        self._network = planted.random_drafter(self.config, draft_vocab=sizes.draft_vocab, dtype=dtype, device=device)
        clock = Clock(device)
        self.ceilings = bench_kernels.ceilings(clock, device, QWEN_7B if device.type == "cuda" else SMALL)
        self.launch_s = launches.smallest_s(device)
        self.launches = 0  # of a plain round; `run` counts them

    @property
    def max_len(self) -> int:
        """Tokens of a request."""
        return self.sizes.prompt + self.sizes.response

    def floor_s(self, live: int) -> float:
        """Seconds of a plain round in the middle of a response, if only bytes and launches counted."""
        weights = read_bytes(self.decoder)
        config, itemsize = self.config, self.decoder.head_weight.element_size()
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
        keys_and_values = live * (self.sizes.prompt + self.sizes.response / 2) * token
        return (weights + keys_and_values) / self.ceilings.bytes_per_s + self.launches * self.launch_s

    def plain(self) -> RolloutEngine:
        """An engine without speculation."""
        return RolloutEngine(self.decoder, max_live=max(self.sizes.live), max_len=self.max_len, static=True)

    def adaptive(self) -> RolloutEngine:
        """An engine that chooses among chains."""
        drafter = planted.PlantedDrafter(
            self._network,
            self.decoder,
            chance=self.chance,
            max_live=max(self.sizes.live),
            max_len=self.max_len,
            room=room_for(CHAINS),
        )
        engine = self._engine(drafter, CHAINS)
        build.calibrate(engine)
        return engine

    def _engine(self, drafter: Eagle3Drafter, strategies: Sequence[Strategy]) -> RolloutEngine:
        speculation = Speculation({"eagle3": drafter}, make_tuner("cost_model", strategies), strategies)
        most = max(self.sizes.live)
        return RolloutEngine(self.decoder, max_live=most, max_len=self.max_len, speculation=speculation, static=True)

    def decode(self, engine: RolloutEngine, live: int, params: SamplingParams, *, turn: int) -> "Decoded":
        """Decode `live` responses at once.  The same turn gives the same requests."""
        generator = torch.Generator().manual_seed(turn)
        prompts = torch.randint(self.config.vocab_size, (live, self.sizes.prompt), generator=generator)
        waiting = [GenerationRequest(NoiseKey(turn, 1, i, 0), prompt.int()) for i, prompt in enumerate(prompts)]
        finished: dict[NoiseKey, Rollout] = {}
        rounds: list[RoundTrace] = []

        def pull(wanted: int) -> list[GenerationRequest]:
            taken, waiting[:] = waiting[:wanted], waiting[wanted:]
            return taken

        engine.decode(pull, lambda r: finished.__setitem__(r.key, r), params, on_round=rounds.append)
        return Decoded(_figures(rounds, live), finished)


class Decoded(NamedTuple):
    """Results of one run."""

    figures: dict[str, float]
    rollouts: dict[NoiseKey, Rollout]


def run(
    shape: str,
    device: torch.device,
    *,
    acceptance: float,
    repeats: int,
    sizes: Sizes,
    written: Written = lambda rows, verdicts: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and verdicts of a report.  written: is told after each number of live requests.  Raises ValueError for an
    impossible acceptance."""
    began_s = time.perf_counter()
    bench = Bench(shape, device, acceptance=acceptance, sizes=sizes)
    params = SamplingParams(max_new_tokens=bench.sizes.response)
    verdicts: list[dict[str, Any]] = []
    plain, adaptive_engine = bench.plain(), bench.adaptive()
    plain.prepare(params)
    bench.launches = launches.of_plain_round(plain, params)
    rows = [_setting(shape, bench, acceptance)]
    ratios: dict[int, list[float]] = {}
    for live in bench.sizes.live:
        runs = _in_turn(bench, plain, adaptive_engine, live, params, repeats=repeats)
        ratios[live] = [a.figures["tokens_per_s"] / p.figures["tokens_per_s"] for p, a in runs]
        rows += _rows(bench, live, runs)
        if live == 1:
            of_floor = [bench.floor_s(1) / p.figures["round_s"] for p, _ in runs]
            verdicts.append(verdict(f"{shape}: plain decoding of 1 request, of the floor", of_floor, _OF_FLOOR))
        same = [float(_same(p.rollouts, a.rollouts)) for p, a in runs]
        verdicts.append(verdict(f"{shape}: {live} live, share of runs whose tokens are plain decoding's", same, 1.0))
        if live in _BOUNDS:
            verdicts.append(verdict(f"{shape}: adaptive over plain, {live} live", ratios[live], _BOUNDS[live]))
        log.info("%s, %d live: adaptive over plain %.2f", shape, live, statistics.median(ratios[live]))
        written(rows, verdicts)
    worst = min(ratios.values(), key=statistics.median)
    verdicts.append(verdict(f"{shape}: adaptive over plain, the worst number of live requests", worst, _NEVER_BELOW))
    rows[0]["seconds"] = time.perf_counter() - began_s
    written(rows, verdicts)
    return rows, verdicts


def read_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that a pass reads: all except an embedding that is not the head."""
    weights = {id(p): p for p in decoder.parameters()}
    if not decoder.config.tie_word_embeddings:
        del weights[id(decoder.embed_tokens.weight)]
    return sum(p.nbytes for p in weights.values())


def _setting(shape: str, bench: Bench, acceptance: float) -> dict[str, Any]:
    return {
        "configuration": "setting",
        "shape": shape,
        "device": bench.device.type,
        "weights": "random; acceptance is planted",
        "planted_acceptance": acceptance,
        "chance": bench.chance,
        "parameters": sum(p.numel() for p in bench.decoder.parameters()),
        "weight_bytes": read_bytes(bench.decoder),
        "launches": bench.launches,
        "launch_s": bench.launch_s,
        "prompt": bench.sizes.prompt,
        "response": bench.sizes.response,
        **bench.ceilings._asdict(),
    }


def _in_turn(
    bench: Bench, plain: RolloutEngine, other: RolloutEngine, live: int, params: SamplingParams, *, repeats: int
) -> list[tuple[Decoded, Decoded]]:
    """Runs of both engines in turn, after one of each that does not count."""
    runs = []
    for turn in range(repeats + 1):
        engines = (plain, other) if turn % 2 else (other, plain)
        first, second = (bench.decode(engine, live, params, turn=turn) for engine in engines)
        runs.append((first, second) if turn % 2 else (second, first))
    return runs[1:]


def _figures(every: Sequence[RoundTrace], live: int) -> dict[str, float]:
    """Figures of the rounds in which all requests were live."""
    timed = [(r, r.end_s - before.end_s) for before, r in pairwise(every) if r.report.live == live]
    rounds, seconds = [r for r, _ in timed], [wall_s for _, wall_s in timed]
    reports = [r.report for r in rounds]
    active = [r for r in reports if not r.strategy.is_off]
    return {
        "tokens_per_s": sum(r.tokens for r in rounds) / sum(seconds),
        "round_s": statistics.median(seconds),
        "rounds": float(len(rounds)),
        "active_frac": len(active) / len(rounds),
        "tokens_per_request_round": sum(r.tokens for r in rounds) / sum(r.live for r in reports),
        "accept_length": 1 + sum(sum(r.accepted) for r in active) / max(1, sum(r.live for r in active)),
        "drafted": sum(sum(r.drafted) for r in active) / max(1, sum(r.live for r in active)),
        "draft_ms": 1e3 * sum(r.draft_s + r.backlog_s for r in reports) / len(rounds),
        "verify_ms": 1e3 * sum(r.verify_s for r in reports) / len(rounds),
    }


def _rows(bench: Bench, live: int, runs: Sequence[tuple[Decoded, Decoded]]) -> list[dict[str, Any]]:
    rows = []
    for name, column in zip(("plain", "adaptive"), zip(*runs, strict=True), strict=True):
        figures = [decoded.figures for decoded in column]
        rows.append({"configuration": name, "live": live, "floor_s": bench.floor_s(live)} | summarise(figures))
    return rows


def _same(plain: dict[NoiseKey, Rollout], other: dict[NoiseKey, Rollout]) -> bool:
    return plain.keys() == other.keys() and all(torch.equal(r.tokens, other[key].tokens) for key, r in plain.items())
