"""A tiny policy with a tokenizer, a drafter for it that guesses well, and their export, made once."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.export import folder
from tlt_core.export.record import Source
from tlt_core.model.load import load_decoder, load_tokenizer, random_decoder, save_hf

WORDS = ["<s>", "[UNK]", "</s>", *(f"w{i}" for i in range(3, 64))]


def write_tokenizer(out_dir: Path, words: list[str] = WORDS) -> None:
    """One token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")
    fast.save_pretrained(out_dir)


def write_policy(out_dir: Path, config, *, words: list[str] = WORDS, seed: int = 0) -> Path:
    """A random decoder as a Hugging Face folder."""
    decoder = random_decoder(config, seed=seed, dtype=torch.float32)
    tokenizer = out_dir.with_name(f"{out_dir.name}-tokenizer")
    write_tokenizer(tokenizer, words)
    save_hf(decoder.named_parameters(), config, out_dir, tokenizer_from=tokenizer, dtype=torch.float32)
    return out_dir


class Tiny(NamedTuple):
    cfg: RunConfig
    source: Source


@pytest.fixture(scope="session")
def tiny(tiny_config, tmp_path_factory) -> Tiny:
    """A random tied decoder repeats itself, and so does a drafter that starts as its last layer."""
    root = tmp_path_factory.mktemp("tiny-run")
    policy = write_policy(root / "policy", tiny_config)
    rows = [{"prompt": " ".join(WORDS[3 + (i * 7 + j) % 60] for j in range(5)), "answer": "w3"} for i in range(24)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = RunConfig.model_validate(
        {
            "name": "tiny",
            "output_dir": str(root / "runs"),
            "data": {"kind": "file", "train_path": str(root / "rows.jsonl"), "validation_fraction": 0.4},
            "reward": {"functions": [{"kind": "exact"}]},
            "rollout": {"max_new_tokens": 12, "max_live_requests": 3, "dtype": "float32"},
            "drafter": {"depth": 2},
            "cluster": {"num_workers": 1},
        }
    )
    tokenizer, out_dir = load_tokenizer(policy), root / "data"
    dataset.prepare(cfg.data, tokenizer=tokenizer, vocab_size=64, max_prompt_tokens=64, out_dir=out_dir)
    decoder = load_decoder(policy, dtype=torch.float32)
    drafter = eagle3_from_target(decoder, torch.arange(2, 60), scales=(1.0, 1.0, 1.0), seed=1)
    save_eagle3(drafter, root / "drafter", dtype=torch.float32)
    return Tiny(cfg, Source(policy, root / "drafter", root / "data", 7))


@pytest.fixture(scope="session")
def exported(tiny, tmp_path_factory) -> Path:
    """A sound export; read only."""
    return folder.run(tiny.cfg, tiny.source, out_dir=tmp_path_factory.mktemp("exports") / "tiny", num_prompts=6)


@pytest.fixture
def export(exported, tmp_path) -> Path:
    """A copy of it, to be broken."""
    return Path(shutil.copytree(exported, tmp_path / "export"))
