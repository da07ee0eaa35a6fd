"""A line when nothing was said for a while."""

import logging
import threading
import time

import pytest

from flows._heartbeat import Heartbeat, clock
from flows._terminal import Terminal
from tlt_core.run.progress import Progress


@pytest.fixture(autouse=True)
def _own_clock(caplog: pytest.LogCaptureFixture) -> None:
    """No silence of earlier tests counts."""
    logging.getLogger().removeHandler(clock)
    caplog.set_level(logging.INFO)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "flows._heartbeat"]


def test_silence_is_broken_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    with Heartbeat(lambda: "still here", quiet_s=0.1):
        time.sleep(0.6)
    assert 2 <= len(_said(caplog)) <= 6
    assert not any(t.name == "heartbeat" for t in threading.enumerate())


@pytest.mark.parametrize(("logger", "breaks"), [("tlt_core.here", True), ("some.library", False)])
def test_lines_count_that_people_are_shown(logger: str, breaks: bool, caplog: pytest.LogCaptureFixture) -> None:
    with Heartbeat(lambda: "still here", quiet_s=0.5):
        for _ in range(8):
            time.sleep(0.1)
            logging.getLogger(logger).info("a line")
    assert bool(_said(caplog)) is not breaks


def test_heartbeats_that_follow_each_other_do_not_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(8):
        with Heartbeat(lambda: "still here", quiet_s=0.4):
            time.sleep(0.15)
    assert _said(caplog)


def test_without_a_terminal_the_phase_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with Terminal(quiet_s=0.15) as show:
        time.sleep(0.4)
        show(Progress(3, 12, "rollout", 41, 96, tokens=5000, tokens_per_s=412.4, unit="responses"))
        time.sleep(0.4)
    said = _said(caplog)
    assert "starting: 0 s so far" in said
    assert any(line.startswith("rollout: step 3/12, 41/96 responses, 412 tok/s, about 0:0") for line in said)
