"""Real vLLM servers, one after the other: plain, with a drafter that our code exported, with vLLM's n-gram drafter."""

from pathlib import Path

import pytest
import torch

from conf.rollout import SpeculationConfig
from tests.vllm.builtin_engine import DEPTH, decode
from tests.vllm.servers import MAX_TOKENS, NGRAM, QUESTIONS, REPEATING, Target, Told, ask
from tlt_core.data.chat import encode_prompt
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import choose_draft_vocabulary, eagle3_from_target, tap_scales
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.model.load import load_decoder, load_tokenizer
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
    probe = eagle3_from_target(target.decoder, ids_J, scales=(1.0, 1.0, 1.0), seed=0)
    sequences = observe(
        target.decoder,
        [r.tokens for r in answers.rollouts],
        probe,
        firsts=[r.prompt_len for r in answers.rollouts],
        dtype=torch.float32,
    )
    scales = tap_scales(torch.cat([s.taps_LE for s in sequences]))
    model = eagle3_from_target(target.decoder, ids_J, scales=scales, seed=0)
    settings = TrainSettings(learning_rate=1e-3, total_steps=TRAIN_STEPS, depth=DEPTH)
    trainer = Eagle3Trainer(model, target.decoder, settings)
    for step in range(TRAIN_STEPS):
        trainer.step([sequences[(6 * step + i) % len(sequences)] for i in range(6)])
    folder = tmp_path_factory.mktemp("export") / "drafter-eagle3"
    save_eagle3(model, folder, dtype=torch.float32)
    return folder


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
