"""`vllm serve` with the plug-in alone: no worker, no flow of ours.

A request with a seed gets the same tokens from a plain server and from one that speculates adaptively.  New weights of
the drafter arrive over HTTP, and the log says what is drafted.
"""

import json
import re
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from tests.vllm.counters import SpecCounters
from tests.vllm.vllm_server import Completion, ServerError, VllmServer

pytestmark = pytest.mark.vllm

TOKENS = 32


class Answers(NamedTuple):
    """What one server said."""

    sampled: list[Completion]
    filtered: list[Completion]
    penalised: list[Completion]
    counters: SpecCounters
    log: str
    page: str


def with_tlt(**settings: Any) -> tuple[str, ...]:
    worker = json.dumps({"tlt": {"log_every_s": 0.5} | settings})
    return ("--enforce-eager", "--additional-config", worker)


def ask(server: VllmServer, target) -> Answers:
    prompts = target.prompts[:4]

    def said(**more: Any) -> list[Completion]:
        return server.complete(prompts, max_tokens=TOKENS, seed=7, **more)

    return Answers(
        said(temperature=1.0),
        said(temperature=0.7, top_p=0.9),
        said(temperature=0.0, presence_penalty=0.5),
        server.spec_counters(),
        server.log(),
        server._call("/metrics"),
    )


@pytest.fixture(scope="module")
def plain(vllm_python, target, tmp_path_factory) -> Answers:
    log = tmp_path_factory.mktemp("plain") / "vllm.log"
    with VllmServer(vllm_python, target.folder, log=log, options=with_tlt()) as server:
        return ask(server, target)


class Wrong(NamedTuple):
    """What a server said to it, and what it sampled afterwards."""

    said: list[str]
    sampled: list[Completion]


def ask_wrongly(server: VllmServer, target, drafter, folder) -> Wrong:
    """A stream that is no number; drafters with a matrix of another shape, with a tensor too many, without a file."""
    weights = load_file(drafter / "model.safetensors")
    query = next(name for name in weights if "q_proj" in name)
    save_file(weights | {query: weights[query][:-8].clone()}, folder / "shape.safetensors")
    save_file(weights | {"unknown.weight": weights[query].clone()}, folder / "name.safetensors")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": "?", "prompt": "a", "vllm_xargs": {"tlt_stream": "abc"}}),
        *(
            ("/collective_rpc", {"method": "tlt_load_drafter", "args": [str(folder / file)]})
            for file in ("shape.safetensors", "name.safetensors", "missing")
        ),
    ]
    calls[0][1]["model"] = json.loads(server._call("/v1/models"))["data"][0]["id"]
    said = []
    for path, call in calls:
        with pytest.raises(ServerError) as error:
            server._call(path, call)
        said.append(str(error.value))
    return Wrong(said, server.complete(target.prompts[:4], max_tokens=TOKENS, seed=7, temperature=1.0))


@pytest.fixture(scope="module")
def speculating(vllm_python, target, drafter, tmp_path_factory) -> tuple[Answers, Any, Wrong]:
    """... and what the server said to new weights of the drafter, and to what is wrong."""
    folder = tmp_path_factory.mktemp("speculating")
    log = folder / "vllm.log"
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 5}
    server = VllmServer(
        vllm_python,
        target.folder,
        log=log,
        speculative=speculative,
        options=with_tlt(draft_lengths=[2, 5]),
        variables={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with server:
        answers = ask(server, target)
        wrong = ask_wrongly(server, target, drafter, folder)
        call = {"method": "tlt_load_drafter", "args": [str(drafter)]}
        loaded = json.loads(server._call("/collective_rpc", call))
    return answers, loaded, wrong


def test_seeded_requests_get_the_same_tokens_with_and_without_drafts(plain, speculating):
    found, *_ = speculating
    assert [c.tokens for c in found.sampled] == [c.tokens for c in plain.sampled]
    assert [c.tokens for c in found.filtered] == [c.tokens for c in plain.filtered]
    assert len({c.tokens for c in plain.sampled}) > 1
    assert found.counters.accepted > 0


def test_requests_that_the_definition_lacks_are_sampled_by_vllm(plain, speculating):
    found, *_ = speculating
    assert all(len(c.tokens) == TOKENS for c in found.penalised + plain.penalised)


def test_the_page_of_metrics_says_what_is_drafted(speculating):
    """vLLM also counts what is verified in steps that read prompts; ours are left out."""
    found, *_ = speculating

    def total(name: str) -> float:
        values = re.findall(rf'^{name}_total{{engine="0",k="(?:ngram )?\d+"}} (\S+)$', found.page, re.MULTILINE)
        return sum(map(float, values))

    lengths = set(re.findall(r'tlt_rounds_total{engine="0",k="([\w ]+)"}', found.page))
    assert lengths == {"0", "2", "5", "ngram 5"}
    assert 0.5 * found.counters.draft_tokens < total("tlt_draft_tokens") <= found.counters.draft_tokens
    assert 0.5 * found.counters.accepted < total("tlt_accepted_tokens") <= found.counters.accepted
    assert total("tlt_round_seconds") > 0
    assert 'tlt_tuner_failed{engine="0"} 0.0' in found.page


def test_new_drafter_weights_come_over_http(speculating):
    """Every layer is asked whether it computes with them."""
    (report,) = speculating[1]["results"]
    assert report["tensors"] > 5
    assert report["checked"] >= 4, "query-key-value, output, gate-up, down"


def test_what_is_wrong_is_refused_and_the_server_goes_on(speculating):
    found, _, wrong = speculating
    stream, shape, name, missing = wrong.said
    assert "(400)" in stream
    assert "tlt_stream='abc'" in stream
    assert "q_proj" in shape
    assert "another model's file?" in shape
    assert "unknown" in name
    assert "neither a safetensors file nor a folder" in missing
    assert [c.tokens for c in wrong.sampled] == [c.tokens for c in found.sampled]


def test_the_other_runner_is_refused(vllm_python, target, tmp_path):
    """For hidden states, which it would not keep."""
    server = VllmServer(
        vllm_python,
        target.folder,
        log=tmp_path / "vllm.log",
        options=with_tlt(capture_mb=8),
        variables={"VLLM_USE_V2_MODEL_RUNNER": "1"},
    )
    with pytest.raises(ServerError, match=r"capture_mb=8\) is written.*unset VLLM_USE_V2_MODEL_RUNNER"), server:
        pass


def test_a_wrong_setting_ends_the_start_with_its_name(vllm_python, target, tmp_path):
    options = with_tlt(lengths=[2])
    with (
        pytest.raises(ServerError, match=r"tlt\.lengths is not known: choose from draft_lengths, policy"),
        VllmServer(vllm_python, target.folder, log=tmp_path / "vllm.log", options=options),
    ):
        pass
