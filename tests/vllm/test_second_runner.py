"""vLLM's second model runner (V2), the default on GPUs, with draft lengths by the plug-in and weights that come later.

Its kernels run in Triton's interpreter: what a GPU computes with them is not tested."""

import pytest

from tests.vllm.scripted import LENGTHS, told

pytestmark = pytest.mark.vllm


def weights(folder):
    return str(folder / "model.safetensors")


@pytest.fixture(scope="module")
def loads(small):
    drafters = [["tlt_load_drafter", weights(folder)] for folder in (small.useless, small.drafter)]
    policies = [["tlt_load_policy", weights(folder)] for folder in (small.other, small.policy)]
    return [None, *drafters, *policies]


@pytest.fixture(scope="module")
def first_runner(vllm_python, small, loads):
    return told(vllm_python, small, drafter=str(small.drafter), exact=False, lengths=LENGTHS, loads=loads)


@pytest.fixture(scope="module")
def without_drafts(vllm_python, small):
    """By policy."""
    runs = {folder: told(vllm_python, small, model=str(folder), exact=False) for folder in (small.policy, small.other)}
    return {folder: run["passes"][0]["tokens"] for folder, run in runs.items()}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_drafts_what_the_first_runner_drafts(vllm_python, small, loads, first_runner, without_drafts, asynchronous):
    drafter = str(small.drafter)
    options = {"exact": False, "lengths": LENGTHS, "loads": loads, "asynchronous": asynchronous}
    found = told(vllm_python, small, drafter=drafter, second_runner=True, **options)
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert first_runner["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert found["scheduler"] == ("AsyncAdaptiveScheduler" if asynchronous else "AdaptiveScheduler")
    policies = [small.policy] * 3 + [small.other, small.policy]
    for ours, theirs, policy in zip(found["passes"], first_runner["passes"], policies, strict=True):
        assert ours["tokens"] == without_drafts[policy]
        assert ours["rounds"] == theirs["rounds"], "the same drafts are accepted, round by round"
        assert ours["counted"] == [sum(r[2] for r in ours["rounds"]), sum(r[3] for r in ours["rounds"])]
        for (length, *_), (_, drafted, _) in zip(ours["steps"], ours["steps"][1:], strict=False):
            assert set(drafted) <= ({length} if length else set()), "as many as were chosen in the step before"
    first, useless, again, _, back = (ours["counted"] for ours in found["passes"])
    assert first == again == back, "weights that come back draft as before"
    assert first[1] > 0.2 * first[0]
    assert useless[1] < 0.05 * useless[0]
    assert len({length for length, *_ in found["passes"][0]["rounds"]}) == 4


def test_the_tuner_chooses(vllm_python, small, without_drafts):
    found = told(vllm_python, small, drafter=str(small.drafter), exact=False, second_runner=True)["passes"][0]
    assert found["tokens"] == without_drafts[small.policy]
    assert len({length for length, *_ in found["rounds"]}) > 1
    assert found["counted"] == [sum(r[2] for r in found["rounds"]), sum(r[3] for r in found["rounds"])]


def test_exact_sampling_is_the_first_runners(vllm_python, small):
    """At temperatures above 0, too, and beside requests that vLLM samples, since our definition lacks penalties."""
    mixed = {"temperatures": [0.0, 0.7, 1.0, 0.0, 1.0, 0.7], "repetition": [9.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
    drafts = {"drafter": str(small.drafter), "lengths": LENGTHS}
    plain, first = (told(vllm_python, small, **mixed, **more)["passes"][0] for more in ({}, drafts))
    for more in ({}, drafts, {"asynchronous": True, **drafts}):
        second = told(vllm_python, small, second_runner=True, **mixed, **more)["passes"][0]
        assert second["tokens"] == first["tokens"] == plain["tokens"]
        if more:
            assert second["rounds"] == first["rounds"], "the same drafts are accepted, round by round"
            assert second["counted"][1] > 0
    free = told(vllm_python, small, temperatures=mixed["temperatures"])["passes"][0]
    assert [a == b for a, b in zip(free["tokens"], plain["tokens"], strict=True)] == [False] + [True] * 5
