"""`tlt bench rollout`: the speed-up by speculation on this machine, for every policy, on four workloads.

    rl      rollouts of the run's policy (after the cold start, or trained), as one worker decodes them
    tail    the few longest of these responses among short ones
    short   four steps of rl, with every response cut at the median length: no tail
    raw     the start model before the cold start, on word problems (gsm_symbolic): drafts are hardly ever right

A near-tie may end a response early or late, so every response is decoded to its length in plain decoding.
"""

import dataclasses
import logging
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prefect import flow

from bench.report import write_report
from bench.verdicts import summarise, verdict
from conf.data import GymData, GymTask
from conf.load import ConfigError
from conf.rollout import SpeculationConfig, StrategyConfig
from conf.run import RunConfig
from flows._terminal import Terminal
from tasks.stages import cold_start, prepare_data, prepare_model
from tlt_core.data import dataset
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.drafter.kinds import strategies_of
from tlt_core.items.types import GenerationRequest, NoiseKey, Prompt, Rollout, SamplingParams
from tlt_core.machine.precision import as_torch
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_decoder, load_tokenizer, stop_token_ids
from tlt_core.rollout import build
from tlt_core.rollout.engine import RoundTrace

log = logging.getLogger(__name__)

_TAIL_LIVE = 4  # rounds with at most so many live requests are the tail
_BANDS = {"1 live": (1, 1), "2 live": (2, 2), "3-4 live": (3, 4), "5-8 live": (5, 8), "above": (9, 1 << 30)}
_RAW_TOKENS = 256  # longest response of the raw model, which rambles
_RAW_PROMPTS, _RAW_SAMPLES, _RAW_LIVE = 8, 4, 16
_RAW_PROMPT_TOKENS = 512  # longest prompt of the raw model
_SHORT_STEPS = 4  # steps whose prompts make up the short workload: one step takes only a second
_LONGEST, _AMONG = 4, 16  # requests of the tail workload
_CLAIMS = {  # ratio of the adaptive engine to plain decoding, and its bound
    "rl": (("tail_tokens_per_s", 2.0), ("tokens_per_s", 1.0)),
    "tail": (("tokens_per_s", 1.7),),
    "short": (("tokens_per_s", 0.97),),
    "raw": (("tokens_per_s", 0.97),),
}
_OF_BEST = 0.97
_KEPT = "cost_model, kept"  # its tuner keeps its state over the repeats, as over the steps of a run


class Workload(NamedTuple):
    name: str
    decoder: Decoder
    requests: Sequence[GenerationRequest]
    params: SamplingParams
    max_live: int


class Measured(NamedTuple):
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
    return sum(not torch.equal(r.tokens, other[key].tokens) for key, r in reference.items()) / len(reference)


@flow(name="bench-rollout")
def bench_rollout(
    cfg: RunConfig, *, repeats: int, out: Path, command: str, workload: str | None = None
) -> dict[str, Any]:
    """Measure, judge and write the report; returns it.  workload: only this one."""
    if workload not in (None, *_CLAIMS):
        raise ConfigError(f"--workload={workload}: choose one of {', '.join(_CLAIMS)}, or leave it out for all")
    torch.set_num_threads(cfg.cluster.threads_per_worker)
    with Terminal() as show:
        start = prepare_model(cfg)
        data = prepare_data(cfg, start)
        policy = cfg.run_dir / "policy"
        if not policy.is_dir():
            policy = cold_start(cfg, start, data, show.stage)[0] if cfg.coldstart.enabled else start
    rows, verdicts = [], []
    for work in _workloads(cfg, start, policy, Path(data.path)):
        if workload not in (None, work.name):
            continue
        compared = configurations(cfg.rollout.speculation)
        measured = compare(work, compared, repeats=repeats, seed=cfg.seed, kept=[_KEPT])
        rows += [_lengths_row(work, measured), *_rows(work, measured)]
        verdicts += _verdicts(work.name, measured)
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)


def configurations(base: SpeculationConfig) -> dict[str, SpeculationConfig]:
    """Plain decoding, every adaptive policy, and each strategy by itself."""
    strategies = [StrategyConfig(**strategy._asdict()) for strategy in strategies_of(base)]
    adaptive = base.model_copy(update={"policy": "cost_model"})
    # These two are measured next to each other, because the claim is about their ratio.
    named = {"off": base.model_copy(update={"policy": "off"}), _KEPT: adaptive}
    named |= {"cost_model": adaptive, "beg_mab": base.model_copy(update={"policy": "beg_mab"})}
    for arm, strategy in zip(strategies_of(base), strategies, strict=True):
        named[f"fixed {arm}"] = base.model_copy(update={"policy": "fixed", "strategies": (strategy,)})
    return named


