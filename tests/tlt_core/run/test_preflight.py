"""Problems found before any expensive work."""

import shutil
from pathlib import Path

import pytest

from conf.load import load
from tests.tasks.scored_batches import scored_batch
from tlt_core.grpo.reward import RewardError
from tlt_core.items import store
from tlt_core.machine.disk import SpaceError, check_space
from tlt_core.model.config import ModelError
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


def test_a_folder_without_weights_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(tiny_folder / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"holds no \.safetensors"):
        preflight.count_parameters(tmp_path)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all"])
def test_a_missing_folder_is_named(path: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        preflight.check_run(load("conf/smoke.yaml", [f"model={{kind: pretrained, path: {path}}}"]))


def test_a_hub_name_is_left_to_the_download() -> None:
    preflight.check_run(load("conf/smoke.yaml", ["model={kind: pretrained, path: owner/name-1.5B}"]))


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
    step_bytes = 8 * (100 * 16 + 256) + 4096
    # the first step's, the newest four, and five until the next checkpoint
    assert asked == [model_bytes + 10 * step_bytes, model_bytes + 7 * step_bytes]


def test_a_step_takes_no_more_than_is_planned(tmp_path: Path) -> None:
    """Four responses to prompts of two tokens, up to 40 tokens long."""
    batch = scored_batch()
    longest = batch.rollouts.take([3, 3, 3, 3])
    store.save_rollouts(longest, tmp_path / "rollouts.safetensors")
    store.save_scored(batch.take([3, 3, 3, 3]), tmp_path / "scored.safetensors")
    taken = sum(path.stat().st_size for path in tmp_path.iterdir())
    settings = ["rollout.num_prompts=2", "rollout.num_samples=2", "rollout.max_prompt_tokens=2"]
    planned = step_files.needed_bytes(load("conf/smoke.yaml", [*settings, "rollout.max_new_tokens=40", "num_steps=1"]))
    assert taken <= planned <= 2 * taken
