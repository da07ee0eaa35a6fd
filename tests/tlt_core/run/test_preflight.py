"""Problems found before any expensive work."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from conf.load import ConfigError, load
from tests.tasks.scored_batches import scored_batch
from tlt_core.data.question import DataError
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Config, random_eagle3
from tlt_core.grpo.reward import RewardError
from tlt_core.items import store
from tlt_core.machine.disk import FolderError, SpaceError, check_space
from tlt_core.machine.processors import TooManyWorkers
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.shapes import KNOWN, shape_of
from tlt_core.run import preflight, step_files


def test_parameters_are_counted_from_the_headers(tiny_folder: Path) -> None:
    # embedding 64*32 (tied); per layer: q 32*32, k and v 16*32, o 32*32, gate, up and down 48*32, two norms of 32
    per_layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32
    assert preflight.count_parameters(tiny_folder) == 64 * 32 + 2 * per_layer + 32


def test_a_truncated_weight_file_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    cfg = load("conf/smoke.yaml", [f"model={{kind: pretrained, path: {folder}}}"])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        preflight.check_run(cfg)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        preflight.check_run(load("conf/smoke.yaml", [f"model={{kind: pretrained, path: {path}}}"]))


def test_a_reward_function_that_cannot_be_imported_is_named() -> None:
    cfg = load("conf/smoke.yaml", ["reward.functions=[{kind: python, path: 'no_such_module:f'}]"])
    with pytest.raises(RewardError, match="no_such_module"):
        preflight.check_run(cfg)


def test_too_little_space_says_how_much_and_where(tmp_path: Path) -> None:
    check_space(tmp_path / "not" / "made" / "yet", needed_bytes=1)
    with pytest.raises(SpaceError, match=r"needs about 1e\+09 GB.*set output_dir"):
        check_space(tmp_path / "run", needed_bytes=10**18)


def test_checkpoints_and_saved_steps_need_space(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(preflight, "check_space", lambda folder, *, needed_bytes: asked.append(needed_bytes))
    overrides = [
        f"output_dir={tmp_path}",
        "num_steps=100",
        "rollout.num_prompts=2",
        "rollout.num_samples=4",
        "rollout.max_prompt_tokens=64",
        "rollout.max_new_tokens=36",
        "checkpoint.keep_last=3",
        "checkpoint.keep_best=0",
        "checkpoint.every_steps=5",
        "checkpoint.keep_step_files=4",
    ]
    preflight.check_model(load("conf/smoke.yaml", overrides), tiny_folder)
    preflight.check_model(load("conf/smoke.yaml", [*overrides, "num_steps=7"]), tiny_folder)
    count = preflight.count_parameters(tiny_folder)
    # three kept and one being written, 12 bytes a parameter; the exported policy in fp32 at most
    model_bytes = 4 * 12 * count + 4 * count
    step_bytes = 8 * (100 * 8 + 128) + 2048
    # the first step's, the newest four, and five until the next checkpoint
    assert asked == [model_bytes + 10 * step_bytes, model_bytes + 7 * step_bytes]


def test_a_step_takes_no_more_than_is_planned(tmp_path: Path) -> None:
    """Four responses to prompts of two tokens, up to 40 tokens long."""
    batch = scored_batch()
    store.save_scored(batch.take([3, 3, 3, 3]), tmp_path / "scored.safetensors")
    taken = sum(path.stat().st_size for path in tmp_path.iterdir())
    settings = ["rollout.num_prompts=2", "rollout.num_samples=2", "rollout.max_prompt_tokens=2"]
    planned = step_files.needed_bytes(load("conf/smoke.yaml", [*settings, "rollout.max_new_tokens=40", "num_steps=1"]))
    assert taken <= planned <= 2 * taken


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"file/smoke' can be neither made nor written .*set output_dir"):
        preflight.check_run(load("conf/smoke.yaml", [f"output_dir={tmp_path}/file"]))


def test_far_more_workers_than_processors_are_refused() -> None:
    with pytest.raises(TooManyWorkers, match=r"lower cluster\.num_workers"):
        preflight.check_run(load("conf/smoke.yaml", ["cluster.num_workers=4096"]))


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": 2}\n{"prompt": "1 + 2 =", "answer": [3]}\n')
    data = [f"data={{kind: file, train_path: {rows}}}", "reward.functions=[{kind: exact}]"]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: 'answer' is a list"):
        preflight.check_run(load("conf/smoke.yaml", data))
    rows.write_text('{"prompt": "1 + 1 =", "answer": 2}\n')
    with pytest.raises(DataError, match=r"none\.jsonl does not exist; data\.validation_path"):
        preflight.check_run(load("conf/smoke.yaml", [*data, f"data.validation_path={tmp_path}/none.jsonl"]))


def _drafter(target: DecoderConfig, folder: Path) -> Path:
    save_eagle3(random_eagle3(Eagle3Config.for_target(target, 8), torch.arange(8), seed=0), folder, dtype=torch.float32)
    return folder


def _uses(drafter: Path) -> str:
    return f"rollout.speculation.drafter_path={drafter}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 128}, "hidden_size is 128, but the target's is 64"),
        ({"vocab_size": 32_000}, "vocab_size is 32000, but the target's is 49152"),
    ],
)
def test_the_drafter_of_another_model_is_refused(tmp_path: Path, change: dict[str, int], said: str) -> None:
    """The random model, which is not there yet."""
    cfg = load("conf/smoke.yaml")
    target = shape_of(cfg.model)
    assert target is not None
    preflight.check_run(load("conf/smoke.yaml", [_uses(_drafter(target, tmp_path / "own-eagle3"))]))
    other = _drafter(dataclasses.replace(target, **change), tmp_path / "other-eagle3")
    with pytest.raises(ModelError, match=rf"drafter_path='.*other-eagle3'.*{said}.*leave .*drafter_path out"):
        preflight.check_run(load("conf/smoke.yaml", [_uses(other)]))
    preflight.check_run(load("conf/smoke.yaml", [_uses(other), "rollout.speculation.policy=off"]))


def test_a_drafter_folder_is_compared_with_a_model_folder(
    tiny_folder: Path, tiny_config: DecoderConfig, tmp_path: Path
) -> None:
    model = f"model={{kind: pretrained, path: {tiny_folder}}}"
    drafter = _drafter(tiny_config, tmp_path / "own-eagle3")
    preflight.check_run(load("conf/smoke.yaml", [model, _uses(drafter)]))
    (drafter / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"not a readable drafter folder .*must hold config\.json and model"):
        preflight.check_run(load("conf/smoke.yaml", [model, _uses(drafter)]))
    (drafter / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=r"config\.json lacks the key"):
        preflight.check_run(load("conf/smoke.yaml", [model, _uses(drafter)]))


def test_a_model_that_vllm_cannot_divide_is_refused_with_what_would_do() -> None:
    preflight.check_division(4, KNOWN["qwen2.5-32b"])
    preflight.check_division(8, KNOWN["qwen2.5-32b"])
    with pytest.raises(ModelError, match=r"tensor_parallel=2 .* 9 attention heads.*set it to one of \[1, 3\]"):
        preflight.check_division(2, KNOWN["smollm2-135m-instruct"])
    with pytest.raises(ModelError, match=r"tensor_parallel=8 .* 28 attention heads.*one of \[1, 2, 4\]"):
        preflight.check_division(8, KNOWN["qwen2.5-7b"])


def test_a_response_longer_than_the_context_is_refused_before_the_data_are_made(tiny_folder: Path) -> None:
    model = f"model={{kind: pretrained, path: {tiny_folder}}}"
    preflight.check_run(load("conf/smoke.yaml", [model, "rollout.max_new_tokens=511"]))
    with pytest.raises(ModelError, match=r"rollout\.max_new_tokens=600 exceeds the model's context of 512 positions"):
        preflight.check_run(load("conf/smoke.yaml", [model, "rollout.max_new_tokens=600"]))


def test_stop_tokens_that_the_model_does_not_have_are_refused(tiny_folder: Path) -> None:
    model = f"model={{kind: pretrained, path: {tiny_folder}}}"
    preflight.check_run(load("conf/smoke.yaml", [model, "rollout.stop_token_ids=[0, 63]"]))
    with pytest.raises(ModelError, match=r"stop_token_ids=\[-1, 64\]: the model has tokens 0 to 63"):
        preflight.check_run(load("conf/smoke.yaml", [model, "rollout.stop_token_ids=[-1, 63, 64]"]))


def test_no_drafter_is_promised_for_a_target_of_one_layer() -> None:
    """It has two streams to tap, and EAGLE-3's layout needs three."""
    one = ["model.num_layers=1", "drafter.warmup=true"]
    with pytest.raises(ModelError, match=r"taps three streams .* a target of 1 layer has two: .*drafter\.warmup"):
        preflight.check_run(load("conf/smoke.yaml", one))
    preflight.check_run(load("conf/smoke.yaml", [*one, "rollout.speculation.policy=off"]))
    preflight.check_run(load("conf/smoke.yaml", ["model.num_layers=1", "drafter.warmup=false"]))


