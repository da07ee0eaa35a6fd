"""Costs on GPUs by the roofline, by hand."""

import pytest

from tlt_core.model.shapes import KNOWN
from tlt_core.run.plan.errors import PlanError
from tlt_core.run.plan.gpu import CHAINS, GPUS, Worker
from tlt_core.run.plan.simulate import Group, simulate

SEVEN_B, PARAMETERS = KNOWN["qwen2.5-7b"], 7_615_616_512
KV = 2 * 2 * 28 * 4 * 128  # bytes of a token: keys and values, two bytes, layers, heads, size
LENGTHS = [8000, 4000, 2000, 1000, 1000, 500, 500, 500]


def worker(**changes: object) -> Worker:
    given: dict[str, object] = {"gpus": 1, "lengths": LENGTHS, "workers": 1, "acceptance": 0.75}
    return Worker("h100", SEVEN_B, **(given | changes))  # type: ignore[arg-type]  # changes of any of them


def test_a_pass_of_one_request_reads_the_weights_and_its_keys_and_values() -> None:
    read = 2 * PARAMETERS + 8000 * KV
    assert worker().round_s(0, 1) == pytest.approx(read / (0.75 * GPUS["h100"].bandwidth) + 1e-3, rel=1e-6)
    assert worker().rate()(1) == pytest.approx(1 / worker().round_s(0, 1))


def test_a_pass_of_many_tokens_computes() -> None:
    seconds = worker(lengths=[100] * 2000).round_s(0, 2000)
    assert seconds == pytest.approx(2 * PARAMETERS * 2000 / (0.6 * GPUS["h100"].operations) + 1e-3, rel=1e-6)


def test_drafts_pay_for_few_requests_and_not_for_many() -> None:
    many = worker(lengths=[100] * 4000)
    best = [many.best(live) for live in (1, 16, 64, 256, 1024, 4000)]
    assert best == sorted(best, reverse=True)
    assert best[0] >= 4
    assert best[-1] == 0
    assert many.rate(CHAINS)(1) > 1.8 * many.rate()(1)
    assert many.rate(CHAINS)(4000) == many.rate()(4000)
    assert worker(acceptance=0.0).best(1) == 0


def test_tokens_of_a_round() -> None:
    assert worker(acceptance=0.5).tokens(3) == 1 + 0.5 + 0.25 + 0.125


def test_two_gpus_share_the_model_and_lose_some() -> None:
    one, two = worker(), worker(gpus=2)
    assert 1.5 < (one.round_s(0, 1) - 1e-3) / (two.round_s(0, 1) - 1e-3) < 2
    assert two.most_live > 2 * one.most_live, "the weights are there once"


def test_keys_and_values_bound_the_live_requests() -> None:
    mean = sum(LENGTHS) / len(LENGTHS)
    assert worker().most_live == int((0.9 * 80e9 - 2 * PARAMETERS) / (KV * mean))
    with pytest.raises(PlanError, match=r"66 GB.*1 x a100 have 72 GB.*--gpus-per-worker"):
        Worker("a100", KNOWN["qwen2.5-32b"], gpus=1, lengths=[40_000], workers=1, acceptance=0.5)


def test_an_update_costs_six_operations_a_parameter_and_token() -> None:
    costs = worker(lengths=[10] * 8).costs()
    assert costs.update_token_s == pytest.approx(6 * PARAMETERS / (0.4 * GPUS["h100"].operations), rel=1e-3)
    assert worker(lengths=[30_000] * 8).costs().update_token_s > 1.2 * costs.update_token_s, "attention"


def test_speculation_shortens_the_tail() -> None:
    groups = [Group.of(LENGTHS[i : i + 2]) for i in range(0, 8, 2)]
    plain, drafted = (
        simulate(groups, worker().rate(chains), worker().costs(), workers=1, max_live=8) for chains in ((0,), CHAINS)
    )
    assert 1.8 < plain.rollout_s / drafted.rollout_s < 3.5
    assert plain.update_s == drafted.update_s
