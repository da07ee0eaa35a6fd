"""What a policy or a drafter was made from: tags and card of its version in the registry.

    data set (data_digest) -> run (run_name, git_commit) -> checkpoint, policy_version -> policy_digest -> drafter

Values are strings of at most some hundred characters.
"""

from collections.abc import Mapping
from pathlib import Path

from conf.run import RunConfig
from tlt_core.export.record import tokenizer_digest, weights_digest
from tlt_core.items import checkpoint
from tlt_core.items.store import Ref
from tlt_core.machine import provenance
from tlt_core.machine.precision import Precision


def policy_tags(cfg: RunConfig, folder: Path, *, dataset: Ref) -> dict[str, str]:
    return {
        "kind": "policy",
        "run_name": cfg.name,
        "run_dir": str(cfg.run_dir.absolute()),
        "export": str(folder.absolute()),
        "git_commit": provenance.commit(),
        "precision": str(Precision.of(cfg)),
        "data_digest": dataset.sha256,
        "policy_digest": weights_digest(folder),
        "tokenizer_digest": tokenizer_digest(folder),
        **_made_by(cfg, folder),  # checkpoint and version; version 0 is the start model
    }


def newest_is_exported(cfg: RunConfig) -> bool:
    """Whether the run's `policy` folder exists and is as new as its newest checkpoint, if there is one."""
    exported = cfg.run_dir / "policy" / "config.json"
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        return exported.is_file() if found is None else _is_as_new(exported, found)


def _made_by(cfg: RunConfig, folder: Path) -> dict[str, str]:
    if folder != cfg.run_dir / "policy":
        return {"policy_version": "0"}
    with checkpoint.newest(cfg.run_dir / "checkpoints") as found:
        if found is not None and _is_as_new(folder / "config.json", found):
            return {"checkpoint": found.folder.name, "policy_version": str(found.state.policy_version)}
    return {"policy_version": "unknown"}


def _is_as_new(exported: Path, found: checkpoint.Found) -> bool:
    return exported.is_file() and exported.stat().st_mtime >= (found.folder / "COMPLETE").stat().st_mtime


def drafter_tags(cfg: RunConfig, policy: Path, *, dataset: Ref) -> dict[str, str]:
    """Tags of a drafter that was trained for the policy in this folder.  Raises ModelError."""
    return policy_tags(cfg, policy, dataset=dataset) | {"kind": "drafter", "policy": str(policy.absolute())}


def policy_card(cfg: RunConfig, tags: Mapping[str, str]) -> str:
    start = cfg.model.path if cfg.model.kind == "pretrained" else "random weights"
    text = (
        f"Reinforcement learning ({cfg.algorithm.advantage}) from {start}, on {_tasks(cfg)}; sampled at temperature "
        f"{cfg.rollout.temperature:g}, at most {cfg.rollout.max_new_tokens} tokens.  A Hugging Face folder of "
        "safetensors."
    )
    return _card(f"Policy of run {cfg.name}", text, tags)


def drafter_card(cfg: RunConfig, tags: Mapping[str, str]) -> str:
    text = (
        "One layer that guesses the next tokens of its target.  It fits only the policy with this policy_digest and "
        "tokenizer_digest.  The target checks every guess, so the drafter makes decoding faster and does not change "
        f"the text.  Trained on {cfg.drafter.num_prompts} x {cfg.drafter.num_samples} rollouts of {_tasks(cfg)}."
    )
    return _card(f"EAGLE-3 drafter of run {cfg.name}", text, tags)


def _card(title: str, text: str, tags: Mapping[str, str]) -> str:
    rows = (f"| {key} | {value} |" for key, value in sorted(tags.items()))
    return "\n".join([f"# {title}", "", text, "", "| | |", "|---|---|", *rows])


def _tasks(cfg: RunConfig) -> str:
    if cfg.data.kind == "file":
        return Path(cfg.data.train_path).name
    return ", ".join(dict.fromkeys(task.name for task in cfg.data.tasks))
