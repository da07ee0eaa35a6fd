"""Problems found before any expensive work."""

import dataclasses
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

LORA = "update.lora={enabled: true, target_modules: [q_proj, o_proj, v_proj]}"
METRIC, TWO_SAMPLES = "checkpoint.best_metric=val-core", "evaluation.num_samples=2"
TINY, EXACT = "model={kind: pretrained, path: TINY}", "reward.functions=[{kind: exact}]"


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (["model={kind: pretrained, path: CUT}"], ModelError, r"model\.safetensors is damaged"),
        (["model={kind: pretrained, path: NO_WEIGHTS}"], ModelError, r"holds no \.safetensors"),
        (["model={kind: pretrained, path: ./nowhere}"], ModelError, "does not exist"),
        (["reward.functions=[{kind: python, path: 'no_such_module:f'}]"], RewardError, "no_such_module"),
        (["output_dir=FILE"], FolderError, r"rows\.jsonl/smoke' .*set output_dir"),
        (["data={kind: file, train_path: FILE}", EXACT], DataError, r"rows\.jsonl, line 2: 'answer' is a list"),
        (["cluster.num_workers=4096"], TooManyWorkers, r"cluster\.num_workers"),
        ([TINY, "rollout.max_new_tokens=600"], ModelError, r"max_new_tokens=600 .* 512 positions"),
        ([TINY, "rollout.stop_token_ids=[-1, 63, 64]"], ModelError, r"stop_token_ids=\[-1, 64\]: .* 0 to 63"),
        (["model.num_layers=1", "drafter.warmup=true"], ModelError, r"a target of 1 layer has two: .*drafter\.warmup"),
        (["model.kind=random", LORA], ModelError, r"lora\.target_modules=\['q_proj', 'v_proj'\].* 'qkv_proj'"),
        (["model={kind: pretrained}", LORA], ModelError, r"lora\.target_modules=\['q_proj', 'v_proj'\]"),
        ([TWO_SAMPLES, f"{METRIC}/all/reward/mean@2"], ConfigError, "did you mean 'val-core/all/reward/mean_at_2'"),
        (
            ["evaluation.num_samples=0", f"{METRIC}/all/reward/mean_at_2"],
            ConfigError,
            r"best_metric.* need evaluation\.num_samples=K",
        ),
        (["checkpoint.best_metric=critic/rewards/mean"], ConfigError, "val-core/chain_sum/reward/greedy"),
    ],
)
def test_refused(tiny_folder: Path, tmp_path: Path, settings: list[str], error: type[Exception], said: str) -> None:
    cut, bare = shutil.copytree(tiny_folder, tmp_path / "cut"), tmp_path / "bare"
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    bare.mkdir()
    shutil.copyfile(tiny_folder / "config.json", bare / "config.json")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": 2}\n{"prompt": "1 + 2 =", "answer": [3]}\n')
    places = {"TINY": tiny_folder, "CUT": cut, "NO_WEIGHTS": bare, "FILE": tmp_path / "rows.jsonl"}
    for name, place in places.items():
        settings = [setting.replace(name, str(place)) for setting in settings]
    with pytest.raises(error, match=said):
        preflight.check_run(load("conf/smoke.yaml", settings))


@pytest.mark.parametrize(
    "settings",
    [
        [TINY, "rollout.max_new_tokens=511", "rollout.stop_token_ids=[0, 63]"],
        ["model.num_layers=1", "drafter.warmup=true", "rollout.speculation.policy=off"],
        ["model.num_layers=1", "drafter.warmup=false"],
        ["update.lora={enabled: true, target_modules: [qkv_proj]}"],
        [TWO_SAMPLES, f"{METRIC}/all/reward/pass_at_2"],
        [f"{METRIC}/chain_sum/reward/greedy"],
    ],
)
def test_allowed(tiny_folder: Path, settings: list[str]) -> None:
    preflight.check_run(load("conf/smoke.yaml", [setting.replace("TINY", str(tiny_folder)) for setting in settings]))


def test_checkpoints_and_saved_steps_need_space(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpaceError, match=r"needs about 1e\+09 GB.*set output_dir"):
        check_space(tmp_path / "run", needed_bytes=10**18)
    asked = []
    monkeypatch.setattr(preflight, "check_space", lambda folder, *, needed_bytes: asked.append(needed_bytes))
    overrides = [
        f"output_dir={tmp_path}",
        "num_steps=100",
        "rollout.num_prompts=2",
        "rollout.num_samples=4",
        "rollout.max_prompt_tokens=64",
        "rollout.max_new_tokens=36",
        "checkpoint={keep_last: 3, keep_best: 0, every_steps: 5, keep_step_files: 4}",
    ]
    preflight.check_model(load("conf/smoke.yaml", overrides), tiny_folder)
    preflight.check_model(load("conf/smoke.yaml", [*overrides, "num_steps=7"]), tiny_folder)
    # embedding 64*32 (tied); per layer: q 32*32, k and v 16*32, o 32*32, gate, up and down 48*32, two norms of 32
    count = 64 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32
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


def _uses(target: DecoderConfig, folder: Path) -> str:
    """The setting of a random drafter for this target."""
    save_eagle3(random_eagle3(Eagle3Config.for_target(target, 8), torch.arange(8), seed=0), folder, dtype=torch.float32)
    return f"rollout.speculation.drafter_path={folder}"


def test_the_drafter_of_another_model_is_refused(tmp_path: Path, tiny_folder: Path, tiny_config: DecoderConfig) -> None:
    """First of the random model, which is not there yet."""
    target = shape_of(load("conf/smoke.yaml").model)
    assert target is not None
    preflight.check_run(load("conf/smoke.yaml", [_uses(target, tmp_path / "own-eagle3")]))
    other = _uses(dataclasses.replace(target, vocab_size=32_000), tmp_path / "other-eagle3")
    said = r"drafter_path='.*other-eagle3'.*vocab_size is 32000, but the target's is 49152.*leave .*drafter_path out"
    with pytest.raises(ModelError, match=said):
        preflight.check_run(load("conf/smoke.yaml", [other]))
    preflight.check_run(load("conf/smoke.yaml", [other, "rollout.speculation.policy=off"]))
    settings = [TINY.replace("TINY", str(tiny_folder)), _uses(tiny_config, tmp_path / "tiny-eagle3")]
    preflight.check_run(load("conf/smoke.yaml", settings))
    (tmp_path / "tiny-eagle3" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="not a readable drafter folder"):
        preflight.check_run(load("conf/smoke.yaml", settings))


def test_a_model_that_vllm_cannot_divide_is_refused_with_what_would_do() -> None:
    preflight.check_division(8, KNOWN["qwen2.5-32b"])
    with pytest.raises(ModelError, match=r"tensor_parallel=2 .* 9 attention heads.*set it to one of \[1, 3\]"):
        preflight.check_division(2, KNOWN["smollm2-135m-instruct"])
    with pytest.raises(ModelError, match=r"tensor_parallel=8 .* 28 attention heads.*one of \[1, 2, 4\]"):
        preflight.check_division(8, KNOWN["qwen2.5-7b"])
