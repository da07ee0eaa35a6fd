"""What the servers are asked.  Each is started, asked everything at once, and stopped; tests compare what they told."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.counters import SpecCounters
from tests.vllm.vllm_server import Completion, VllmServer
from tlt_core.model.decoder import Decoder

MAX_TOKENS = 48
SAMPLES, SAMPLED_TOKENS = 600, 5
QUESTIONS = (
    *(f"What is {a} + {a + 5}?" for a in range(11, 23)),
    *(f"Write a list of five {things}." for things in ("animals", "colors", "cities", "fruits", "numbers", "verbs")),
    *(f"Spell the word {word} letter by letter." for word in ("house", "window", "garden", "river", "mountain", "sea")),
)
# Some entropy at every position, and enough repetition that an n-gram drafter has something to say.
REPEATING = "Monday: rain. Tuesday: sun. Wednesday: rain. Thursday: sun. Friday:"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


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


def ask(
    python: Path,
    target: Target,
    folder: Path,
    speculative: Mapping[str, Any] | None,
    *,
    seed: int,
    variables: Mapping[str, str] | None = None,
) -> Told:
    """Start a server, ask, stop it.

    seed: of the first sampled answer; vLLM gives the others the numbers after it, so seeds must be SAMPLES apart.
    """
    server = VllmServer(
        python, target.folder, log=folder / "vllm.log", speculative=speculative, variables=variables or {}
    )
    with server:
        greedy = server.complete(target.prompts, max_tokens=MAX_TOKENS)
        counted = server.spec_counters()
        sampled = server.complete(
            [target.repeating], max_tokens=SAMPLED_TOKENS, temperature=1.0, samples=SAMPLES, seed=seed
        )
        after = server.spec_counters()
    return Told(greedy, counted, sampled, after - counted, server.log())
