"""Data sets of a hub: a local server that answers as the hub does, and the library's own cache."""

import ast
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from conf.data import FileData
from tlt_core.data import file_questions
from tlt_core.data.question import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "main/train-0.jsonl": '{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?", "answer": "4"}\n',
    "main/test-0.jsonl": '{"question": "3 + 3?", "answer": "6"}\n',
}
READ = """
import sys
from conf.data import FileData
from tlt_core.data import file_questions
cfg = FileData(kind="file", train_path=sys.argv[1])
for part in file_questions.splits(cfg):
    print(sorted((item.question, item.answer) for item in part))
print(file_questions.source(cfg))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path.startswith("/api/datasets/owner/sums/tree/"):
            found = [{"type": "file", "path": name, "size": len(text), "oid": name} for name, text in FILES.items()]
            return self._answer(json.dumps(found).encode())
        if self.path.startswith("/api/datasets/owner/sums/"):
            about = {"id": "owner/sums", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            return self._answer(json.dumps(about).encode())
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        return self._answer(FILES[name].encode()) if name in FILES else self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def read(tmp_path):
    """A process that reads a data set, and what it said."""

    def start(address, endpoint, **more):
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", **more}
        command = [sys.executable, "-c", READ, address]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    return start


def test_files_of_a_hub_are_read_then_found_without_it(read):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        hub.asked = []
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        first = read("hf://datasets/owner/sums@~parquet/main/train-*.jsonl", endpoint)
        wrong = read("hf://datasets/owner/sums/main/valid-*.jsonl", endpoint)
        hub.shutdown()
    assert first.returncode == 0, first.stderr
    questions = first.stdout.splitlines()
    assert sorted(pair for line in questions[:2] for pair in ast.literal_eval(line)) == [
        ("1 + 1?", "2"),
        ("2 + 2?", "4"),
    ]
    assert COMMIT in questions[2]
    assert any(path.endswith("/revision/refs%2Fconvert%2Fparquet") for path in hub.asked)
    assert not any("test-0" in path for path in hub.asked), "only what was asked for"
    assert "no such file there" in wrong.stderr

    again = read("hf://datasets/owner/sums@~parquet/main/train-*.jsonl", endpoint, HF_HUB_OFFLINE="1")
    assert again.stdout == first.stdout
    for name in ("owner/others", "owner/no--name"):
        missing = read(f"hf://datasets/{name}/main/train-*.jsonl", endpoint)
        assert "DataError: " in missing.stderr
        assert "cannot be had from the hub" in missing.stderr


@pytest.mark.parametrize("address", ["hf://datasets/owner", "hf://datasets/owner/name", "hf://datasets//name/x.jsonl"])
def test_an_address_without_files_is_refused_with_an_example(address):
    with pytest.raises(DataError, match=r"write hf://datasets/OWNER/NAME/FILES.*gsm8k"):
        file_questions.check(FileData(kind="file", train_path=address))


def test_a_bare_name_says_how_the_hub_is_meant():
    with pytest.raises(DataError, match=r"openai/gsm8k does not exist.*hf://datasets/OWNER/NAME/FILES"):
        file_questions.check(FileData(kind="file", train_path="openai/gsm8k"))
