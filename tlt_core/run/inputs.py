"""The folders that a run starts from: the start model and the data set.

Folders lie under $TLT_HOME (default ./artifacts); data sets and cold starts lie under $TLT_STAGES if it is set.  Each
is named by everything that decides its content: runs share them, and a changed setting never reads a stale one.
"""

import hashlib
import json
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conf.model import ModelConfig, PretrainedModel, RandomModel
from conf.run import RunConfig
from tlt_core.machine.file_lock import exclusive
from tlt_core.model.embedded import embedded_model_dir
from tlt_core.model.load import load_config, random_decoder, resolve, save_hf


def artifacts_dir() -> Path:
    """Where models, data sets and cold starts are kept between runs."""
    return Path(os.environ.get("TLT_HOME", "artifacts"))


def made_dir() -> Path:
    """Where data sets and cold starts are made: $TLT_STAGES, which dvc.yaml sets and tracks, or `artifacts_dir`."""
    return Path(os.environ["TLT_STAGES"]) if "TLT_STAGES" in os.environ else artifacts_dir()


def making(folder: Path) -> AbstractContextManager[None]:
    """For the one process that makes this folder; others wait.  The lock is outside of what DVC tracks."""
    return exclusive(folder.parent.with_name(f".{folder.parent.name}-{folder.name}.lock"), wait=True)


def data_dir(cfg: RunConfig) -> Path:
    """Folder of the run's data set.  It depends on the model, whose tokenizer decides which prompts are too long."""
    decides = cfg.model_dump(mode="json", include={"data", "model"})
    return made_dir() / "data" / short_digest({**decides, "max_prompt_tokens": cfg.rollout.max_prompt_tokens})


def start_model(cfg: ModelConfig, *, seed: int) -> Path:
    """Hugging Face folder of the weights that training starts from; made if it is missing.  Raises ModelError."""
    if isinstance(cfg, PretrainedModel):
        return resolve(cfg.path)
    name = short_digest({**cfg.model_dump(mode="json"), "seed": seed})
    folder = artifacts_dir() / "models" / f"random-{name}"
    if not (folder / "config.json").is_file():  # the folder appears whole or not at all
        with making(folder):
            if not (folder / "config.json").is_file():
                _write_random(cfg, folder, seed=seed)
    return folder


def _write_random(cfg: RandomModel, folder: Path, *, seed: int) -> None:
    """The embedded model's tokenizer and vocabulary on a small random body."""
    embedded = embedded_model_dir()
    config = replace(
        load_config(embedded),
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_layers=cfg.num_layers,
        num_heads=cfg.num_heads,
        num_kv_heads=cfg.num_kv_heads,
        head_dim=cfg.hidden_size // cfg.num_heads,
    )
    decoder = random_decoder(config, seed=seed, dtype=torch.float32)
    save_hf(decoder.named_parameters(), config, folder, tokenizer_from=embedded, dtype=torch.float32)


def short_digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
