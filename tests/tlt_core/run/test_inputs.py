"""Start model and data folder."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from conf.load import load
from conf.model import RandomModel
from tlt_core.model.load import load_decoder, load_tokenizer
from tlt_core.run import inputs


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


def test_of_two_runs_that_want_a_random_model_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would replace the folder that the first has begun to read."""
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    both_inside, making = threading.Event(), []

    def write(_: RandomModel, folder: Path, *, seed: int) -> None:
        making.append(seed)
        if len(making) == 2:
            both_inside.set()
        both_inside.wait(1.0)  # the other one would come in now
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(inputs, "_write_random", write)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: inputs.start_model(RandomModel(kind="random"), seed=5), range(2))
    assert first == second
    assert making == [5]
