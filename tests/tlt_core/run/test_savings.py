"""What a run has saved, from rows with numbers that can be added up by hand."""

import pytest

from conf.load import load
from conf.run import RunConfig
from tlt_core.items.metrics import undeclared
from tlt_core.run.savings import Savings, savings

# Two steps of two workers, 100 s in all.  Speculation: 40 s of rollout at 1.5 times the speed of plain decoding: 20 s.
# Streamed update: step 1 has 6 worker seconds, so 3 s (half of the gradient work, so at most 10 s); step 2 has 8 worker
# seconds, so 4 s, but only a fifth of the gradient work, so at most 8 * 0.2 / 0.8 = 2 s.  Together 5 s.
_ROWS = [
    {"step": 0, "timing_s/testing": 13.0},
    {
        "step": 1,
        "timing_s/step": 60.0,
        "timing_s/gen": 30.0,
        "timing_s/update_actor": 10.0,
        "rollout/spec_speedup_est": 1.2,
        "idle/idle_s": 16.0,
        "idle/harvested_s": 10.0,
        "idle/streamed_s": 6.0,
        "idle/untrained_s/no_data": 5.0,
        "idle/streamed_share": 0.5,
        "drafter/version": 0.0,
    },
    {
        "step": 2,
        "timing_s/step": 40.0,
        "timing_s/gen": 10.0,
        "timing_s/update_actor": 8.0,
        "rollout/spec_speedup_est": 1.5,
        "idle/idle_s": 8.0,
        "idle/harvested_s": 8.0,
        "idle/streamed_s": 8.0,
        "idle/streamed_share": 0.2,
        "drafter/version": 1.0,
        "drafter/heldout_accept_length": 3.5,
        "drafter/heldout_accept_length_before": 3.25,
        "drafter/heldout_error": 0.1,
    },
]


def _cfg(*overrides: str) -> RunConfig:
    return load("conf/demo.yaml", ["update.tokens_per_micro_batch=512", *overrides])


def _with(**changes: float) -> list[dict[str, float]]:
    """The rows with other values; `a__b` stands for `a/b`."""
    new = {name.replace("__", "/"): value for name, value in changes.items()}
    return [{**row, **{k: v for k, v in new.items() if row["step"] > 0}} for row in _ROWS]


def _part(found: Savings, name: str) -> tuple[str, str]:
    (part,) = [part for part in found.parts if part.name == name]
    return part.outcome, part.change


def test_a_measured_comparison_counts_more_than_the_estimate() -> None:
    """40 s of rollouts; the 10 s of step 2 took 17 s plainly, so 28 s are saved.  Its step is as long as before: the 17
    seconds, and 3 of validation, are no part of it."""
    rows = [dict(row) for row in _ROWS]
    rows[2] |= {"timing_s/step": 60.0, "timing_s/testing": 3.0, "timing_s/gen_plain": 17.0}
    rows[2] |= {"rollout/plain_equal_frac": 1.0, "training/global_step": 2.0}
    found = savings(rows, _cfg())
    assert (found.step_s, found.parts[0].saved_s, found.parts[0].outcome) == (100.0, pytest.approx(28.0), "helped")
    assert found.parts[0].finding == "Measured at step 2: 17.0 s plainly, 10.0 s with TLT, the same tokens."
    assert found.verdict.startswith("at most 33.0 s saved of about 133.0 s in 2 steps (25%, rollouts measured)")


def test_the_wait_for_a_pass_in_hand_is_no_cost_of_speculation() -> None:
    """2 s of each rollout: 36 s are left, of which 8 took 17 s plainly.  One of two workers used them, so the streamed
    update saved 1 s less in each of two steps."""
    rows = [dict(row) for row in _with(idle__wait_s=2.0)]
    rows[2] |= {"timing_s/gen_plain": 17.0, "rollout/plain_equal_frac": 1.0, "training/global_step": 2.0}
    found = savings(rows, _cfg())
    assert found.parts[0].saved_s == pytest.approx(36 * (17 / 8 - 1))
    assert found.parts[1].saved_s == pytest.approx(5.0 - 2.0)


