"""Every command of the documents is run as it stands, in a small copy of the project (`sandbox.py`).

Those that cannot be are in `NOT_RUN`, with the reason.  A new command that is neither fails here.
"""

import itertools
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flows import cli
from flows._server import PrivateServer
from tests.docs.commands import PAGES, ROOT, VARIABLE, files_of, lines_of, text_of
from tests.docs.sandbox import Sandbox

NOT_RUN = {  # why, and how such commands begin
    "needs Docker": ("docker", "."),  # its last word
    "needs vLLM, SGLang or a server of theirs": (
        "vllm",
        "python -m sglang.launch_server",
        "curl",
        "grep vllm:spec_decode_num",
        "tlt train conf/demo.yaml rollout.engine=vllm",
    ),
    "needs a GPU": ("tlt train conf/single_gpu.yaml", "tlt train conf/demo.yaml cluster.gpus_per_worker=0.5"),
    "needs several machines; tests/tlt_core/cluster/test_placement.py": ("ray", "tlt train conf/multi_node.yaml"),
    "needs Kubernetes": ("prefect work-pool", "prefect --no-prompt deploy", "prefect worker"),
    "tests/flows/test_deploy.py runs such commands": ("prefect deployment", "tlt recover"),
    "tests/flows/test_dvc.py runs such commands": ("dvc", "git"),
    "needs the reader's own": (
        *("dvc get", "dvc import", "dvc update", "dvc remote"),
        "tlt train conf/demo.yaml tracking.uri=http://HOST:5000",
    ),
    "tests/tasks/test_version.py tracks a folder": ("tlt export conf/demo.yaml --track",),
    "needs a registry; tests/tasks/test_registry.py": ("mlflow artifacts", "tlt rollback"),
    "reads what the registry has given": (
        "tlt export conf/demo.yaml --drafter champion-eagle3",
        "tlt verify-export exports/champion",
    ),
    "installs or downloads": (
        "pip",
        "tlt bench engines",
        "tlt bench peers",
        "tlt bench learning",
        "tlt train mine.yaml name=mine-qwen",
    ),
    "tests/deploy/test_wheelhouse.py installs a kit": ("python3 part-1/install.py", "python3 part-2/install.py"),
    "takes an hour; tests/test_gpu_suite.py runs parts": ("python tests/gpu_suite.py",),
    "the shell's own, or serves until it is stopped": ("tlt ui", "source", "export"),
}
BEGINNINGS = [beginning for group in NOT_RUN.values() for beginning in group]
LESS = {  # added to commands that begin so, in this order
    "tlt train": ["num_steps=1"],
    "tlt train conf/demo.yaml": ["num_steps=2"],
    "tlt train conf/demo.yaml name=dapo": ["algorithm.overlong_buffer_tokens=8"],
    "tlt bench": ["--repeats", "1"],
    "tlt bench e2e": ["num_steps=2", "--workload", "tail"],
    "tlt bench idle": ["num_steps=2"],
    "tlt generate": ["--max-new-tokens", "8", "--num-workers", "1"],
}
ANSWERS = {  # with another exit code than 0, which is no error here
    "tlt check-drafter": "dropped: ",
    "tlt status runs/demo --stacks": "runs/demo is finished; only a running run can write its stacks",
}
FOR_THE_READER = {"NAME": "exports/demo/policy", "FOLDER": "exports/demo/policy", "DRAFTER": "runs/demo/drafter-eagle3"}
FAST = ("tlt doctor", "tlt params")
COMMANDS = list(dict.fromkeys(tuple(line) for page in PAGES for line in lines_of(text_of(page))))


def _begins(command: Sequence[str], beginnings: Sequence[str]) -> list[str]:
    """Those that the command begins with, without variables."""
    words = [*command]
    while words and VARIABLE.match(words[0]):
        words.pop(0)
    return [b for b in beginnings if words[: len(b.split())] == b.split()]


def _less(command: Sequence[str]) -> list[str]:
    return list(itertools.chain(*(LESS[b] for b in _begins(command, [*LESS]))))


RUN = [c for c in COMMANDS if not _begins(c, [*BEGINNINGS, "make"])]
SLOW = [c for c in RUN if not _begins(c, FAST)]


@pytest.mark.parametrize("command", [c for c in RUN if _begins(c, FAST)], ids=shlex.join)
def test_a_command_that_takes_no_time(
    command: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TLT_HOME", raising=False)
    words = [*command]
    while VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    assert cli.main([*words[1:], *_less(command)]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_what_is_not_run_is_still_there(beginning: str) -> None:
    assert any(_begins(command, [beginning]) for command in COMMANDS), "no command begins so: remove the entry"


@pytest.fixture(scope="module")
def sandbox(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The run `demo` is there, as after `make demo`."""
    folder = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as environment:
        for name in ("TLT_HOME", "PREFECT_API_URL"):
            environment.delenv(name, raising=False)
        environment.setenv("PREFECT_HOME", str(folder / ".prefect"))
        with PrivateServer() as server:
            server.wait_ready()
            variables = {"PREFECT_API_URL": os.environ["PREFECT_API_URL"], "OMP_NUM_THREADS": "1"}
            made = Sandbox(folder, embedded_model=embedded_model, variables=variables)
            for name, text in files_of("docs/research.md").items():
                (folder / name).write_text(text)
            with (folder / "rows.jsonl").open("a") as file:
                file.writelines(f'{{"prompt": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(6))
            code, said = made.run(["tlt", "train", "conf/demo.yaml"])
            assert code == 0, said
            shutil.copytree(folder / "runs" / "demo" / "policy", folder / "runs" / "warm" / "policy")
            yield made


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.prefect
@pytest.mark.parametrize("command", SLOW, ids=shlex.join)
def test_a_command_does_what_it_says(command: Sequence[str], sandbox: Sandbox) -> None:
    words = [re.sub(r"\b(NAME|FOLDER|DRAFTER)$", lambda m: FOR_THE_READER[m[1]], word) for word in command]
    code, said = sandbox.run([*words, *_less(command)])
    assert code == 0 or any(ANSWERS[b] in said for b in _begins(command, [*ANSWERS])), said[-4000:]
