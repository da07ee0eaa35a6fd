"""Real vLLM servers, one after the other: plain, with a drafter that our code exported, with vLLM's n-gram drafter.

Each server is asked everything at once and stopped; tests compare what they told.  `make test-vllm` sets VLLM_PYTHON.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from conf.schema import SpeculationConfig
from tests.vllm.own_engine import DEPTH, decode
from tlt_core.data import encode_prompt
from tlt_core.drafter.eagle3_files import save_eagle3
from tlt_core.drafter.eagle3_model import choose_draft_vocabulary, eagle3_from_target, tap_scales
from tlt_core.drafter.eagle3_sequence import observe
from tlt_core.drafter.eagle3_train import Eagle3Trainer, TrainSettings
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import load_decoder, load_tokenizer
from tlt_core.serving.vllm_server import Completion, SpecCounters, VllmServer

MAX_TOKENS = 48
SAMPLES, SAMPLED_TOKENS = 600, 5
QUESTIONS = (
    *(f"What is {a} + {a + 5}?" for a in range(11, 23)),
    *(f"Write a list of five {things}." for things in ("animals", "colors", "cities", "fruits", "numbers", "verbs")),
    *(f"Spell the word {word} letter by letter." for word in ("house", "window", "garden", "river", "mountain", "sea")),
)
REPEATING = "one two three four one two three four one two"  # so that an n-gram drafter has something to say
TRAIN_STEPS = 60


class Told(NamedTuple):
    """What a server answered."""

    greedy: list[Completion]  # to QUESTIONS
    counters: SpecCounters  # of the greedy answers alone
    sampled: list[Completion]  # SAMPLES answers to REPEATING at temperature 1
    sampled_counters: SpecCounters
    log: str


class Target(NamedTuple):
    """The policy and what is asked."""

    folder: Path
    decoder: Decoder  # float32
    prompts: list[list[int]]
    repeating: list[int]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter of vLLM's environment."""
    path = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
    if not path.is_file():
        pytest.skip(f"{path} does not exist: run 'make test-vllm', which builds vLLM's environment")
    return path


@pytest.fixture(scope="session")
def target(embedded_model: Path) -> Target:
    """SmolLM2-135M-Instruct."""
    tokenizer = load_tokenizer(embedded_model)
    prompts = [encode_prompt(tokenizer, question, system_prompt="") for question in QUESTIONS]
    decoder = load_decoder(embedded_model, dtype=torch.float32)
    return Target(embedded_model, decoder, prompts, tokenizer.encode(REPEATING))


@pytest.fixture(scope="session")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter trained for a minute on the very answers, so that most chains are accepted in part; exported."""
    answers = decode(target.folder, target.prompts, SpeculationConfig(policy="off"), max_tokens=MAX_TOKENS)
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
    trainer = Eagle3Trainer(model, target.decoder.embed_tokens.weight, settings)
    for step in range(TRAIN_STEPS):
        trainer.step([sequences[(6 * step + i) % len(sequences)] for i in range(6)])
    folder = tmp_path_factory.mktemp("export") / "drafter-eagle3"
    save_eagle3(model, folder, dtype=torch.float32)
    return folder


@pytest.fixture(scope="session")
def plain(vllm_python: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Without speculation."""
    return ask(vllm_python, target, tmp_path_factory.mktemp("plain"), None)


@pytest.fixture(scope="session")
def with_eagle3(vllm_python: Path, target: Target, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Chains of our drafter."""
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DEPTH}
    return ask(vllm_python, target, tmp_path_factory.mktemp("eagle3"), config)


@pytest.fixture(scope="session")
def with_ngram(vllm_python: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """vLLM's own look-up in the prompt."""
    return ask(vllm_python, target, tmp_path_factory.mktemp("ngram"), NGRAM)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def ask(
    python: Path,
    target: Target,
    folder: Path,
    speculative: Mapping[str, Any] | None,
    variables: Mapping[str, str] | None = None,
) -> Told:
    """Start a server, ask, stop it."""
    server = VllmServer(
        python, target.folder, log=folder / "vllm.log", speculative=speculative, variables=variables or {}
    )
    with server:
        greedy = server.complete(target.prompts, max_tokens=MAX_TOKENS)
        counted = server.spec_counters()
        sampled = server.complete(
            [target.repeating], max_tokens=SAMPLED_TOKENS, temperature=1.0, samples=SAMPLES, seed=7
        )
        after = server.spec_counters()
    return Told(greedy, counted, sampled, after - counted, server.log())
