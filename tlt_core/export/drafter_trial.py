"""A trial of drafters on held-out prompts: acceptance length, speed, and proof that no token changes.

    once in fp32       plain decoding, then each drafter, with the same noise: acceptance length, tokens compared
    `repeats` times    plain decoding and each drafter in turn, in the rollout's precision: tokens per second

Each drafter drafts the same chain in every round, so acceptance depends only on drafter, policy and prompts.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from conf.rollout import SpeculationConfig, StrategyConfig
from conf.run import RunConfig
from kernels.sampling.coupled_sample import gumbel_noise
from tlt_core.data import dataset
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, SamplingParams
from tlt_core.machine.driver import driver_device
from tlt_core.machine.precision import as_torch
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_decoder, load_tokenizer, stop_token_ids
from tlt_core.model.sampling import NoiseStep, policy_scores, row_keys, stream_key
from tlt_core.rollout import build
from tlt_core.rollout.engine import RoundTrace

_NEAR_TIE = 1e-3  # the fp32 scores of one context differ by less between two batch shapes


class Workload(NamedTuple):
    decoder: Decoder
    requests: Sequence[GenerationRequest]
    params: SamplingParams
    max_live: int


class Decoded(NamedTuple):
    accept_length: float  # of rounds with drafts; 1 without
    tokens_per_s: float
    rollouts: Mapping[NoiseKey, Rollout]


class Trial(NamedTuple):
    """Figures of one drafter; plain decoding has acceptance length 1 and no changed responses."""

    accept_length: float  # tokens per request and round, the target's own included
    tokens_per_s: float  # median over the repeats
    changed: int  # responses that differ from plain decoding's, not counting near-ties
    near_ties: int  # responses that first differ from plain decoding's where two tokens score equally up to rounding


def run(cfg: RunConfig, *, policy: Path, data_dir: Path, drafters: Mapping[str, Path]) -> dict[str, Trial]:
    """Figures by name, plain decoding as `plain`.  Raises ModelError when a drafter does not fit the policy."""
    exact = _workload(cfg, policy, data_dir, dtype=torch.float32)
    drafting = {"plain": SpeculationConfig(policy="off")}
    drafting |= {name: _chain(cfg, folder) for name, folder in drafters.items()}
    once = {name: decode(exact, speculation, seed=cfg.seed) for name, speculation in drafting.items()}
    timed = exact
    if cfg.rollout.dtype != "float32":
        timed = _workload(cfg, policy, data_dir, dtype=as_torch(cfg.rollout.dtype))
    rates: dict[str, list[float]] = {name: [] for name in drafting}
    for repeat in range(cfg.retrain.repeats):  # forwards and backwards: a machine that slows down does so for all
        for name in drafting if repeat % 2 == 0 else reversed(drafting):
            rates[name].append(decode(timed, drafting[name], seed=cfg.seed).tokens_per_s)
    trials = {}
    for name, done in once.items():
        changed, near_ties = _differences(exact, once["plain"].rollouts, done.rollouts)
        trials[name] = Trial(done.accept_length, statistics.median(rates[name]), changed, near_ties)
    return trials


def acceptance(cfg: RunConfig, *, policy: Path, data_dir: Path, drafter: Path) -> float:
    """Acceptance length of one drafter, measured as `run` measures it.  Raises ModelError when it does not fit."""
    exact = _workload(cfg, policy, data_dir, dtype=torch.float32)
    return decode(exact, _chain(cfg, drafter), seed=cfg.seed).accept_length


def decode(workload: Workload, cfg: SpeculationConfig, *, seed: int) -> Decoded:
    """With a new engine and drafter."""
    longest = max(len(r.prompt_tokens) for r in workload.requests)
    max_len = longest + workload.params.max_new_tokens
    engine = build.make_engine(workload.decoder, cfg, max_live=workload.max_live, max_len=max_len, seed=seed)
    rounds: list[RoundTrace] = []
    began_s = time.perf_counter()
    rollouts = engine.decode_all(workload.requests, workload.params, on_round=rounds.append)
    seconds = time.perf_counter() - began_s
    drafted = [r.report for r in rounds if not r.report.strategy.is_off]
    accepted = sum(sum(report.accepted) for report in drafted) / max(1, sum(report.live for report in drafted))
    tokens = sum(len(r.completion) for r in rollouts)
    return Decoded(1.0 + accepted, tokens / seconds, {r.key: r for r in rollouts})


def _workload(cfg: RunConfig, policy: Path, data_dir: Path, *, dtype: torch.dtype) -> Workload:
    """The first validation prompts, on which no drafter has been trained."""
    torch.set_num_threads(cfg.cluster.num_workers * cfg.cluster.threads_per_worker)
    tokenizer, own = load_tokenizer(policy), cfg.retrain
    prompts = dataset.load(data_dir, "validation", tokenizer)[: own.num_prompts]
    samples = range(own.num_samples)
    keys = [(NoiseKey(cfg.seed, NoiseStep.DRAFTER_TRIAL, p.id, s), p.tokens) for p in prompts for s in samples]
    params = SamplingParams(
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        max_new_tokens=own.max_new_tokens or cfg.rollout.max_new_tokens,
        stop_token_ids=stop_token_ids(policy, tokenizer, also=cfg.rollout.stop_token_ids),
    )
    decoder = load_decoder(policy, dtype=dtype, device=driver_device(cfg.cluster))
    return Workload(decoder, [GenerationRequest(*key) for key in keys], params, own.max_live_requests)


def _chain(cfg: RunConfig, folder: Path) -> SpeculationConfig:
    depth = cfg.drafter.depth
    strategies = (StrategyConfig(drafter=Eagle3Drafter.name, depth=depth, width=1, tokens=depth),)
    return SpeculationConfig(policy="fixed", strategies=strategies, drafter_path=str(folder))


def _differences(
    workload: Workload, plain: Mapping[NoiseKey, Rollout], other: Mapping[NoiseKey, Rollout]
) -> tuple[int, int]:
    """Numbers of responses that differ: without a near-tie, and from a near-tie on."""
    differing, near_ties = 0, 0
    for key, reference in plain.items():
        ours, theirs = other[key].tokens, reference.tokens
        differing += not torch.equal(ours, theirs)
        shorter = min(len(ours), len(theirs))
        for at in (ours[:shorter] != theirs[:shorter]).nonzero().flatten()[:1].tolist():
            near_ties += _gap(workload, key, theirs, at=at, other=int(ours[at])) < _NEAR_TIE
    return differing - near_ties, near_ties


@torch.inference_mode()
def _gap(workload: Workload, key: NoiseKey, tokens: Tensor, *, at: int, other: int) -> float:
    """Distance between the scores, noise included, of plain decoding's token at position `at` and of the other one."""
    decoder, pair = workload.decoder, [int(tokens[at]), other]
    scores = policy_scores(_logits(decoder, tokens[:at]), workload.params)[0, pair]
    if workload.params.temperature:
        keys = row_keys(torch.tensor([stream_key(key)]), torch.tensor([at]))
        scores = scores + gumbel_noise(keys, torch.tensor(pair, dtype=torch.int32))[0]
    return float((scores[0] - scores[1]).abs())


def _logits(decoder: Decoder, prefix_L: Tensor) -> Tensor:
    """Logits of the token after the prefix, [1, V], in one causal pass."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    hidden = decoder(prefix_L.long(), torch.arange(len(prefix_L)), attend)
    return decoder.logits(hidden.last_TD[-1:])
