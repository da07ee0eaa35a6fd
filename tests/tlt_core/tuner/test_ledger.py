"""Labels by number of live requests, and what speculation saved."""

import pytest

from tlt_core.items.speculation import OFF, RoundReport
from tlt_core.tuner.ledger import Ledger, live_bucket


@pytest.mark.parametrize(
    ("live", "label"),
    [(1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (16, "9-16"), (17, "17-32")],
)
def test_live_requests_are_told_apart_by_powers_of_two(live: int, label: str) -> None:
    assert live_bucket(live) == label


def test_speed_up_is_the_time_that_plain_decoding_would_have_taken_over_the_time_taken() -> None:
    ledger = Ledger()
    assert ledger.snapshot()["speedup_est"] == 1.0
    report = RoundReport(
        strategy=OFF, live=2, context=20, drafted=(0, 0), offered=(0, 0), accepted=(1, 0), draft_s=0.25, verify_s=0.75
    )
    ledger.record(report, 1.0)  # a plain pass takes a second and gives a token to each; this one gave three
    assert ledger.snapshot()["rounds"] == 1
    assert ledger.snapshot()["speedup_est"] == pytest.approx(1.5)