def _word_problems(cfg: RunConfig, tokenizer: Any, *, vocab_size: int) -> list[Prompt]:
    """Made in a temporary folder: stages of dvc.yaml depend only on the run's own data set."""
    tasks = (GymTask(name="gsm_symbolic"),)
    wanted = GymData(kind="reasoning_gym", tasks=tasks, num_train=_RAW_PROMPTS, num_validation=1, seed=cfg.data.seed)
    with tempfile.TemporaryDirectory() as parent:
        out, most = Path(parent) / "data", _RAW_PROMPT_TOKENS
        dataset.prepare(wanted, tokenizer=tokenizer, vocab_size=vocab_size, max_prompt_tokens=most, out_dir=out)
        return dataset.load(out, "train", tokenizer)


def _workloads(cfg: RunConfig, start: Path, policy: Path, data_dir: Path) -> Sequence[Workload]:
    tokenizer, dtype = load_tokenizer(policy), as_torch(cfg.rollout.dtype)
    prompts = PromptOrder(dataset.load(data_dir, "train", tokenizer), seed=cfg.seed)
    share, *later = (prompts.take(cfg.rollout.num_prompts)[:: cfg.cluster.num_workers] for _ in range(_SHORT_STEPS))
    params = SamplingParams(
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        max_new_tokens=cfg.rollout.max_new_tokens,
        stop_token_ids=stop_token_ids(policy, tokenizer, also=cfg.rollout.stop_token_ids),
    )
    decoder = load_decoder(policy, dtype=dtype, device="cpu")
    seed, samples = cfg.seed, cfg.rollout.num_samples
    requests = _requests(share, samples, seed=seed)
    rl = fix_lengths(Workload("rl", decoder, requests, params, cfg.rollout.max_live_requests), seed=seed)
    ordered = sorted(rl.requests, key=lambda r: r.max_new_tokens or 0)
    median = ordered[len(ordered) // 2].max_new_tokens or params.max_new_tokens
    short_params = dataclasses.replace(params, max_new_tokens=median)
    for step, part in enumerate(later, start=2):
        requests = requests + _requests(part, samples, seed=seed, step=step)
    raw_params = dataclasses.replace(params, max_new_tokens=_RAW_TOKENS)
    problems = _word_problems(cfg, tokenizer, vocab_size=decoder.config.vocab_size)
    raw = load_decoder(start, dtype=dtype, device="cpu")
    return (
        rl,
        rl._replace(name="tail", requests=ordered[:-_LONGEST][: _AMONG - _LONGEST] + ordered[-_LONGEST:]),
        fix_lengths(Workload("short", decoder, requests, short_params, rl.max_live), seed=seed),
        fix_lengths(
            Workload("raw", raw, _requests(problems, _RAW_SAMPLES, seed=seed), raw_params, _RAW_LIVE), seed=seed
        ),
    )


def _requests(prompts: Sequence[Prompt], samples: int, *, seed: int, step: int = 1) -> list[GenerationRequest]:
    return [GenerationRequest(NoiseKey(seed, step, p.id, s), p.tokens) for p in prompts for s in range(samples)]


def _lengths_row(workload: Workload, measured: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """Lengths of the responses, which are the same in every configuration."""
    lengths = torch.tensor([len(r.completion) for r in measured["off"][0].rollouts.values()], dtype=torch.float64)
    p50, p99 = (float(lengths.quantile(q)) for q in (0.5, 0.99))
    figures = {"responses": float(len(lengths)), "tokens": float(lengths.sum()), "p50": p50, "p99": p99}
    return {"workload": workload.name, "configuration": "lengths", **figures, "p99_over_p50": p99 / p50}


def _rows(workload: Workload, measured: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    """A row for each configuration.  ratio: tokens per second over those of plain decoding in the same repeat."""
    plain, rows = measured["off"], []
    for name, runs in measured.items():
        for mine, other in zip(runs, plain, strict=True):
            mine.figures["ratio"] = mine.figures["tokens_per_s"] / other.figures["tokens_per_s"]
            mine.figures["differing"] = differing(other.rollouts, mine.rollouts)
        figures = [m.figures for m in runs]
        rows.append({"workload": workload.name, "configuration": name, **summarise(figures)})
    return rows


def _verdicts(workload: str, measured: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    plain = measured["off"]
    fixed = [runs for name, runs in measured.items() if name == "off" or name.startswith("fixed")]
    best = max(fixed, key=lambda runs: statistics.median(m.figures["tokens_per_s"] for m in runs))
    verdicts = []
    for name, title in ((_KEPT, "adaptive"), ("cost_model", "adaptive from nothing")):
        claims = [(f"over plain, {figure}", figure, plain, bound) for figure, bound in _CLAIMS[workload]]
        claims.append(("over the best fixed strategy, tokens_per_s", "tokens_per_s", best, _OF_BEST))
        for claim, figure, others, bound in claims:
            pairs = zip(measured[name], others, strict=True)
            ratios = [mine.figures[figure] / other.figures[figure] for mine, other in pairs]
            verdicts.append(verdict(f"{workload}: {title} {claim}", ratios, bound))
    return verdicts