def test_seconds_and_shares_of_a_run_in_which_all_parts_helped() -> None:
    found = savings(_ROWS, _cfg())
    assert (found.steps, found.step_s, found.saved_s, found.plain_s) == (2, 100.0, 25.0, 125.0)
    assert [part.saved_s for part in found.parts] == [20.0, 5.0, None]
    assert [part.share for part in found.parts] == [0.16, 0.04, None]
    assert {part.outcome for part in found.parts} == {"helped"}
    assert found.verdict == (
        "at most 25.0 s saved of about 125.0 s in 2 steps (20%, estimate); speculation +20.0 s; streamed update at "
        "most 5.0 s; drafter training helped"
    )
    # 24 idle worker seconds: 14 for the update, 4 for the drafter, 5 without data, and 1 that nothing explains
    assert dict(found.idle) == {"update": 14.0, "no_data": 5.0, "drafter": 4.0, "unknown": 1.0}
    assert found.metrics() == {"saved/speculation_s": 20.0, "saved/streamed_update_s": 5.0, "saved/total_s": 25.0}
    assert not undeclared(found.metrics())


def test_speculation_that_costs_time_is_said_to() -> None:
    rows = _with(rollout__spec_speedup_est=0.9)  # 40 s * -0.1 = -4 s
    found = savings(rows, _cfg())
    assert found.parts[0].saved_s == pytest.approx(-4.0)
    assert found.saved_s == pytest.approx(1.0)
    assert _part(found, "speculation") == ("did not help", "rollout.speculation.policy=off")
    fixed = _cfg("rollout.speculation.policy=fixed")
    assert _part(savings(rows, fixed), "speculation") == ("did not help", "rollout.speculation.policy=cost_model")
    assert "speculation did not help (-4.0 s, set rollout.speculation.policy=off)" in found.verdict
    worse = savings(_with(rollout__spec_speedup_est=0.5), _cfg())
    assert worse.verdict.startswith("15.0 s lost in 2 steps of 100.0 s")


@pytest.mark.parametrize(
    ("settings", "rows", "change"),
    [
        (["cluster.num_workers=1"], _with(), "cluster.num_workers=2"),
        ([], _with(idle__idle_s=0.5), ""),  # 1 of 80 worker seconds: no tail
        ([], _with(), "update.streamed=first"),  # idle time trained the drafter
        (["update.streamed=first", "update.groups_per_pack=4"], _with(), "update.groups_per_pack=1"),
        (["update.streamed=first", "update.groups_per_pack=1"], _with(), "update.tokens_per_micro_batch=256"),
    ],
)
def test_what_to_change_where_nothing_was_streamed(
    settings: list[str], rows: list[dict[str, float]], change: str
) -> None:
    rows = [{**row, "idle/streamed_s": 0.0, "idle/streamed_share": 0.0} for row in rows]
    found = savings(rows, _cfg(*settings))
    assert _part(found, "streamed update") == ("did not help", change)
    assert f"streamed update did not help ({'set ' + change if change else 'there is no tail'}" in found.verdict


def test_a_drafter_helps_only_beyond_chance() -> None:
    chance = savings(_with(drafter__heldout_error=0.3), _cfg())
    assert _part(chance, "drafter training") == ("did not help", "drafter.idle_training.enabled=false")
    refused = savings(_with(drafter__version=0.0), _cfg())
    assert _part(refused, "drafter training")[0] == "did not help"
    assert "no new drafter came into use" in refused.parts[2].finding

    found = savings(_ROWS[:1], _cfg())
    assert found.verdict == "nothing to judge: no step was recorded"
    assert {part.outcome for part in found.parts} == {"not measured"}
    assert found.metrics() == {}
