"""The smoke configuration on several workers: the same run whoever the workers are.

    one process  =  two processes (torch, ZeRO-3)                 up to the rounding of sums in another order
    two processes here  =  two nodes of Ray's fake cluster        bit for bit, and after a node was killed, too

Speculation is off and groups are dealt up front, as its choices and who is free first follow the clock (they change no
token, but the last bits of log-probabilities).  With eps = 1e-3 AdamW does not turn the rounding of a gradient near
zero into a visible part of the learning rate.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.fake_cluster import add_node, fake_cluster
from tlt_core.items.store import load_scored

pytestmark = [pytest.mark.slow, pytest.mark.prefect]

STEPS = 3
TIMEOUT_S = 600
TOLERANCE = 1e-6
HEAD, FIRST, SECOND, SPARE = (f"127.0.0.{n}" for n in (2, 3, 4, 5))
_ACTORS = ("ray::Worker", "ray::Dispatcher")
OF_THE_POLICY = ("critic/", "actor/", "response_length/", "val-core/", "training/rollout_probs_diff")


class Run:
    """One `tlt train`, in a folder of its own, with data set and cold start of its own."""

    def __init__(self, root: Path, name: str, model: Path, *settings: str) -> None:
        self.folder, self.log = root / "runs" / name, root / f"{name}.log"
        self._home = root / f"{name}-home"
        (self._home / "models").mkdir(parents=True)
        (self._home / "models" / model.name).symlink_to(model)
        self._prefect = root / "prefect"
        self._settings = [
            f"name={name}",
            f"output_dir={root / 'runs'}",
            f"tracking.uri=sqlite:///{root / name}.db",
            f"num_steps={STEPS}",
            "rollout.dispatch=static",
            "rollout.speculation.policy=off",
            "rollout.max_new_tokens=48",
            "update.optimizer.learning_rate=1e-3",
            "update.optimizer.eps=1e-3",
            'reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]',
            *settings,
        ]

    def start(self) -> subprocess.Popen:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PREFECT_HOME": str(self._prefect),
            "TLT_HOME": str(self._home),
        }
        command = [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *self._settings]
        log = self.log.open("a")
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def finish(self) -> "Run":
        process = self.start()
        try:
            assert process.wait(TIMEOUT_S) == 0, self.log.read_text()[-3000:]
        finally:
            process.kill()
        return self

    @property
    def rows(self) -> list[dict[str, float]]:
        """What each step measured of the policy."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        return [{k: v for k, v in row.items() if k.startswith(OF_THE_POLICY)} for row in rows]

    @property
    def rollouts(self) -> list[str]:
        """A checksum of each step's rollouts: tokens, log-probs, who decoded them; without the times."""
        return [
            hashlib.sha256(
                b"".join(
                    getattr(batch, field).numpy().tobytes()
                    for field in ("tokens_T", "logprobs_T", "offsets_R1", "prompt_ids_R", "finish_R", "worker_R")
                )
            ).hexdigest()
            for batch in self._batches()
        ]

    @property
    def tokens(self) -> list[list[int]]:
        """Of each step."""
        return [batch.tokens_T.tolist() for batch in self._batches()]

    @property
    def weights(self) -> dict:
        return load_file(self.folder / "policy" / "model.safetensors")

    @property
    def digest(self) -> str:
        return hashlib.sha256((self.folder / "policy" / "model.safetensors").read_bytes()).hexdigest()

    def _batches(self) -> list:
        return [load_scored(self.folder / f"steps/{n:06d}/scored.safetensors").rollouts for n in range(1, STEPS + 1)]


def moved(a: Run, b: Run) -> float:
    """The largest difference between their weights."""
    theirs = b.weights
    return max(float((weight - theirs[name]).abs().max()) for name, weight in a.weights.items())


def require_workers_gone() -> None:
    """Those of any run on the fake cluster, whose nodes are this process's children."""
    children = psutil.Process().children(recursive=True)
    _, left = psutil.wait_procs([c for c in children if c.name().startswith(_ACTORS)], timeout=60)
    assert not left, f"workers outlive their run: {left}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("many")


@pytest.fixture(scope="module")
def two(root, embedded_model) -> Run:
    return Run(root, "two", embedded_model).finish()


@pytest.fixture(scope="module")
def nodes():
    with fake_cluster({HEAD: 0, FIRST: 2, SECOND: 2}) as cluster:
        yield cluster


def on_nodes(root, name, model, nodes) -> Run:
    return Run(root, name, model, f"cluster.address={nodes.address}", "cluster.placement=spread")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("cluster.num_workers=1",), id="one worker"),
        pytest.param(
            ("update.backend={kind: deepspeed, zero_stage: 3, gather_bucket_mb: 1}",),
            id="zero 3",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_processes_make_the_update_of_one_with_either_back_end(root, embedded_model, two, settings, request):
    other = Run(root, request.node.callspec.id.replace(" ", ""), embedded_model, *settings).finish()
    assert other.tokens == two.tokens
    assert moved(two, other) < TOLERANCE
    start = root / "two-home" / "coldstart"
    (first,) = start.glob("*/model.safetensors")
    assert max(float((w - load_file(first)[n]).abs().max()) for n, w in two.weights.items()) > 1000 * TOLERANCE
    for row, expected in zip(other.rows, two.rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert len({row["critic/rewards/mean"] for row in two.rows[1:]}) > 1, (
        "a run in which nothing changes proves nothing"
    )


def test_two_nodes_repeat_what_two_processes_do(root, embedded_model, two, nodes):
    run = Run(
        root,
        "nodes",
        embedded_model,
        f"cluster.address={nodes.address}",
        "cluster.placement=spread",
        "cluster.release_rollout_memory=true",
    ).finish()
    sat_on = set(re.findall(r"127\.0\.0\.\d \((\w+)\)", (run.folder / "log.txt").read_text()))
    workers_nodes = {n["NodeID"] for n in nodes.global_state.node_table() if n["NodeManagerAddress"] != HEAD}
    assert len(sat_on) == 2
    assert sat_on == workers_nodes
    assert run.rollouts == two.rollouts
    assert run.rows == two.rows
    assert run.digest == two.digest
    require_workers_gone()


def test_a_killed_node_ends_the_run_and_it_resumes(root, embedded_model, two, nodes):
    run = on_nodes(root, "killed", embedded_model, nodes)
    process = run.start()
    deadline = time.monotonic() + TIMEOUT_S
    while not (run.folder / "checkpoints" / "step_000001").exists():
        assert process.poll() is None, f"the run ended before a node was killed: {run.log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, "there never was a checkpoint"
        time.sleep(0.01)
    (victim,) = (node for node in nodes.worker_nodes if node.node_ip_address == SECOND)
    for raylet in victim.all_processes["raylet"]:
        os.kill(raylet.process.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    nodes.remove_node(victim, allow_graceful=False)
    assert process.wait(TIMEOUT_S) == 1, run.log.read_text()[-3000:]
    assert time.monotonic() - killed_s < TIMEOUT_S
    said = run.log.read_text()
    assert re.search(rf"worker process ended unexpectedly \(worker [01] on node {re.escape(SECOND)}", said), said[
        -3000:
    ]
    assert "same command" in said
    require_workers_gone()
    add_node(nodes, SPARE, num_cpus=2)
    run.finish()
    assert run.digest == two.digest
    assert run.rollouts == two.rollouts
