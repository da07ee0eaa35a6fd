"""Rates and costs that made the records are found again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tlt_core.grpo.rollouts import scored
from tlt_core.items.store import save_scored
from tlt_core.items.types import FinishReason, NoiseKey, Rollout, RolloutBatch
from tlt_core.run.plan.errors import PlanError
from tlt_core.run.plan.fit import recorded
from tlt_core.run.plan.simulate import BINS, Costs, Group, Rates, simulate

RATES = Rates((40.0, 38.0, 33.0, 25.0, *[15.0] * (len(BINS) - 4)))
COSTS = Costs(update_token_s=0.004, update_fixed_s=0.3, rollout_fixed_s=0.2, other_s=0.7)
MOST = 8


def _played(lengths: list[int], *, step: int) -> RolloutBatch:
    """One worker decodes all of them at RATES, eight at a time, in order."""
    waiting, live, at_s = list(enumerate(lengths)), {}, 0.0
    spans: dict[int, tuple[float, float]] = {}
    begun: dict[int, float] = {}
    while waiting or live:
        while waiting and len(live) < MOST:
            index, length = waiting.pop(0)
            live[index], begun[index] = float(length), at_s
        rate = RATES(len(live))
        took_s = min(live.values()) / rate
        at_s += took_s
        live = {i: left - took_s * rate for i, left in live.items()}
        for index in [i for i, left in live.items() if left < 1e-6]:
            spans[index] = (begun[index], at_s)
            del live[index]
    return RolloutBatch.pack(
        [
            Rollout(
                key=NoiseKey(0, step, i // 4, i % 4),
                tokens=torch.arange(3 + n).int(),
                prompt_len=3,
                logprobs=torch.zeros(n),
                finish=FinishReason.STOP,
                policy_version=0,
                worker=0,
                started_s=1000.0 + spans[i][0],
                finished_s=1000.0 + spans[i][1],
            )
            for i, n in enumerate(lengths)
        ]
    )


def _group(lengths: list[int], *, flat: bool) -> Group:
    """With the prompt of three tokens.  flat: all advantages are 0."""
    tokens = sum(lengths) + 3
    return Group(tuple(lengths), trained=0, measured=tokens) if flat else Group(tuple(lengths), trained=tokens)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[dict[str, float]]]:
    generator, rows = torch.Generator().manual_seed(0), []
    for step in range(1, 5):
        lengths = (torch.randn(24, generator=generator).mul(0.8).add(4.3).exp().round().int() + 1).tolist()
        batch = _played(lengths, step=step)
        folder = tmp_path / "steps" / f"{step:06d}"
        folder.mkdir(parents=True)
        advantages_R = torch.where(torch.arange(24) < 4, 0.0, 0.5)  # all responses of the first group score alike
        whole = scored(batch, advantages_R)  # one tensor in several fields, which a file cannot hold
        apart = {name: getattr(whole, name).clone() for name in ("rewards_R", "scores_R", "components_RF")}
        save_scored(replace(whole, **apart), folder / "scored.safetensors")
        groups = [_group(lengths[i : i + 4], flat=i == 0) for i in range(0, 24, 4)]
        made = simulate(groups, RATES, COSTS, workers=1, max_live=MOST)
        rows.append(
            {
                "step": step,
                "training/resume_attempt": 0,
                "timing_s/gen": made.rollout_s,
                "timing_s/update_actor": made.update_s - COSTS.update_fixed_s,
                "timing_s/update_weights": COSTS.update_fixed_s,
                "timing_s/step": made.step_s,
            }
        )
    return tmp_path, rows


def test_rates_and_costs_are_found_again(run: tuple[Path, list[dict[str, float]]]) -> None:
    folder, rows = run
    found = recorded(folder, rows, workers=1, skips=True)
    assert len(found.groups) == 3, "the first step warms up"
    assert found.costs == pytest.approx(COSTS, rel=1e-6)
    assert found.rates.by_bin[:4] == pytest.approx(RATES.by_bin[:4], rel=1e-3)
    made = [simulate(g, found.rates, found.costs, workers=1, max_live=MOST).step_s for g in found.groups]
    assert sum(made) / 3 == pytest.approx(found.step_s, rel=1e-3)


def test_a_run_without_its_responses_is_refused(run: tuple[Path, list[dict[str, float]]]) -> None:
    folder, rows = run
    with pytest.raises(PlanError, match="no scored responses"):
        recorded(folder / "elsewhere", rows, workers=1, skips=True)
