"""Real vLLM servers, one after the other: plain, with a drafter that our code exported, with vLLM's n-gram drafter."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from conf.rollout import SpeculationConfig
from tests.decoders import TINY, lively
from tests.vllm.builtin_engine import DEPTH, decode
from tests.vllm.servers import MAX_TOKENS, NGRAM, QUESTIONS, REPEATING, Target, Told, ask
from tlt_core.data.chat import encode_prompt
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Model, choose_draft_vocabulary, eagle3_from_target, tap_scales
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.items.types import Rollout
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_decoder, load_tokenizer, save_hf
from tlt_core.rollout.vllm import environment as vllm_environment

TRAIN_STEPS = 60


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter of vLLM's environment."""
    path = vllm_environment.vllm_python()
    if not path.is_file():
        pytest.skip(f"{path} does not exist: run 'make test-vllm', which builds vLLM's environment")
    return path


@pytest.fixture(scope="session")
def target(embedded_model: Path) -> Target:
    """SmolLM2-135M-Instruct."""
    tokenizer = load_tokenizer(embedded_model)
    prompts = [encode_prompt(tokenizer, question, system_prompt=None) for question in QUESTIONS]
    decoder = load_decoder(embedded_model, dtype=torch.float32)
    return Target(embedded_model, decoder, prompts, tokenizer.encode(REPEATING))


@pytest.fixture(scope="session")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter trained for a minute on the very answers, so that most chains are accepted in part; exported."""
    asked = [*target.prompts, target.repeating]
    answers = decode(target.folder, asked, SpeculationConfig(policy="off"), max_tokens=MAX_TOKENS)
    counts_V = torch.cat([r.completion for r in answers.rollouts]).long().bincount(minlength=49152)
    ids_J = choose_draft_vocabulary(counts_V, 2048, always=(2,))
    model = trained_drafter(target.decoder, answers.rollouts, ids_J)
    folder = tmp_path_factory.mktemp("export") / "drafter-eagle3"
    save_eagle3(model, folder, dtype=torch.float32)
    return folder


def trained_drafter(decoder: Decoder, answers: Sequence[Rollout], ids_J: Tensor) -> Eagle3Model:
    probe = eagle3_from_target(decoder, ids_J, scales=(1.0, 1.0, 1.0), seed=0)
    firsts = [r.prompt_len for r in answers]
    sequences = observe(decoder, [r.tokens for r in answers], probe, firsts=firsts, dtype=torch.float32)
    scales = tap_scales(torch.cat([s.taps_LE for s in sequences]))
    model = eagle3_from_target(decoder, ids_J, scales=scales, seed=0)
    settings = TrainSettings(learning_rate=1e-3, total_steps=TRAIN_STEPS, depth=DEPTH)
    trainer = Eagle3Trainer(model, decoder, settings)
    for step in range(TRAIN_STEPS):
        trainer.step([sequences[(6 * step + i) % len(sequences)] for i in range(6)])
    return model


class Small(NamedTuple):
    """Random models of six layers, as folders, and their prompts."""

    policy: Path
    other: Path  # another policy
    drafter: Path  # trained on the policy's answers
    useless: Path  # a random drafter
    prompts: list[list[int]]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """For engines of which many are started."""
    root = tmp_path_factory.mktemp("small")
    made = Small(
        *(root / n for n in ("policy", "other", "drafter", "useless")), [[1, 5 + i, 9, 30 - i] for i in range(6)]
    )
    config = replace(
        TINY,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=6,
        head_dim=32,  # vLLM's attention has no smaller ones
        tie_word_embeddings=False,
    )
    for seed, folder in enumerate((made.policy, made.other)):
        weights = list(lively(config, seed=seed).named_parameters())
        save_hf(weights, config, folder, tokenizer_from=folder, dtype=torch.float32)
    decoder, ids_J = load_decoder(made.policy, dtype=torch.float32), torch.arange(512)
    useless = eagle3_from_target(decoder, ids_J, scales=(1.0, 1.0, 1.0), seed=0)
    save_eagle3(useless, made.useless, dtype=torch.float32)
    answers = decode(made.policy, made.prompts, SpeculationConfig(policy="off"), max_tokens=MAX_TOKENS)
    save_eagle3(trained_drafter(decoder, answers.rollouts, ids_J), made.drafter, dtype=torch.float32)
    return made


@pytest.fixture(scope="session")
def plain(vllm_python: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Without speculation."""
    return ask(vllm_python, target, tmp_path_factory.mktemp("plain"), None, seed=10000)


@pytest.fixture(scope="session")
def with_eagle3(vllm_python: Path, target: Target, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Chains of our drafter."""
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DEPTH}
    return ask(vllm_python, target, tmp_path_factory.mktemp("eagle3"), config, seed=20000)


@pytest.fixture(scope="session")
def with_ngram(vllm_python: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """vLLM's own look-up in the prompt."""
    return ask(vllm_python, target, tmp_path_factory.mktemp("ngram"), NGRAM, seed=30000)
