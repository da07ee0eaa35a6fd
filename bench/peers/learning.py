"""`tlt bench learning`: what TLT and TRL learn from the same noise.

TRL's GRPOTrainer trains as in `tlt bench peers`, but samples with our noise.  Where its logits are ours, so are its
responses, its rewards and its gradients, and nothing is left to chance: a defect of either trainer shows as responses
that drift apart.  That both sample the policy's distribution is shown elsewhere (tests/tlt_core/model).  Rounding makes
weights differ a little after the first update; a response whose two best tokens nearly tie then differs.
"""

import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from safetensors.torch import load_file
from torch import Tensor

from bench.peers.trl import TrlStep, in_order, train_with_trl
from bench.report import write_report
from bench.runs import first_drafter, variants
from bench.verdicts import summarise, verdict
from conf.load import ConfigError
from conf.model import PretrainedModel
from conf.run import RunConfig
from flows.train import train
from tasks.stages import prepare_data
from tlt_core.grpo.reward import Scorer
from tlt_core.items.store import load_scored
from tlt_core.items.types import Prompt, ScoredBatch
from tlt_core.run.inputs import data_dir
from tlt_core.run.prompts import Prompts

_MARGIN = 0.03  # reward
_LEAST_EQUAL = 0.9
_LEAST_PROMPTS = 200  # over all seeds
_T_95 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 8: 1.895, 10: 1.833}  # Student's t, one-sided, by seeds


@flow(name="bench-learning")
def bench_learning(cfg: RunConfig, *, repeats: int, out: Path, command: str) -> dict[str, Any]:
    """`num_steps` steps of both for each of `repeats` seeds; returns the report.  Raises ConfigError."""
    if repeats not in _T_95:
        raise ConfigError(f"--repeats={repeats}: the number of seeds; give one of {', '.join(map(str, _T_95))}")
    drafter, policy = first_drafter(cfg)
    start = {
        "model": PretrainedModel(path=str(policy)),
        "coldstart": cfg.coldstart.model_copy(update={"enabled": False}),
    }
    seeds = []
    for seed in range(cfg.seed, cfg.seed + repeats):
        own = cfg.model_copy(update={**start, "seed": seed, "name": f"{cfg.name}-seed-{seed}"})
        seeds.append(_one_seed(variants(own, drafter)["tlt"], policy))
    differences = [figures["reward, TLT minus TRL"] for figures in seeds]
    error = statistics.stdev(differences) / repeats**0.5
    furthest = abs(statistics.fmean(differences)) + _T_95[repeats] * error
    prompts = repeats * cfg.num_steps * cfg.rollout.num_prompts
    rows = [{"configuration": f"seed {cfg.seed + n}", **summarise([figures])} for n, figures in enumerate(seeds)]
    rows.append({"configuration": "all seeds", **summarise(seeds), "prompts": prompts, "standard error": error})
    verdicts = [
        verdict("responses equal to TRL's, token for token", [f["equal responses"] for f in seeds], _LEAST_EQUAL),
        verdict("prompts in common", [prompts], _LEAST_PROMPTS),
        verdict("reward: TLT is equivalent to TRL, both one-sided tests at 5 %", [furthest], _MARGIN, at_most=True),
    ]
    return write_report(out, command=command, repeats=repeats, rows=rows, verdicts=verdicts)


def _one_seed(run: RunConfig, policy: Path) -> dict[str, float]:
    prepare_data(run, policy)
    prompts = Prompts.load(data_dir(run), policy, num_prompts=run.rollout.num_prompts)
    order = in_order(run, prompts)
    work_dir = run.run_dir.with_name(f"{run.name}-trl")
    with Scorer(run.reward) as scorer:
        theirs, _ = train_with_trl(run, policy, prompts, order, scorer, work_dir=work_dir, own_noise=False)
    shutil.rmtree(run.run_dir, ignore_errors=True)  # an earlier benchmark would be resumed
    train(run)
    pairs = list(_pairs(run, order, theirs))
    equal = [own == other for (own, _), (other, _) in pairs]
    ours_R, theirs_R = ([reward for _, reward in side] for side in zip(*pairs, strict=True))
    in_first = run.rollout.num_prompts * run.rollout.num_samples
    weights = [_weights(folder) for folder in (run.run_dir / "policy", work_dir, policy)]
    return {
        "equal responses, first step": statistics.fmean(equal[:in_first]),
        "equal responses": statistics.fmean(equal),
        "equal responses, last step": statistics.fmean(equal[-in_first:]),
        "reward, TLT": statistics.fmean(ours_R),
        "reward, TRL": statistics.fmean(theirs_R),
        "reward, TLT minus TRL": statistics.fmean(ours_R) - statistics.fmean(theirs_R),
        "distance of the weights over the way from the start": _distance(*weights[:2]) / _distance(*weights[::2]),
    }


_Response = tuple[list[int], float]  # tokens, reward


def _pairs(run: RunConfig, rows: Sequence[Prompt], theirs: Sequence[TrlStep]) -> Iterator[tuple[_Response, _Response]]:
    """Our response and TRL's, in the order of steps, prompts and samples."""
    size, group = run.rollout.num_prompts, run.rollout.num_samples
    for index, step in enumerate(theirs):
        scored = load_scored(run.run_dir / "steps" / f"{index + 1:06d}" / "scored.safetensors")
        ours = _by_prompt(scored)
        keys = [(prompt.id, s) for prompt in rows[index * size : (index + 1) * size] for s in range(group)]
        yield from zip((ours[key] for key in keys), zip(step.responses, step.rewards, strict=True), strict=True)


def _by_prompt(scored: ScoredBatch) -> dict[tuple[int, int], _Response]:
    batch = scored.rollouts
    keys = zip(batch.prompt_ids_R.tolist(), batch.samples_R.tolist(), strict=True)
    rewards = scored.scores_R.tolist()
    return {key: (batch.completion(r).tolist(), rewards[r]) for r, key in enumerate(keys)}


def _weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of two models' weights: root of the sum of squares."""
    return float(sum((one[n].double() - other[n].double()).square().sum() for n in one.keys() & other.keys()) ** 0.5)
