"""Which requests the plug-in samples, and with which noise; the requests are those of vLLM as far as it reads them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_vllm.rows import Row, Rows, of_child, require_stream

NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), 0.0),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs", "seed", "extra_args")),
    **{"repetition_penalty": 1.0, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
}


def wants(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**NEUTRAL | given)


def request(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(sampling_params=wants(**given))


def streams(rows: Rows, requests: dict[str, SimpleNamespace]) -> list[int]:
    found = [rows.of(requests, name) for name in requests]
    assert all(isinstance(row, Row) for row in found)
    return [row.stream for row in found if row is not None]


def test_requests_without_a_seed_repeat_with_the_engine_s_seed_and_differ_with_another() -> None:
    def of_engine(seed: int, replica: int, names: str) -> list[int]:
        return streams(Rows(seed=seed, replica=replica), {name: request() for name in names})

    first = of_engine(1, 0, "abc")
    assert len(set(first)) == 3
    assert of_engine(1, 0, "xyz") == first, "vLLM draws a part of a request's name at random"
    assert not set(first) & {*of_engine(2, 0, "abc"), *of_engine(1, 1, "abc")}


def test_a_seed_and_a_stream_are_the_request_s_own() -> None:
    rows = Rows(seed=0, replica=0)
    found = streams(rows, {"a": request(seed=7), "b": request(seed=7), "c": request(extra_args={"tlt_stream": -3})})
    assert found[0] == found[1] != found[2] == -3
    assert streams(Rows(seed=9, replica=3), {"z": request(seed=7)}) == found[:1]


@pytest.mark.parametrize("wrong", ["5", 1 << 63, 0.5, True])
def test_a_stream_that_is_no_integer_is_refused_before_the_engine_sees_it(wrong: object) -> None:
    with pytest.raises(ValueError, match="give an integer of 64 bits"):
        require_stream(wants(extra_args={"tlt_stream": wrong}))


@pytest.mark.parametrize("stream", [5, 0, -1, (1 << 63) - 1, -(1 << 63)])
def test_children_of_a_stream_have_their_own(stream: int) -> None:
    parent = wants(extra_args={"tlt_stream": stream, "other": "kept"})
    children = [of_child(parent, index) for index in range(4)]
    assert children[0] is parent
    found = streams(
        Rows(seed=0, replica=0), {str(i): SimpleNamespace(sampling_params=c) for i, c in enumerate(children)}
    )
    assert len(set(found)) == 4
    assert parent.extra_args == {"tlt_stream": stream, "other": "kept"}
    assert children[3].extra_args["other"] == "kept"
    unnamed = wants(seed=3)
    assert of_child(unnamed, 2) is unnamed


def test_what_is_beyond_our_definition_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows(seed=0, replica=0)
    requests = {"a": request(repetition_penalty=1.1), "b": request(repetition_penalty=1.2), "c": request(min_p=0.1)}
    requests["d"] = request(thinking_token_budget=0)
    logging.getLogger("vllm.plugins.tlt").propagate = True
    assert [rows.of(requests, name) for name in requests] == [None] * 4
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert "request a itself" in told[0]
    assert "repetition_penalty=1.1." in told[0]
    assert "--generation-config vllm" in told[0]
    assert "min_p=0.1" in told[1]
    assert "thinking_token_budget=0" in told[2]
