"""A run's end, course and response lengths, from files written by hand."""

from pathlib import Path

from tests.tasks.scored_batches import scored_batch
from tlt_core.items import store
from tlt_core.run import summary as run_summary

_ROWS = [
    {"step": 0, "val-core/all/reward/greedy": 0.25, "timing_s/testing": 3.0},
    {"step": 1, "critic/rewards/mean": 0.1, "rollout/spec_accept_length": 2.0, "timing_s/step": 9.0},
    {"step": 2, "critic/rewards/mean": 0.3, "rollout/spec_accept_length": 3.0, "timing_s/step": 5.0},
    {"step": 3, "critic/rewards/mean": 0.2, "timing_s/step": 1.0},
]


def test_summary_and_curves(tmp_path: Path) -> None:
    assert run_summary.summary(_ROWS) == {
        "steps": 3,
        "last": {"reward": 0.2, "validation": 0.25, "accept_length": 3.0},
        "median": {"accept_length": 2.5, "step_s": 5.0},
    }
    assert run_summary.summary([]) == {"steps": 0, "last": {}, "median": {}}
    run_summary.write_csv(tmp_path / "x.csv", run_summary.curves(_ROWS), ["step", *run_summary.CURVES])
    head, *lines = (tmp_path / "x.csv").read_text().splitlines()
    column = head.split(",").index("accept_length")
    assert [(line.split(",")[0], line.split(",")[column]) for line in lines] == [("1", "2.0"), ("2", "3.0"), ("3", "")]


def test_how_the_validation_reward_has_changed() -> None:
    """Errors of 0.03 and 0.04 make 0.05."""
    name = "val-core/all/reward/{}_at_2"
    first = {"step": 0, name.format("mean"): 0.25, name.format("error"): 0.03, "val-core/all/reward/greedy": 0.5}
    last = {"step": 8, name.format("mean"): 0.5, name.format("error"): 0.04, "val-core/all/reward/greedy": 0.375}
    said = run_summary.learning([first, {"step": 1}, last], samples=2)
    assert said == "validation reward 0.250 -> 0.500 (+0.250 +-0.050), sampled, step 0 to 8"
    assert "0.500 -> 0.375 (-0.125), greedy" in run_summary.learning([first, last], samples=0)
    assert run_summary.learning([first], samples=2) == ""


def test_files_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "bubble/idle_s": 2.0, "drafter/canary_error": 0.5}\n')
    renamed = {"step": 1, "idle/idle_s": 2.0, "drafter/heldout_error": 0.5}  # an earlier release wrote the file
    assert run_summary.rows_of(tmp_path) == [renamed]
    assert run_summary.length_histogram(tmp_path, max_new_tokens=40) == []
    batch = scored_batch()  # responses of 3, 5, 7 and 40 tokens
    store.save_scored(batch, tmp_path / "steps" / "000001" / "scored.safetensors")
    rows = run_summary.length_histogram(tmp_path, max_new_tokens=50)  # 3 tokens a bin, 17 bins
    assert [row["tokens"] for row in rows] == list(range(3, 52, 3))
    assert {row["tokens"]: row["first"] for row in rows if row["first"]} == {3: 1, 6: 1, 9: 1, 42: 1}
    assert all(row["first"] == row["last"] for row in rows)