@pytest.mark.parametrize("model", ["model.kind=random", "model={kind: pretrained}"])
def test_adapters_on_layers_that_the_decoder_does_not_have_are_refused(model: str) -> None:
    lora = [model, "update.lora.enabled=true"]
    with pytest.raises(ModelError, match=r"lora\.target_modules=\['q_proj', 'v_proj'\].* it has .*'qkv_proj'"):
        preflight.check_run(load("conf/smoke.yaml", [*lora, "update.lora.target_modules=[q_proj, o_proj, v_proj]"]))
    preflight.check_run(load("conf/smoke.yaml", [*lora, "update.lora.target_modules=[qkv_proj]"]))


@pytest.mark.parametrize(
    ("metric", "samples", "said"),
    [
        ("val-core/all/reward/mean@2", 2, "did you mean 'val-core/all/reward/mean_at_2'"),
        ("val-core/all/reward/mean_at_2", 0, r"mean_at_K and pass_at_K need evaluation\.num_samples=K"),
        ("critic/rewards/mean", 0, "choose one of val-core/all/reward/greedy, val-core/chain_sum/reward/greedy"),
    ],
)
def test_a_best_metric_that_validation_does_not_give_is_refused(metric: str, samples: int, said: str) -> None:
    num_samples = f"evaluation.num_samples={samples}"
    with pytest.raises(ConfigError, match=rf"checkpoint\.best_metric='{metric}' is no figure of this run's.*{said}"):
        preflight.check_run(load("conf/smoke.yaml", [num_samples, f"checkpoint.best_metric={metric}"]))
    for good in ("val-core/all/reward/pass_at_2", "val-core/chain_sum/reward/greedy"):
        preflight.check_best_metric(
            load("conf/smoke.yaml", ["evaluation.num_samples=2", f"checkpoint.best_metric={good}"])
        )


def test_a_folder_without_weights_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(tiny_folder / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"holds no \.safetensors"):
        preflight.count_parameters(tmp_path)
