"""The check suspends a drafter whose first drafts after a publish are all wrong, and no other."""

import json

from tlt_core.items.speculation import OFF, RoundReport, Strategy
from tlt_core.tuner.collapse import CollapseCheck

CHAIN = Strategy("eagle3", 3, 1, 3)
NGRAM = Strategy("ngram", 4, 1, 4)


def play(check, rounds, accepted=(0, 0, 0, 0), strategy=CHAIN, offered=(3, 3, 3, 3)):
    """Rounds of four requests; the drafters that were to be suspended, by round."""
    report = RoundReport(strategy, 4, 100, offered, offered, accepted, 1e-3, 1e-2)
    return [check.observe(report) for _ in range(rounds)]


def test_a_drafter_without_a_right_draft_is_suspended_after_64_and_named(caplog):
    check = CollapseCheck(["eagle3"])
    assert not check.published("eagle3")
    assert play(check, 20) == [None] * 15 + ["eagle3"] + [None] * 4  # 16 rounds of four drafts
    assert check.suspended == ("eagle3",)
    assert caplog.text.count("'eagle3' has collapsed") == 1
    assert check.published("eagle3")
    assert check.suspended == ()


def test_one_accepted_token_ends_the_check(caplog):
    check = CollapseCheck(["eagle3"])
    check.published("eagle3")
    assert play(check, 15) + play(check, 1, (0, 1, 0, 0)) + play(check, 100) == [None] * 116
    assert check.suspended == ()
    assert not caplog.text


def test_nothing_is_judged_without_a_publish_nor_by_rounds_without_its_drafts():
    check = CollapseCheck(["eagle3"])
    assert play(check, 100) == [None] * 100
    check.published("eagle3")
    assert play(check, 100, strategy=NGRAM) == [None] * 100
    assert play(check, 100, (), OFF, ()) == [None] * 100
    assert play(check, 100, offered=(0, 0, 0, 0)) == [None] * 100
    assert play(check, 63, offered=(3, 0, 0, 0)) == [None] * 63
    assert play(check, 1, offered=(0, 3, 0, 0)) == ["eagle3"]


def test_the_check_goes_on_after_a_restart_and_forgets_drafters_that_are_gone():
    check = CollapseCheck(["eagle3", "other"])
    for drafter in ("eagle3", "other"):
        check.published(drafter)
    play(check, 15)
    play(check, 16, strategy=CHAIN._replace(drafter="other"))
    state = json.loads(json.dumps(check.state_dict()))
    again = CollapseCheck(["eagle3", "other"])
    again.load_state_dict(state)
    assert again.suspended == ("other",)
    assert play(again, 1) == ["eagle3"]
    fewer = CollapseCheck(["third"])
    fewer.load_state_dict(state)
    assert fewer.state_dict() == CollapseCheck(["third"]).state_dict()
