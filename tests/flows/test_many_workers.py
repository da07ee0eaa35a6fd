"""The smoke configuration on several workers: the same run whoever the workers are.

    one process  =  two processes (torch, ZeRO-3)                 up to the rounding of sums in another order
    two processes here  =  two nodes of Ray's fake cluster        bit for bit, and after a node was killed, too
    cold start of one worker  =  of two nodes                     up to the rounding of sums

With eps = 1e-3 AdamW does not turn the rounding of a gradient near zero into a visible part of the learning rate.
"""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.fake_cluster import add_node, fake_cluster
from tests.flows.runs import TIMEOUT_S, Run
from tlt_core.items.store import load_scored

pytestmark = [pytest.mark.slow, pytest.mark.prefect]

STEPS = 3
TOLERANCE = 1e-6
HEAD, FIRST, SECOND, SPARE = (f"127.0.0.{n}" for n in (2, 3, 4, 5))
# By step, measured on an EPYC 9004.  A change that moves them changes what is computed.
HISTORY = {
    "critic/rewards/mean": (0.83696, 0.83583, 0.83805),
    "response_length/mean": (48, 48, 48),
    "actor/entropy": (10.79010, 10.79003, 10.79002),
    "actor/grad_norm": (0.55360, 0.56572, 0.53801),
}
_ACTORS = ("ray::Worker", "ray::Dispatcher")
OF_THE_POLICY = ("critic/", "actor/", "response_length/", "val-core/", "training/rollout_probs_diff")
WITHOUT_TIMES = ("tokens_T", "logprobs_T", "offsets_R1", "prompt_ids_R", "finish_R", "worker_R")


def run(root: Path, name: str, home: Path, *settings: str) -> Run:
    return Run(root, name, "update.optimizer.eps=1e-3", *settings, steps=STEPS, home=home)


def home_of(root: Path, name: str, model: Path) -> Path:
    """For a data set and a cold start of its own."""
    home = root / f"{name}-home"
    (home / "models").mkdir(parents=True)
    (home / "models" / model.name).symlink_to(model)
    return home


def rows_of(run: Run) -> list[dict[str, float]]:
    """What each step measured of the policy."""
    return [{k: v for k, v in row.items() if k.startswith(OF_THE_POLICY)} for row in run.rows]


def rollouts_of(run: Run, *fields: str) -> list[list[bytes]]:
    """Of each step: tokens, log-probs, who decoded them."""
    batches = [load_scored(run.folder / f"steps/{n:06d}/scored.safetensors").rollouts for n in range(1, STEPS + 1)]
    return [[getattr(batch, field).numpy().tobytes() for field in fields or WITHOUT_TIMES] for batch in batches]


def weights_of(run: Run) -> dict:
    return load_file(run.folder / "policy" / "model.safetensors")


def cold_start_in(home: Path) -> dict:
    (folder,) = home.glob("coldstart/*/model.safetensors")
    return load_file(folder)


def difference(a: dict, b: dict) -> float:
    """The largest one between weights."""
    return max(float((weight - b[name]).abs().max()) for name, weight in a.items())


def require_workers_gone() -> None:
    """Those of any run on the fake cluster, whose nodes are this process's children."""
    children = psutil.Process().children(recursive=True)
    _, left = psutil.wait_procs([c for c in children if c.name().startswith(_ACTORS)], timeout=60)
    assert not left, f"workers outlive their run: {left}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("many")


@pytest.fixture(scope="module")
def its_home(root, embedded_model) -> Path:
    return home_of(root, "two", embedded_model)


@pytest.fixture(scope="module")
def two(root, its_home) -> Run:
    return run(root, "two", its_home).finish()


@pytest.fixture(scope="module")
def nodes():
    with fake_cluster({HEAD: 0, FIRST: 2, SECOND: 2}) as cluster:
        yield cluster


def on_nodes(root, name, home, nodes, *more) -> Run:
    return run(root, name, home, f"cluster.address={nodes.address}", "cluster.placement=spread", *more)


@pytest.mark.parametrize(("figure", "known"), HISTORY.items())
def test_the_run_is_what_it_has_been(two, figure, known):
    assert [row[figure] for row in two.rows[1:]] == pytest.approx(known, rel=0.005)


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
    name = request.node.callspec.id.replace(" ", "")
    other = run(root, name, home_of(root, name, embedded_model), *settings).finish()
    assert rollouts_of(other, "tokens_T") == rollouts_of(two, "tokens_T")
    assert difference(weights_of(two), weights_of(other)) < TOLERANCE
    assert difference(weights_of(two), cold_start_in(root / "two-home")) > 1000 * TOLERANCE
    for row, expected in zip(rows_of(other), rows_of(two), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert len({row["critic/rewards/mean"] for row in two.rows[1:]}) > 1, (
        "a run in which nothing changes proves nothing"
    )


def test_two_nodes_repeat_what_two_processes_do(root, its_home, two, nodes):
    spread = on_nodes(root, "nodes", its_home, nodes, "cluster.release_rollout_memory=true").finish()
    sat_on = set(re.findall(r"127\.0\.0\.\d \((\w+)\)", (spread.folder / "log.txt").read_text()))
    workers_nodes = {n["NodeID"] for n in nodes.global_state.node_table() if n["NodeManagerAddress"] != HEAD}
    assert len(sat_on) == 2
    assert sat_on == workers_nodes
    assert rollouts_of(spread) == rollouts_of(two)
    assert rows_of(spread) == rows_of(two)
    assert spread.digest == two.digest
    require_workers_gone()


def test_a_cold_start_on_two_nodes_is_that_of_one_process(root, its_home, embedded_model, two, nodes):
    theirs = home_of(root, "cold", embedded_model)
    cold = on_nodes(root, "cold", theirs, nodes)
    assert cold.start("coldstart").wait(TIMEOUT_S) == 0, cold.said[-3000:]
    assert difference(cold_start_in(theirs), cold_start_in(its_home)) < TOLERANCE
    assert (cold_start_in(theirs)["model.norm.weight"] - 1).abs().max() > 100 * TOLERANCE, "nothing was trained"


def test_a_killed_node_ends_the_run_and_it_resumes(root, its_home, two, nodes):
    killed = on_nodes(root, "killed", its_home, nodes)
    (victim,) = (node for node in nodes.worker_nodes if node.node_ip_address == SECOND)
    first, *more = [raylet.process.pid for raylet in victim.all_processes["raylet"]]
    process = killed.start_and_kill(lambda: killed.has_checkpoint(1), victim=lambda _: first)
    for pid in more:
        os.kill(pid, signal.SIGKILL)
    nodes.remove_node(victim, allow_graceful=False)
    assert process.wait(TIMEOUT_S) == 1, killed.said[-3000:]
    ended = rf"worker process ended unexpectedly \(worker [01] on node {re.escape(SECOND)}"
    assert re.search(ended, killed.said), killed.said[-3000:]
    assert "same command" in killed.said
    require_workers_gone()
    add_node(nodes, SPARE, num_cpus=2)
    killed.finish()
    assert killed.digest == two.digest
    assert rollouts_of(killed) == rollouts_of(two)
