"""Steps small enough to follow by hand."""

import random

import pytest

from tlt_core.run.plan.alternatives import alternatives
from tlt_core.run.plan.simulate import BINS, FORWARD, Costs, Group, Rates, decode, simulate

EVEN = Rates((10.0,) * len(BINS))  # tokens a second, whatever else is live
FREE = Costs(0.0, 0.0, 0.0, 0.0)


def of(*groups: list[int]) -> list[Group]:
    return [Group.of(lengths) for lengths in groups]


def test_a_step_by_hand() -> None:
    """Four responses on two workers, two at a time: 0 gets 100 and 20 tokens, 1 gets 40 and 60."""
    costs = Costs(update_token_s=0.01, update_fixed_s=0.5, rollout_fixed_s=0.25, other_s=1.0)
    step = simulate(of([100, 20], [40, 60]), EVEN, costs, workers=2, max_live=2)
    assert step.rollout_s == pytest.approx(10.0 + 0.25)
    assert step.idle_s == pytest.approx(4.0)  # worker 1 from 6 s to 10 s
    assert step.update_s == pytest.approx(220 * 0.01 / 2 + 0.5)
    assert step.step_s == pytest.approx(10.25 + 1.6 + 1.0)


def test_groups_that_have_ended_are_streamed_while_there_is_time() -> None:
    groups, token_s = of([100, 20], [40, 60]), 0.03  # group 1 ends at 6 s and takes 3 s; group 0 ends with the rollout
    step = simulate(groups, EVEN, FREE._replace(update_token_s=token_s), workers=2, max_live=2, streams=True)
    assert step.streamed_share == pytest.approx(100 / 220)
    assert step.update_s == pytest.approx(120 * token_s / 2)
    late = simulate(groups, EVEN, FREE._replace(update_token_s=0.041), workers=2, max_live=2, streams=True)
    assert late.streamed_share == 0, "4.1 s do not fit into 4 s"


def test_responses_without_a_gradient_cost_a_forward_pass_and_are_not_streamed() -> None:
    costs = FREE._replace(update_token_s=0.03)
    groups = [Group((100, 20), trained=130), Group((40, 60), trained=70, measured=45)]
    plain, streamed = (simulate(groups, EVEN, costs, workers=2, max_live=2, streams=s) for s in (False, True))
    assert plain.update_s == pytest.approx((130 + 70 + FORWARD * 45) * 0.03 / 2)
    assert streamed.streamed_share == pytest.approx(70 / 200)
    assert streamed.update_s == pytest.approx((130 + FORWARD * 45) * 0.03 / 2)


def test_a_request_waits_for_a_slot_and_live_requests_slow_each_other_down() -> None:
    halved = Rates((10.0, *[5.0] * (len(BINS) - 1)))
    ends = decode(of([10], [20], [10]), halved, workers=1, max_live=2)
    # 10 and 20 tokens at 5 a second; from 2 s on the third beside the second, both end at 4 s
    assert ends.group_s == pytest.approx([2.0, 4.0, 4.0])


def test_nobody_takes_more_than_a_fair_share() -> None:
    ends = decode(of([10] * 6), EVEN, workers=2, max_live=8)
    assert ends.worker_s == pytest.approx([1.0, 1.0])


def test_what_was_decoded_before_a_mark_counts_once() -> None:
    ends = decode(of([10, 20, 40]), EVEN, workers=1, max_live=3, mark=1)
    assert ends.marks_s == pytest.approx([1.0, 2.0, 4.0])
    assert ends.before_mark == pytest.approx(10 + 20)  # of the second at the first mark, of the third at the second


def test_alternatives_pay_with_stale_tokens_or_lost_lengths() -> None:
    draw = random.Random(0)
    steps = [of(*([round(draw.lognormvariate(4, 0.9)) + 1 for _ in range(4)] for _ in range(8))) for _ in range(5)]
    costs = Costs(0.005, 0.1, 0.1, 0.5)
    plain = sum(simulate(s, EVEN, costs, workers=2, max_live=16).step_s for s in steps) / 5
    found = {p.name.split()[0].rstrip(","): p for p in alternatives(steps, EVEN, costs, workers=2, max_live=16)}
    assert found["over-provisioning"].bias < -0.05
    assert found["over-provisioning"].step_s < plain
    assert found["one"].stale == 1.0
    assert 0 < found["partial"].stale < 1
    assert found["partial"].step_s < plain
    assert found["tail"].step_s > found["over-provisioning"].step_s
    alone = alternatives(steps, EVEN, costs, workers=1, max_live=16)
    assert "one" not in {p.name.split()[0] for p in alone}
