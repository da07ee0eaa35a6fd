"""What computes on a GPU where the machine has one, and the configuration asks for it."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from conf.load import load
from conf.rollout import SpeculationConfig
from tests.pretended_gpu import GpuTensor, pretended_gpu
from tlt_core.export import drafter_folder, drafter_trial
from tlt_core.items.types import SamplingParams
from tlt_core.machine.precision import settle
from tlt_core.run import coldstart, drafter_warmup, generate
from tlt_core.run.worker_spec import worker_spec


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda")])
def test_workers(gpus: int, device: str, tiny_folder: Path, tmp_path: Path) -> None:
    given = [f"cluster.gpus_per_worker={gpus}", "rollout.engine=own", "update.dtype=float32"]
    cfg = settle(load("conf/smoke.yaml", [*given, f"output_dir={tmp_path}"]))
    assert coldstart._spec(cfg, tiny_folder, num_steps=2).device == device
    assert worker_spec(cfg, tiny_folder, longest_prompt=8).device == device


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda:0")])
def test_the_first_drafter(gpus: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}
    monkeypatch.setattr(drafter_warmup, "_run", lambda cfg, **options: given.update(options))
    monkeypatch.setattr(drafter_warmup, "release", lambda device: given.update(released=device))
    cfg = load("conf/smoke.yaml", [f"cluster.gpus_per_worker={gpus}"])
    drafter_warmup.run(cfg, policy=tmp_path, data_dir=tmp_path, out_dir=tmp_path, on_progress=lambda *_: None)
    assert given["device"] == given["released"] == device


@pytest.mark.usefixtures("has_gpu")
@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cuda:0")])
def test_a_drafter_is_measured(gpus: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load("conf/smoke.yaml", [f"cluster.gpus_per_worker={gpus}", "rollout.dtype=float32"])
    given = []
    for module in (drafter_trial, drafter_folder):
        monkeypatch.setattr(module.dataset, "load", lambda *_: [])
        monkeypatch.setattr(module, "load_tokenizer", lambda _: None)
        monkeypatch.setattr(module, "stop_token_ids", lambda *_, **__: (2,))
        monkeypatch.setattr(module, "load_decoder", lambda *_, device, dtype: given.append(device))
    monkeypatch.setattr(drafter_folder, "measure", lambda *_, **__: None)
    drafter_trial._workload(cfg, tmp_path, tmp_path, dtype=torch.float32)
    drafter_folder._measure(cfg, mock.Mock(policy=tmp_path, data_dir=tmp_path), mock.Mock(), num_prompts=1)
    assert given == [device, device]


def test_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's tokens."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 2 + 3?"}\n{"prompt": "Spell cat."}\n')
    loaded, load_decoder = [], generate.load_decoder

    def remembered(*arguments, **options):
        loaded.append(load_decoder(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(generate, "load_decoder", remembered)

    def generated(out: Path) -> list[list[int]]:
        generate.generate_file(
            model="smollm2-135m-instruct",
            prompts=prompts,
            out=out,
            params=SamplingParams(temperature=0.7, max_new_tokens=8),
            seed=5,
            dtype="float32",
            batch_size=2,
            num_workers=1,
            speculation=SpeculationConfig(policy="off"),
        )
        return [json.loads(line)["token_ids"] for line in out.read_text().splitlines()]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = generated(tmp_path / "cpu.jsonl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pretended_gpu():
        assert generated(tmp_path / "gpu.jsonl") == expected
        assert [isinstance(decoder.head_weight, GpuTensor) for decoder in loaded] == [False, True]
