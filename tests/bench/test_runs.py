"""`tlt bench e2e`, `spot` and `rollout` on the smoke configuration: the reports hold what they promise."""

from pathlib import Path

import pytest

from bench.e2e import bench_e2e
from bench.idle import bench_idle
from bench.rollout.command import _word_problems, bench_rollout
from bench.runs import first_drafter, take_turns, variants
from bench.spot.command import bench_spot
from bench.spot.measure import METHODS
from conf.load import ConfigError, load
from conf.run import RunConfig
from tlt_core.machine.precision import settle
from tlt_core.model.load import load_tokenizer

pytestmark = pytest.mark.prefect

VARIANTS = ("plain", "fixed", "static", "streamed", "trained", "tlt")


def _config(folder: Path, *settings: str) -> RunConfig:
    own = [f"output_dir={folder}/runs", f"tracking.uri=sqlite:///{folder}/mlflow.db", "num_steps=4"]
    return settle(load("conf/smoke.yaml", [*own, *settings]))


@pytest.fixture
def home(prefect_engine: None, embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "artifacts" / "models").mkdir(parents=True)
    (tmp_path / "artifacts" / "models" / embedded_model.name).symlink_to(embedded_model)
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "artifacts"))
    return tmp_path


def test_an_engine_without_hidden_states_is_refused_at_once(tmp_path: Path) -> None:
    vllm = ("rollout.engine=vllm", "rollout.speculation.policy=threshold", "drafter.spot.enabled=false")
    with pytest.raises(ConfigError, match=r"rollout\.engine='vllm'.*set rollout\.engine to own"):
        first_drafter(_config(tmp_path, *vllm))


def test_variants_differ_in_one_switch(tmp_path: Path) -> None:
    cfg = _config(tmp_path)
    runs = variants(cfg, tmp_path / "drafter-eagle3")
    assert {name: run.rollout.speculation.policy for name, run in runs.items()} == {
        "plain": "off",
        "fixed": "fixed",
        "static": "cost_model",
        "streamed": "off",
        "trained": "cost_model",
        "tlt": "cost_model",
    }
    assert [name for name, run in runs.items() if run.drafter.spot.enabled] == ["trained", "tlt"]
    assert [name for name, run in runs.items() if run.update.streamed != "off"] == ["streamed", "tlt"]
    same = {"name", "rollout", "drafter", "update"}
    assert len({run.model_dump_json(exclude=same) for run in runs.values()}) == 1
    rollouts = [run.rollout.model_dump_json(exclude={"speculation"}) for run in runs.values()]
    assert set(rollouts) == {cfg.rollout.model_dump_json(exclude={"speculation"})}


def test_a_block_of_one_step_would_measure_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_steps=4 in 4 repeats.*set num_steps to 8 or more"):
        next(take_turns({}, num_steps=4, blocks=4))


