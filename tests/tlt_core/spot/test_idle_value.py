"""What an idle second is worth, by hand."""

import pytest

from tlt_core.spot.idle_value import drafter_worth, update_worth
from tlt_core.spot.payoff import Payoff, PayoffSettings


def test_worth_by_hand() -> None:
    """A phase of training gains 2 %, for 24 phases.  It took half the idle time of one worker, or all of four."""
    assert update_worth(2) == 0.5
    assert drafter_worth(0.02, used=1.0, lasting_phases=24, share=0.5, workers=1) == pytest.approx(0.96)
    assert drafter_worth(0.02, used=0.5, lasting_phases=24, share=1.0, workers=4) == pytest.approx(0.06)
    assert drafter_worth(0.02, used=0.0, lasting_phases=24, share=1.0, workers=1) == pytest.approx(0.048)
    assert drafter_worth(-0.02, used=1.0, lasting_phases=24, share=1.0, workers=1) == 0.0


def test_a_drafter_is_trained_first_only_where_the_run_is_long_enough() -> None:
    """Before anything was measured, on two workers."""
    payoff = Payoff(PayoffSettings())
    assert payoff.worth(30) > update_worth(2) > payoff.worth(5)
    assert payoff.worth(30) == payoff.worth(24)
