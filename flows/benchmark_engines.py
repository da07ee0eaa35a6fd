"""`tlt bench engines`: our engine beside transformers and vLLM, on the same prompts, threads and cores.

    plain, adaptive                    our engine, without and with speculation as configured
    transformers, transformers lookup  `generate`, and its prompt look-up (one request at a time)
    vllm, vllm eager, vllm ngram, ...  vLLM on CPU in its own environment (`make vllm-env`): compiled as it does by
                                       default, uncompiled, with n-grams, and with the configured EAGLE-3 drafter

bf16 as configured, greedy and at temperature 1, 1 to 32 live requests, a fixed number of new tokens.  The model is the
one that the run starts from; with `rollout.speculation.drafter_path` the run's policy, which the drafter was made for.
What cannot be measured here is a row that says why.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow

from conf.schema import RunConfig, SpeculationConfig
from flows._terminal import Terminal
from flows.benchmark import Bound, judge, write_report
from tasks.coldstart import cold_start
from tasks.prepare import prepare_data, prepare_model
from tlt_core import data
from tlt_core.bench_engines import Case, Contest, EngineSpec, Measured, compete, cores, own_environment, own_python
from tlt_core.model.load import load_tokenizer
from tlt_core.prompt_order import PromptOrder
from tlt_core.serving import vllm_server
from tlt_core.verdicts import summarise

_LIVE = (1, 2, 4, 8, 16, 32)
_TEMPERATURES = (0.0, 1.0)
_NEW_TOKENS = 128
_KV_CACHE_MB = 1024
_LOOKUP_TOKENS = 10  # transformers' own example
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
_EAGLE3_TOKENS = 3
_FILES = Path(__file__).parents[1] / "tlt_core" / "engine_processes"
_JUDGED_LIVE = (1, 4, 16)
_BOUNDS = (("vllm", ("vllm", "vllm eager"), 1.2), ("transformers", ("transformers",), 1.5))


@flow(name="bench-engines")
def bench_engines(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """Measure, judge, write the report; returns it.

    `rollout.max_new_tokens` and `rollout.max_live_requests` lower the number of new tokens and the largest batch.
    """
    new_tokens = max(2, min(_NEW_TOKENS, cfg.rollout.max_new_tokens))
    lives = [live for live in _LIVE if live <= cfg.rollout.max_live_requests]
    with Terminal() as show:
        model = prepare_model(cfg)
        dataset = prepare_data(cfg, model)
        if cfg.rollout.speculation.drafter_path is not None:
            policy = cfg.run_dir / "policy"
            model = policy if policy.is_dir() else cold_start(cfg, model, dataset, show.stage).model_dir
    train = data.load(Path(dataset.path), "train", load_tokenizer(model))
    prompts = [p.tokens.tolist() for p in PromptOrder(train, seed=cfg.seed).take(max(lives))]
    specs, missing = engines(cfg, model, max_live=max(lives), max_len=max(map(len, prompts)) + new_tokens + 32)
    contest = compete(
        specs,
        [Case(live, temperature) for temperature in _TEMPERATURES for live in lives],
        prompts,
        new_tokens=new_tokens,
        repeats=repeats,
        seed=cfg.seed,
        log_dir=cfg.run_dir / "bench-engines",
    )
    rows = [{"new_tokens": new_tokens, "model": model.name, **row} for row in rows_of(contest)]
    return write_report(
        out, command=command, repeats=repeats, rows=[*rows, *_left_out(specs), *missing], verdicts=verdicts_of(contest)
    )


def engines(
    cfg: RunConfig, model: Path, *, max_live: int, max_len: int
) -> tuple[list[EngineSpec], list[dict[str, Any]]]:
    """What can be started here, and a row for what cannot."""
    threads = cfg.cluster.threads_per_worker
    common = {
        "model": str(model.absolute()),
        "dtype": cfg.rollout.dtype,
        "threads": threads,
        "cores": cores(threads),
        "max_live": max_live,
        "max_len": max_len,
    }

    def own(name: str, file: str, most_live: int = 0, **settings: Any) -> EngineSpec:
        environment = own_environment(threads=threads)
        return EngineSpec(name, _FILES / file, own_python(), environment, common | settings, most_live)

    specs = [
        own("plain", "own.py", speculation=SpeculationConfig(policy="off").model_dump(mode="json")),
        own("adaptive", "own.py", speculation=_absolute(cfg.rollout.speculation).model_dump(mode="json")),
        own("transformers", "hf.py", lookup_tokens=0),
        own("transformers lookup", "hf.py", most_live=1, lookup_tokens=_LOOKUP_TOKENS),
    ]
    python = vllm_server.vllm_python()
    kinds = _vllm_kinds(cfg.rollout.speculation)
    if not python.is_file():
        reason = f"left out: {python} does not exist; 'make vllm-env' builds vLLM's environment"
        return specs, [{"configuration": name, "reason": reason} for name in kinds]
    # The scheduler in a process of its own would compete with the computing threads for the same cores.
    environment = vllm_server.environment(python, threads=threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, settings in kinds.items():
        told = common | {"kv_cache_mb": _KV_CACHE_MB} | settings
        specs.append(EngineSpec(name, _FILES / "vllm_llm.py", python, environment, told))
    return specs, []


def _vllm_kinds(speculation: SpeculationConfig) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "vllm": {"speculative": None, "eager": False},
        "vllm eager": {"speculative": None, "eager": True},
        "vllm ngram": {"speculative": _NGRAM, "eager": True},
    }
    if speculation.drafter_path is not None:
        drafter = str(Path(speculation.drafter_path).absolute())
        eagle3 = {"method": "eagle3", "model": drafter, "num_speculative_tokens": _EAGLE3_TOKENS}
        kinds["vllm eagle3"] = {"speculative": eagle3, "eager": True}
    return kinds


def _absolute(speculation: SpeculationConfig) -> SpeculationConfig:
    """Other processes may have another working folder."""
    path = speculation.drafter_path
    return speculation.model_copy(update={"drafter_path": path and str(Path(path).absolute())})


def rows_of(contest: Contest) -> list[dict[str, Any]]:
    """One an engine and case.  `over_plain`: tokens per second over plain decoding's in the same repeat; `differing`:
    share of responses whose greedy tokens are not our plain engine's (in bf16 near-ties flip)."""
    rows = []
    for (name, case), runs in contest.measured.items():
        figures = []
        for mine, plain in zip(runs, contest.measured["plain", case], strict=True):
            row = {
                "tokens_per_s": mine.tokens_per_s,
                "total_tokens_per_s": mine.total_tokens_per_s,
                "over_plain": mine.tokens_per_s / plain.tokens_per_s,
            }
            if case.temperature == 0:
                unlike = sum(a != b for a, b in zip(mine.tokens, plain.tokens, strict=True))
                row["differing"] = unlike / case.live
            figures.append(row)
        about = {"configuration": name, "live": case.live, "temperature": case.temperature, **contest.described[name]}
        rows.append({**about, **summarise(figures, list(figures[0]))})
    return rows


def _left_out(specs: Sequence[EngineSpec]) -> list[dict[str, Any]]:
    return [
        {"configuration": s.name, "reason": f"takes {s.most_live} live request at a time: not measured with more"}
        for s in specs
        if s.most_live
    ]


def verdicts_of(contest: Contest) -> list[dict[str, Any]]:
    """Plain decoding over each rival, at the batch sizes that were promised; over the faster one of its variants."""
    verdicts = []
    for rival, variants, bound in _BOUNDS:
        for case in dict.fromkeys(case for _, case in contest.measured if case.live in _JUDGED_LIVE):
            measured = [contest.measured[name, case] for name in variants if (name, case) in contest.measured]
            if measured:
                fastest = max(measured, key=_median_rate)
                ratios = [
                    a.tokens_per_s / b.tokens_per_s
                    for a, b in zip(contest.measured["plain", case], fastest, strict=True)
                ]
                claim = f"plain over {rival}, {case.live} live, temperature {case.temperature:g}"
                verdicts += judge([{"ratio": r} for r in ratios], [Bound(claim, "ratio", bound, at_least=True)])
    return verdicts


def _median_rate(runs: Sequence[Measured]) -> float:
    return statistics.median(m.tokens_per_s for m in runs)
