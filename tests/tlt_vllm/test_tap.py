"""What is kept of a response, in vLLM's order of passes: prompts, rejected drafts, prefix cache, preemption.

A stand-in for the runner has what `Tap` reads of it.  The state of token n at position p is n + p / 1000, so each place
shows what was written there last.
"""

from types import SimpleNamespace

import numpy as np
import torch

from tlt_vllm.tap import Taken, Tap

MAX_LEN = 16


class Runner:
    max_model_len, max_num_reqs = MAX_LEN, 8

    def __init__(self) -> None:
        self.requests: dict[str, SimpleNamespace] = {}
        self.input_batch, self.query_start_loc = SimpleNamespace(), SimpleNamespace()

    def _get_positions(self, count: int) -> torch.Tensor:
        return self._positions[:count]

    def run(self, tap: Tap, work: dict[str, tuple[int, list[int]]], *, foreign: tuple[str, ...] = ()) -> None:
        """work: by request, the first position and the tokens from there on."""
        names = list(work)
        self.input_batch.req_ids = names
        self.input_batch.num_computed_tokens_cpu = np.array([begin for begin, _ in work.values()])
        counts = [len(tokens) for _, tokens in work.values()]
        self.query_start_loc.np = np.array([0, *np.cumsum(counts)])
        positions = [begin + i for begin, tokens in work.values() for i in range(len(tokens))]
        self._positions = torch.tensor(positions)
        tokens = torch.tensor([float(t) for _, given in work.values() for t in given])
        states = (tokens + self._positions / 1000)[:, None]
        rows = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(counts))
        tap.norms(rows, self._positions, -states[:, 0], foreign=[names.index(n) for n in foreign])
        tap.states(torch.cat([states, states], dim=1), states)


def begin(prompts: dict[str, list[int]], *, slots: int = 4) -> tuple[Runner, Tap]:
    runner = Runner()
    runner.requests = {name: SimpleNamespace(prompt_token_ids=prompt) for name, prompt in prompts.items()}
    tap = Tap(runner, capture_mb=0)
    tap._bytes = slots * MAX_LEN * (3 * 4 + 4)
    return runner, tap


def shown(tokens: list[int]) -> list[float]:
    return [round(t + p / 1000, 3) for p, t in enumerate(tokens)]


def kept(taken: Taken | None) -> list[float]:
    assert taken is not None
    return [round(float(x), 3) for x in taken.taps_LE[:, 0]]


def test_rejected_drafts_are_overwritten() -> None:
    """Tokens 8 and 9 are drafts; 9 is wrong, and 5 comes in its place."""
    runner, tap = begin({"a": [1, 2, 3]})
    runner.run(tap, {"a": (0, [1, 2, 3])})
    runner.run(tap, {"a": (3, [7, 8, 9])})
    runner.run(tap, {"a": (5, [5])})
    taken = tap.take("a", first=3, length=7)
    assert kept(taken) == shown([1, 2, 3, 7, 8, 5])
    assert taken is not None
    assert [round(float(x), 3) for x in taken.last_PD[:, 0]] == shown([1, 2, 3, 7, 8, 5])[2:]
    assert torch.equal(taken.lognorms_P, -taken.last_PD[:, 0])


def test_a_cached_prompt_comes_from_whoever_computed_it() -> None:
    """Also when that response has ended; not when its prompt is another one, and not when the policy has changed."""
    prompts = {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4], "c": [9, 2, 3, 4], "d": [1, 2, 3, 4]}
    runner, tap = begin(prompts)
    runner.run(tap, {"a": (0, [1, 2, 3, 4])})
    assert tap.take("a", first=4, length=5) is not None
    runner.run(tap, {"b": (3, [4]), "c": (3, [4])})
    assert kept(tap.take("b", first=4, length=5)) == shown([1, 2, 3, 4])
    assert tap.take("c", first=4, length=5) is None
    assert tap.dropped == 1
    tap.clear()
    runner.run(tap, {"d": (3, [4])})
    assert tap.take("d", first=4, length=5) is None


def test_a_prompt_that_another_request_computes_in_the_same_pass() -> None:
    """As for a group whose requests begin together; whatever their order in the batch."""
    prompt = [1, 2, 3, 4]
    for names in ("abc", "cba", "bac"):
        runner, tap = begin(dict.fromkeys("abc", prompt))
        work = {"a": (0, prompt), "b": (3, [4]), "c": (2, [3, 4])}
        runner.run(tap, {name: work[name] for name in names})
        for name in names:
            assert kept(tap.take(name, first=4, length=5)) == shown(prompt)


def test_a_preempted_request_is_computed_again() -> None:
    runner, tap = begin({"a": [1, 2]})
    runner.run(tap, {"a": (0, [1, 2])})
    runner.run(tap, {"a": (2, [7])})
    runner.run(tap, {"a": (0, [1, 2, 7])})
    runner.run(tap, {"a": (3, [8])})
    assert kept(tap.take("a", first=2, length=5)) == shown([1, 2, 7, 8])


def test_the_next_turn_of_an_episode_begins_with_what_the_turn_before_has_computed() -> None:
    runner, tap = begin({"a": [1, 2]})
    runner.run(tap, {"a": (0, [1, 2])})
    runner.run(tap, {"a": (2, [7])})
    assert kept(tap.take("a", first=2, length=4, sampled=[7, 8])) == shown([1, 2, 7])
    runner.requests["b"] = SimpleNamespace(prompt_token_ids=[1, 2, 7, 8, 5])
    runner.run(tap, {"b": (3, [8, 5])})
    assert kept(tap.take("b", first=5, length=6)) == shown([1, 2, 7, 8, 5])


def test_without_a_slot_a_response_is_dropped_and_counted() -> None:
    runner, tap = begin({"a": [1, 2], "b": [3, 4], "c": [5, 6]}, slots=1)
    runner.run(tap, {"a": (0, [1, 2]), "b": (0, [3, 4])})
    assert tap.take("b", first=2, length=3) is None
    assert kept(tap.take("a", first=2, length=3)) == shown([1, 2])
    runner.run(tap, {"c": (0, [5, 6])})
    assert kept(tap.take("c", first=2, length=3)) == shown([5, 6])
    assert tap.dropped == 1


def test_what_vllm_has_sampled_is_not_kept() -> None:
    """Its log-normalisers are unknown."""
    runner, tap = begin({"a": [1, 2], "b": [3, 4]})
    runner.run(tap, {"a": (0, [1, 2]), "b": (0, [3, 4])}, foreign=("b",))
    assert tap.take("a", first=2, length=3) is not None
    assert tap.take("b", first=2, length=3) is None
    runner.requests["c"] = SimpleNamespace(prompt_token_ids=[1, 2])
    runner.run(tap, {"c": (0, [1, 2])})
    tap._pending = None  # a pass without `norms`: the whole batch was vLLM's
    tap.states(torch.zeros(2, 2), torch.zeros(2, 1))
    assert tap.take("c", first=2, length=3) is None
