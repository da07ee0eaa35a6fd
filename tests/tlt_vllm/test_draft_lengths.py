"""The tuner in vLLM's step order: a draft is chosen one step before it is verified.

A simulated engine has planted costs and a planted acceptance.  The class under test gets what the scheduler gives it.
"""

import logging

import pytest

from tlt_core.items.speculation import OFF
from tlt_vllm.draft_lengths import DraftLengths
from tlt_vllm.settings import Settings

PASS_S, TOKEN_S, DRAFT_S = 0.010, 0.0002, 0.001


class Engine:
    """Steps in vLLM's order; `survives` draft tokens of each chain are accepted (of n-grams: `ngrams_survive`)."""

    def __init__(self, lengths_settings: Settings, *, measured: bool = True, with_ngrams: bool = False) -> None:
        self.now_s, self.survives, self.ngrams_survive, self.measured = 0.0, 0, 0, measured
        self.lengths = DraftLengths(lengths_settings, "eagle3", with_ngrams=with_ngrams, clock=lambda: self.now_s)
        self.drafted, self.drafter = 0, "off"  # of each request, to be verified in the next step
        self.chosen: list[int] = []
        self.late_s = 0.0

    def step(self, names: list[str], *, prefills: bool = False) -> int:
        began_s, verified = self.now_s, self.drafted
        known = {name: 50 for name in names}
        length = self.lengths.schedule(
            {} if prefills else dict.fromkeys(names, verified),
            next_up=known,
            context=50 * len(names),
            prefills=prefills,
            began_s=began_s,
        )
        draft_s = DRAFT_S * (1 + length)
        self.now_s += PASS_S + TOKEN_S * len(names) * (1 + verified) + draft_s + self.late_s
        survives = self.ngrams_survive if self.drafter == "ngram" else self.survives
        accepted = 0 if prefills else min(verified, survives)
        emitted = dict.fromkeys(names, 1 + accepted)
        self.lengths.finish(emitted, draft_s=draft_s if self.measured else None, late_s=self.late_s)
        self.drafted, self.drafter = length, self.lengths.chosen.drafter
        self.chosen.append(length)
        return 1 + accepted


def settings(**changes: object) -> Settings:
    given = {"draft_lengths": [2, 4, 7], "log_every_s": 0} | changes
    found = Settings.read(
        {"tlt": given}, longest=7 if "draft_lengths" not in changes else max(changes["draft_lengths"])
    )
    assert found is not None
    return found


@pytest.mark.parametrize("measured", [True, False], ids=["draft timed", "draft not timed"])
def test_a_good_drafter_is_used_and_a_useless_one_is_not(measured: bool) -> None:
    engine = Engine(settings(), measured=measured)
    engine.survives = 5
    for _ in range(120):
        engine.step(["a", "b"])
    assert min(engine.chosen[-60:]) >= 4, "chains of five are accepted"
    engine.survives = 0
    for _ in range(120):
        engine.step(["a", "b"])
    off = [n for n, length in enumerate(engine.chosen[120:]) if length == 0]
    assert off, "it is switched off"
    assert off[0] <= 60, "within 60 rounds"
    assert engine.chosen[-60:].count(0) >= 45, "up to probes"
    engine.survives = 6
    for _ in range(400):
        engine.step(["a", "b"])
    assert engine.chosen[-30:].count(0) <= 5, "it is found again"


def test_n_grams_beside_a_model_are_used_where_they_are_better() -> None:
    engine = Engine(settings(), with_ngrams=True)
    assert [str(s) for s in engine.lengths.ngrams] == ["ngram:4x1/4", "ngram:7x1/7"]
    for ngrams_survive, survives, best in ((6, 1, "ngram"), (0, 6, "eagle3"), (6, 1, "ngram")):
        engine.ngrams_survive, engine.survives = ngrams_survive, survives
        used = []
        for _ in range(400):
            engine.step(["a"])
            used.append(engine.lengths.chosen.drafter)
        assert used[-60:].count(best) >= 50, "up to probes"


def test_a_round_is_a_draft_and_the_pass_that_verifies_it() -> None:
    engine = Engine(settings(policy="fixed", draft_lengths=[3]))
    engine.lengths.trace = []
    engine.survives = 2
    engine.step(["a"], prefills=True)
    assert engine.lengths.trace == [], "the prompt's pass is no round"
    engine.late_s = 0.5  # work that earlier steps have put off belongs to no round
    engine.step(["a"])
    (told,) = engine.lengths.trace
    report = told["report"]
    assert (str(report.strategy), report.drafted, report.accepted) == ("eagle3:3x1/3", (3,), (2,))
    assert report.draft_s == pytest.approx(4 * DRAFT_S), "of the step before"
    assert report.verify_s == pytest.approx(PASS_S + 4 * TOKEN_S)


def test_without_drafts_a_round_still_pays_for_the_drafters_keys() -> None:
    """vLLM runs the drafter on new tokens even when it drafts none: plain decoding must not look cheaper than it is."""
    engine = Engine(settings(policy="off"))
    engine.lengths.trace = []
    engine.step(["a"], prefills=True)
    engine.step(["a"])
    report = engine.lengths.trace[-1]["report"]
    assert (report.strategy, report.draft_s) == (OFF, 0.0)
    assert report.verify_s == pytest.approx(PASS_S + TOKEN_S + DRAFT_S)


def test_two_steps_under_way_are_told_apart() -> None:
    """Asynchronous scheduling: the next step is scheduled before this one has ended."""
    engine = Engine(settings(policy="fixed", draft_lengths=[3]))
    lengths = engine.lengths
    lengths.trace = []
    lengths.schedule({}, next_up={"a": 5}, context=0, prefills=True, began_s=0.0)
    lengths.schedule({"a": 3}, next_up={"a": 9}, context=5, prefills=False, began_s=0.001)
    engine.now_s = 0.010
    lengths.finish({"a": 1}, draft_s=0.002)
    lengths.schedule({"a": 3}, next_up={"a": 13}, context=9, prefills=False, began_s=0.011)
    engine.now_s = 0.030
    lengths.finish({"a": 4}, draft_s=0.003)
    report = lengths.trace[-1]["report"]
    assert (report.accepted, report.context) == ((3,), 5)
    assert report.draft_s + report.verify_s == pytest.approx(0.002 + 0.020 - 0.003), "from the end of the step before"


def test_an_error_of_the_tuner_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(settings())

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    engine.lengths.tuner.choose = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            engine.step(["a"])
    assert engine.chosen == [7] * 5
    assert caplog.text.count("the tuner failed; 7 tokens are drafted in every step") == 1, "said once"