def test_word_problems_leave_no_data_set_behind(
    embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a pipeline's stages look for theirs, it would be a changed input of all of them."""
    monkeypatch.setenv("TLT_STAGES", str(tmp_path / "stages"))
    prompts = _word_problems(_config(tmp_path), load_tokenizer(embedded_model))
    assert len({p.text for p in prompts}) == len(prompts) == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_e2e_shows_identity_and_the_ceiling(home: Path) -> None:
    out = home / "e2e.json"
    report = bench_e2e(_config(home, "num_steps=2"), repeats=1, out=out, command="by hand")
    rows = {(row["workload"], row["configuration"]): row for row in report["rows"]}
    for workload in ("tail", "no-tail"):
        assert {name for own, name in rows if own == workload} == {*VARIANTS, "responses", "ceiling"}
        assert rows[workload, "plain"]["over_plain_in_all"] == 1.0
        ceiling = rows[workload, "ceiling"]
        assert ceiling["speedup_if_rollout_were_free"] > ceiling["speedup_tlt_if_the_rest_stays"] > 0
    assert all(rows["exact", name]["same_steps"] == 1.0 for name in VARIANTS)
    assert all(rows["exact", name]["same_weights"] == 1.0 for name in VARIANTS)
    assert report["verdicts"][-1]["holds"]
    bounds = [v["bound"] for v in report["verdicts"] if not v["claim"].startswith(("tail: share", "tail: idle"))]
    assert bounds == [1.7, 1.15, 1.01, 0.97, 1.0, 1.0]
    assert out.with_suffix(".png").stat().st_size > 5000
    assert (home / "e2e-timelines.png").stat().st_size > 5000
    assert not list(home.glob("runs/*/checkpoints"))


@pytest.mark.slow
def test_spot_compares_drafters_and_methods_on_recorded_responses(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.spot.command._METHOD_ROWS", 64)
    report = bench_spot(_config(home), repeats=2, out=home / "spot.json", command="by hand")
    rows = {row["configuration"]: row for row in report["rows"]}
    first, later = rows["steps 1 to 2, 12 drafts"], rows["steps 3 to 4, 12 drafts"]
    assert len(list(home.glob("runs/*/drafters/*-eagle3"))) <= 3  # of a block, and the one before it
    assert later["responses"] == first["responses"] > 0
    for row in (first, later):
        for kind in ("by_token", "by_response"):
            assert row[f"static_or_ngram_{kind}"] >= max(row[f"static_{kind}"], 1.0)
    assert all(1 <= rows[f"method: {kind}"]["accept_length"] <= 3 for kind in METHODS)  # two drafts a round
    assert rows["packing"]["packed_over_padded"] > 0
    assert rows["checkpoint"]["full_mb"] > rows["checkpoint"]["selective_mb"] > 0
    whole = rows["training in idle time over none"]
    assert whole["same_steps"] == 1.0
    by_block = [r["over_static/timing_s/step"] for r in (first, later)]
    assert min(by_block) <= whole["over_static/timing_s/step"] <= max(by_block)
    assert [v["bound"] for v in report["verdicts"]] == [1.3, 0.95, 0.9, 250.0, 1.01]
    assert report["verdicts"][-1]["value"] == whole["over_static/timing_s/step"]


@pytest.mark.slow
def test_spot_takes_the_first_drafter_as_long_as_none_was_published(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.spot.command._METHOD_ROWS", 64)
    cfg = _config(home, "drafter.spot.min_idle_s=1e6")
    report = bench_spot(cfg, repeats=2, out=home / "spot.json", command="by hand")
    ratios = [row["ratio_by_round"] for row in report["rows"] if "ratio_by_round" in row]
    assert ratios == [1.0] * 4  # two blocks, short and long chains


@pytest.mark.slow
def test_idle_decodes_every_rollout_twice_and_trains_in_one(home: Path) -> None:
    cfg = _config(home, "drafter.spot.after_rollout_s=0.3")  # its idle time is too short
    report = bench_idle(cfg, repeats=3, out=home / "idle.json", command="by hand")
    steps, whole = report["rows"]
    assert whole["same_steps"] == 1.0
    assert steps["drafter/trained_tokens"]["max"] > 0
    assert steps["with_s"]["min"] > 0
    assert steps["without_s"]["min"] > 0
    assert steps["step_s"]["min"] > steps["with_s"]["min"]
    ratios = sorted((whole["rollout_ratio"], 1.0))  # the rest of a step takes as long with and without
    assert ratios[0] * 0.9 < whole["step_ratio"] < ratios[1] * 1.1
    assert [v["bound"] for v in report["verdicts"]] == [1.01, 1.0]
    assert report["verdicts"][0]["value"] == whole["step_ratio"]


@pytest.mark.slow
def test_rollout_shows_floor_and_ceiling_and_the_same_tokens(home: Path) -> None:
    report = bench_rollout(_config(home), repeats=1, out=home / "rollout.json", command="by hand")
    rows = {(row["workload"], row["configuration"]): row for row in report["rows"]}
    workloads = ("rl", "tail", "short", "raw")
    for workload in workloads:
        lengths = rows.pop((workload, "lengths"))
        assert 0 < lengths["p50"] <= lengths["p99"] <= lengths["tokens"]
        assert lengths["tokens"] == rows[workload, "cost_model"]["tokens"]["median"]
    decoded = [row for (workload, _), row in rows.items() if workload in workloads]
    assert {row["configuration"] for row in decoded} >= {"off", "cost_model", "beg_mab", "threshold"}
    assert all(row["differing"]["max"] == 0 for row in decoded)  # float32: the same tokens under every policy
    assert rows["floor", "machine"]["gb_per_s"] > 0
    one, many = rows["floor", "4 live, 4 tokens"], rows["floor", "4 live, 52 tokens"]
    assert many["arithmetic_ms"] == pytest.approx(13 * one["arithmetic_ms"])
    assert many["weights_ms"] == one["weights_ms"]
    ceilings = [row for (workload, _), row in rows.items() if workload == "ceiling"]
    assert ceilings
    for row in ceilings:  # of one run
        assert row["speedup_if_drafting_were_free"]["max"] >= row["speedup"]["max"] * 0.99


@pytest.mark.slow
def test_one_workload_alone(home: Path) -> None:
    report = bench_rollout(_config(home), repeats=1, out=home / "raw.json", command="by hand", workload="raw")
    assert {row["workload"] for row in report["rows"]} == {"raw"}
    assert all(verdict["claim"].startswith("raw: ") for verdict in report["verdicts"])
    with pytest.raises(ConfigError, match=r"--workload=hard: choose one of rl, tail, short, raw"):
        bench_rollout(_config(home), repeats=1, out=home / "none.json", command="by hand", workload="hard")
