"""A judge over HTTP that is slow, wrong or gone costs samples, not the run.  A real server on this machine answers."""

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from conf.reward import JudgeConfig, RewardConfig, RewardFunction
from tlt_core.grpo.reward import Scorer
from tlt_core.items.types import Prompt, ScoreStatus


class _Judge(http.server.BaseHTTPRequestHandler):
    asked: list[dict]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
        times = sum(one["messages"][0]["content"] == text for one in self.asked)
        code, reply = 200, {"choices": [{"message": {"content": "I say 0.75"}}]}
        if "slow" in text:
            time.sleep(20)
        elif "silent" in text:
            reply = {"choices": [{"message": {"content": "no idea"}}]}
        elif "strange" in text:
            reply = {"what": 1}
        elif "forbidden" in text:
            code = 403
        elif "busy" in text and times < 3:
            code = 503
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    _Judge.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def _prompt(task: str = "file") -> Prompt:
    return Prompt(0, torch.tensor([1], dtype=torch.int32), "What is {answer}?", "42", task)


def test_a_judge_scores_and_its_failures_cost_their_samples_alone(server, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    judge = JudgeConfig(url=url, model="m", prompt="{prompt}|{answer}|{response}", key_variable="JUDGE_API_KEY")
    term = RewardFunction(kind="judge", judge=judge, weight=2.0)
    cfg = RewardConfig(functions=(term,), timeout_s=4.0, num_processes=2, pass_variables=("JUDGE_API_KEY",))
    responses = ["good", "busy", "silent", "strange", "forbidden", "slow", "good"]
    with Scorer(cfg) as scorer:
        for key, response in enumerate(responses):
            scorer.submit(key, _prompt(), response)
        scores = scorer.collect(range(len(responses)))
        server.shutdown()
        server.server_close()
        scorer.submit("gone", _prompt(), "gone")
        (gone,) = scorer.collect(["gone"])
    assert [score.total for score in scores] == [1.5, 1.5, 0.0, 0.0, 0.0, 0.0, 1.5]
    expected = ["OK", "OK", "UNPARSEABLE", "ERROR", "ERROR", "TIMEOUT", "OK"]
    assert [ScoreStatus(score.status).name for score in scores] == expected
    assert "something else than a chat completion" in scores[3].message
    assert "answers 403" in scores[4].message
    assert (gone.total, gone.status) == (0.0, ScoreStatus.ERROR)
    assert "does not answer" in gone.message
    (first, *_) = (one for one in _Judge.asked if "good" in one["messages"][0]["content"])
    assert (first["path"], first["key"], first["model"]) == ("/v1/chat/completions", "Bearer k", "m")
    assert first["messages"][0]["content"] == "What is {answer}?|42|good", "what a prompt says is not filled in again"
    assert sum("forbidden" in one["messages"][0]["content"] for one in _Judge.asked) == 1


def test_terms_of_a_data_source_score_its_responses_alone() -> None:
    terms = (
        RewardFunction(kind="exact", sources=("openai/gsm8k",)),
        RewardFunction(kind="format", sources=("code",), weight=3.0),
        RewardFunction(kind="format"),
    )
    with Scorer(RewardConfig(functions=terms)) as scorer:
        for task in ("openai_gsm8k", "code", "other"):
            scorer.submit(task, _prompt(task), "<think>x</think><answer>42</answer>")
        scores = scorer.collect(["openai_gsm8k", "code", "other"])
    assert [score.components for score in scores] == [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 1.0)]
    assert [score.total for score in scores] == [2.0, 4.0, 1.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "judge"}, "kind 'judge' needs"),
        ({"kind": "exact", "judge": {"url": "http://x/v1", "model": "m"}}, "the others have not"),
        ({"kind": "judge", "judge": {"url": "x", "model": "m"}}, "begin it with http"),
        ({"kind": "judge", "judge": {"url": "http://x/v1", "model": "m", "prompt": "?"}}, "no {response}"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        RewardFunction(**given)
