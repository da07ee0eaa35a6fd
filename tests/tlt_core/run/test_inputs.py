"""Start model and data folder."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from conf.load import load
from conf.model import RandomModel
from tlt_core.model.load import load_decoder, load_tokenizer
from tlt_core.run import coldstart, inputs


def test_the_data_folder_changes_with_what_decides_its_content_and_with_nothing_else() -> None:
    changes = ("data.num_train=33", "rollout.max_prompt_tokens=64", "model.num_layers=3", "seed=3", "name=other")
    assert len({inputs.data_dir(load("conf/smoke.yaml", [change])) for change in changes}) == 4


def test_a_random_model_loads(embedded_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    monkeypatch.setattr(inputs, "embedded_model_dir", lambda: embedded_model)
    cfg = RandomModel(kind="random", hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48)
    folder = inputs.start_model(cfg, seed=5)
    decoder = load_decoder(folder, dtype=torch.float32)
    assert len(load_tokenizer(folder)) <= decoder.head_weight.shape[0]
    other = load_decoder(inputs.start_model(cfg, seed=6), dtype=torch.float32)
    assert not torch.equal(decoder.head_weight, other.head_weight)


@pytest.mark.parametrize("wanted", ["start model", "cold start"])
def test_of_two_runs_that_want_a_folder_one_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """A second one would replace the folder that the first has begun to read."""
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    both_inside, makers, folder = threading.Event(), [], tmp_path / "coldstart" / "x"

    def write(_: object, folder: Path, **__: object) -> None:
        makers.append(folder)
        if len(makers) == 2:
            both_inside.set()
        both_inside.wait(1.0)  # the other one would come in now
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "coldstart.json").write_text(json.dumps({"metrics": {"made_by": len(makers)}}))

    def run(_: int) -> object:
        if wanted == "start model":
            return inputs.start_model(RandomModel(kind="random"), seed=5)
        cfg, nothing = load("conf/smoke.yaml"), lambda *_: None
        return coldstart.run(cfg, model_dir=tmp_path, data_dir=tmp_path, out_dir=folder, on_progress=nothing)

    monkeypatch.setattr(inputs, "_write_random", write)
    monkeypatch.setattr(coldstart, "_make", lambda cfg, *, out_dir, **_: write(cfg, out_dir))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    assert len(makers) == 1
