"""The cost model follows a known curve, between and beyond what it has seen, and is not moved by spikes."""

import pytest

from bench.tuner.simulator import draft_seconds, pass_seconds
from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.tuner.cost_model import CostModel, RobustFilter

EAGLE = Strategy("eagle", 4, 1, 4)


def calibrated(measure=pass_seconds, budget_s: float = 1.0) -> CostModel:
    """After measuring the simulated engine."""
    model = CostModel(["eagle"])
    model.calibrate(measure, max_live=32, max_tokens=160, budget_s=budget_s)
    return model


def plain_report(live: int, context: int, seconds: float) -> RoundReport:
    """A plain round."""
    return RoundReport(OFF, live, context, (0,) * live, (0,) * live, (0,) * live, 0.0, seconds)


def chain_report(live: int, draft_s: float, verify_s: float, *, strategy: Strategy = EAGLE) -> RoundReport:
    """A round that drafted a chain for each row."""
    depths = (strategy.depth,) * live
    return RoundReport(strategy, live, 100 * live, depths, depths, (0,) * live, draft_s, verify_s)


def test_sizes_that_were_never_measured_are_interpolated_and_extrapolated() -> None:
    model = calibrated()
    for live, tokens in ((3, 3), (6, 6), (11, 11), (24, 24), (3, 15), (7, 35), (20, 100), (32, 200)):
        truth = pass_seconds(live, tokens, 300 * live)
        estimate = model.pass_seconds(live, tokens, 300 * live, verify=float(tokens > live))
        assert estimate == pytest.approx(truth, rel=0.06), (live, tokens)


def test_calibration_keeps_its_budget_and_outvotes_spikes() -> None:
    calls = []

    def spiky(live: int, tokens: int, context: int) -> float:
        calls.append(pass_seconds(live, tokens, context) * (3.0 if len(calls) % 9 == 4 else 1.0))
        return calls[-1]

    model = calibrated(spiky, budget_s=2.0)
    assert sum(calls) < 2.0 + max(calls)
    assert model.plain_seconds(16, 1600) == pytest.approx(pass_seconds(16, 16, 1600), rel=0.05)


def test_a_spike_hardly_moves_the_estimate_and_a_change_is_followed() -> None:
    model = calibrated()
    truth = pass_seconds(4, 4, 400)
    for _ in range(50):
        model.observe(plain_report(4, 400, truth))
    model.observe(plain_report(4, 400, 3 * truth))
    assert model.plain_seconds(4, 400) == pytest.approx(truth, rel=0.02)
    for _ in range(60):
        model.observe(plain_report(4, 400, 1.5 * truth))
    assert model.plain_seconds(4, 400) == pytest.approx(1.5 * truth, rel=0.03)


def test_without_calibration_slow_first_rounds_are_soon_forgotten() -> None:
    """A new engine's first passes are slow.  These are rounds of vLLM with 16 requests: two slow plain rounds, ordinary
    ones, then rounds that draft one token in 75 ms.  With 1.45 tokens a round, such drafts look better than plain
    rounds that are believed to take more than 52 ms."""
    model = CostModel(["eagle3"])
    for seconds in (0.092, 0.087, 0.049, 0.051, 0.047):
        model.observe(plain_report(16, 16 * 60, seconds))
    for _ in range(20):
        model.observe(RoundReport(EAGLE, 16, 16 * 60, (1,) * 16, (1,) * 16, (0,) * 16, draft_s=0.015, verify_s=0.060))
    assert model.plain_seconds(16, 16 * 60) < 0.075 / 1.45


def test_a_plain_round_never_costs_nothing() -> None:
    """Wide passes that cost in proportion to their tokens explain all of it without a base; one row is asked then."""
    model = CostModel(["eagle"])
    for round_no in range(200):
        live = 16 + round_no % 48
        model.observe(plain_report(live, 15 * live, 2e-5 * live))
    assert model.plain_seconds(1, 15) >= 0.1 * 2e-5 * 16


def test_draft_cost_is_learnt_per_depth_and_batch_and_a_first_spike_is_forgotten() -> None:
    model = calibrated()
    shapes = [Strategy("eagle", depth, 1, depth) for depth in (2, 4, 6)]
    model.observe(chain_report(1, 3 * draft_seconds(EAGLE, 1), 0.014))
    for _ in range(40):
        for strategy in shapes:
            for live in (1, 8):
                model.observe(chain_report(live, draft_seconds(strategy, live), 0.02, strategy=strategy))
    for strategy, live in ((shapes[0], 1), (EAGLE, 4), (shapes[2], 8)):
        assert model.draft_seconds(strategy, live) == pytest.approx(draft_seconds(strategy, live), rel=0.1)


def test_catching_up_is_no_part_of_the_steady_draft_cost() -> None:
    model = calibrated()
    for _ in range(30):
        model.observe(chain_report(2, 5e-3, 0.014))
    before = model.draft_seconds(EAGLE, 2)
    model.observe(plain_report(2, 200, 0.0125))
    model.observe(chain_report(2, 25e-3, 0.014))
    assert model.draft_seconds(EAGLE, 2) == before
    model.observe(chain_report(2, 25e-3, 0.014))
    assert model.draft_seconds(EAGLE, 2) > before


def test_an_estimate_never_moves_away_from_what_is_seen() -> None:
    """Coefficients are held at 0 or more, and correlated: cutting one off must not let the others run away.

    Milliseconds of EAGLE-3's chains of four on SmolLM2 while a batch shrank from 14 rows to 4.
    """
    seen = [(14, 14.8), (12, 12.9), (12, 10.6), (12, 12.7), (12, 11.8), (12, 11.6), (12, 11.2), (11, 12.6), (11, 10.3)]
    seen += [(10, 12.1), (10, 10.4), (9, 12.9), (9, 11.2), (9, 8.6), (8, 10.0), (7, 10.9), (5, 7.2), (4, 6.6), (4, 6.2)]
    step = 14e-3
    for spread in (1.0, 0.2):
        model = RobustFilter(
            [0.01 * step, 0.02 * step, 0.002 * step, 0.0005 * step],
            [spread * step, step, 0.2 * step, 0.05 * step],
            one_sided=True,
        )
        for live, ms in seen:
            phi, y = (1.0, 4.0, float(live), 4.0 * live), ms * 1e-3
            before = model.predict(phi)
            model.update(phi, y)
            assert abs(model.predict(phi) - y) <= abs(before - y) + 1e-12
            assert min(model.theta) >= 0
        assert model.predict(phi) == pytest.approx(6.4e-3, rel=0.3)
