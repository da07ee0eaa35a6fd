"""A damaged file ends a command with one paragraph that names the file and the remedy, never with a traceback."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from conf.data import FileData
from conf.load import load
from conf.run import RunConfig
from flows._errors import explain
from tasks.registry import last_decided
from tasks.report_page import page
from tests.tlt_core.export.conftest import write_tokenizer
from tlt_core.data import dataset
from tlt_core.drafter.eagle3.files import load_eagle3, save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.export import record
from tlt_core.items import checkpoint
from tlt_core.items.checkpoint import DriverState
from tlt_core.machine import precision, provenance
from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import load_config, load_decoder
from tlt_core.run import coldstart, summary
from tlt_core.run.drafter_release import origin_of

DAMAGE = {
    "torn": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "not UTF-8": lambda content: content.replace(b'"', b'"\xff', 1),
    "of another kind": lambda content: b"[1, 2]\n",
    "too deep": lambda content: b"[" * 100_000 + b"\n",
}


@pytest.fixture
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str, bytes], Path]:
    """`damaged(name, content)`: a file with that content, spoilt in the way of the test's parameter `damage`."""

    def spoil(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DAMAGE[request.getfixturevalue("damage")](content))
        return path

    return spoil


@pytest.fixture
def eagle3(tiny_folder: Path, tmp_path: Path) -> Path:
    """`config.json` of a drafter."""
    target = load_decoder(tiny_folder, dtype=torch.float32)
    drafter = eagle3_from_target(target, torch.arange(64), scales=(1.0,) * 3, seed=0)
    save_eagle3(drafter, tmp_path / "eagle3", dtype=torch.float32)
    return tmp_path / "eagle3" / "config.json"


def said(call: Callable[[], object], path: Path) -> str:
    """What the command prints of the error, which names this file in one paragraph."""
    with pytest.raises(ValueError) as caught:
        call()
    text, _ = explain(caught.value, run_dir=None) or ("a traceback", 0)
    assert str(path) in text or str(path.parent) in text
    assert "\n" not in text
    return text


def config(folder: Path) -> RunConfig:
    return load("conf/smoke.yaml", [f"output_dir={folder}", "name=run"]).with_dtypes(
        rollout="float32", update="float32", coldstart="float32"
    )


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_record_of_a_run(damage: str, damaged: Callable[[str, bytes], Path], tmp_path: Path) -> None:
    cfg = config(tmp_path)
    path = damaged("run/run.json", json.dumps({"attempts": [{"started": "now"}]}).encode())
    for call in (lambda: provenance.begin_attempt(cfg), lambda: page(cfg.run_dir, cfg, [])):
        assert "or remove it: the run then goes on" in said(call, path)


@pytest.mark.parametrize("damage", ["not UTF-8", "of another kind", "too deep"])
def test_metrics_and_decisions(damage: str, damaged: Callable[[str, bytes], Path], tmp_path: Path) -> None:
    path = damaged("run/metrics.jsonl", b'{"step": 1}\n{"step": 2}\n')
    assert "line 1: no JSON object" in said(lambda: summary.rows_of(path.parent), path)
    path = damaged("run/retrain.jsonl", b'{"outcome": "refused"}\n')
    assert "line 1: no JSON object" in said(lambda: last_decided(path), path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_manifest_of_a_data_set_which_is_made_again(
    damage: str, damaged: Callable[[str, bytes], Path], tmp_path: Path
) -> None:
    rows = [{"prompt": f"w{i} w{i + 1}", "answer": "w3"} for i in range(3, 20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg, out_dir = FileData(kind="file", train_path=str(tmp_path / "rows.jsonl")), tmp_path / "data"
    write_tokenizer(tmp_path / "words")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "words")
    prepare = partial(
        dataset.prepare, cfg, tokenizer=tokenizer, vocab_size=49_152, max_prompt_tokens=64, out_dir=out_dir
    )
    made = prepare()
    path = damaged("data/manifest.json", (tmp_path / "data" / "manifest.json").read_bytes())
    for call in (
        lambda: dataset.load(tmp_path / "data", "train", tokenizer),
        lambda: record.origin(config(tmp_path), record.Source(tmp_path, None, tmp_path / "data", None)),
    ):
        assert "'tlt prepare CONFIG' makes the data set" in said(call, path)
    assert prepare() == made
    assert len(dataset.load(tmp_path / "data", "train", tokenizer)) == made.counts["train"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_configuration_of_a_model_and_of_a_drafter(
    damage: str,
    damaged: Callable[[str, bytes], Path],
    tiny_folder: Path,
    tiny_config: DecoderConfig,
    eagle3: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    path = damaged("model/config.json", (tmp_path / "model" / "config.json").read_bytes())
    assert "the model again" in said(lambda: load_config(path.parent), path)
    path = damaged("eagle3/config.json", eagle3.read_bytes())
    said(lambda: load_eagle3(path.parent, tiny_config), path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("num_attention_heads", 0),
        ("head_dim", [8]),
        ("rope_parameters", [1]),
        ("eos_token_id", {"id": 2}),
        ("eagle_aux_hidden_state_layer_ids", 3),
    ],
)
def test_a_value_of_the_wrong_kind(key: str, value: object, tiny_config: DecoderConfig, eagle3: Path) -> None:
    eagle3.write_text(json.dumps(json.loads(eagle3.read_text()) | {key: value}))
    assert key in said(lambda: load_eagle3(eagle3.parent, tiny_config), eagle3)


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_reports_of_cold_start_and_first_drafter(
    damage: str, damaged: Callable[[str, bytes], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged("coldstart/abc/coldstart.json", b'{"dtype": "float32", "metrics": {}}')
    cfg = config(tmp_path)

    def cold_start() -> object:
        return coldstart.run(
            cfg, model_dir=tmp_path, data_dir=tmp_path, out_dir=path.parent, on_progress=lambda *_: None
        )

    assert f"remove {path.parent}, which is then made again" in said(cold_start, path)
    monkeypatch.setenv("TLT_STAGES", str(tmp_path))
    said(lambda: precision.decide(load("conf/smoke.yaml", [f"output_dir={tmp_path}"])), path)
    path = damaged("first/drafter.json", b'{"metrics": {}, "first": {}}')
    assert "only the first drafter's origin is lost" in said(lambda: origin_of(path.parent, run="x", steps=1), path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_checkpoints_marker_which_is_skipped(
    damage: str, damaged: Callable[[str, bytes], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = DriverState(1, 8, 1, "r", 0, "f", None)
    folder = checkpoint.save(tmp_path, state, lambda partial: None)
    damaged("step_000001/COMPLETE", (folder / "COMPLETE").read_bytes())
    for _ in range(2):
        assert checkpoint.newest_valid(tmp_path) is None
    said = f"skipping checkpoint {folder}: it has no valid COMPLETE marker"
    assert caplog.text.count(said) == 1, "once, however many ask"
