"""Workers on a cluster that somebody else has started: where they sit, how they meet, what is refused beforehand.

The driver's node has no processors to give, so worker 0 is never beside the driver.
"""

import os
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

from conf.rollout import RolloutConfig
from conf.system import ClusterConfig
from tests.fake_cluster import fake_cluster, node_with_own_disk, own_disks_are_possible
from tlt_core.cluster import placement
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.messages import WorkerSpec
from tlt_core.cluster.placement import (
    ClusterError,
    Node,
    Placement,
    RayNotStarted,
    check_cluster,
    expected_files,
    require_seen,
    reserve,
    start_ray,
    worker_environment,
)
from tlt_core.cluster.worker import Worker

HEAD, FIRST, SECOND, THIRD = (f"127.0.0.{n}" for n in (2, 3, 4, 5))


@pytest.fixture(scope="module")
def cluster():
    with fake_cluster({HEAD: 0, FIRST: 2, SECOND: 2}) as started:
        yield started


def cluster_config(cluster, **settings) -> ClusterConfig:
    return ClusterConfig(address=cluster.address, **settings)


def spec(model: Path, *, threads: int = 1) -> WorkerSpec:
    return WorkerSpec(model_dir=model, rollout=RolloutConfig(), max_len=8, trainer=None, threads=threads, device="cpu")


def ask(group: WorkerGroup, question) -> list:
    """The answers of all workers, asked at once."""
    return ray.get([worker.__ray_call__.remote(lambda _, q=question: q()) for worker in group._workers])


@pytest.mark.slow
@pytest.mark.parametrize(("where", "num_nodes", "threads"), [("spread", 2, 2), ("pack", 1, 1)])
def test_workers_sit_and_meet_where_they_should_with_the_environment_of_the_driver(
    cluster, tiny_folder, monkeypatch, where, num_nodes, threads
):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    cfg = cluster_config(cluster, placement=where, threads_per_worker=threads)
    with WorkerGroup(cfg, spec(tiny_folder, threads=threads)) as group:
        nodes = [node.address for node in group._placement.nodes]
        assert ask(group, lambda: ray.util.get_node_ip_address()) == nodes  # as Ray says and as they say
        assert len({node.id for node in group._placement.nodes}) == num_nodes
        assert HEAD not in nodes
        assert ask(group, lambda: dist.distributed_c10d._get_default_store().underlying_store.host) == [nodes[0]] * 2

        def summed_ranks() -> float:
            total = torch.tensor(float(dist.get_rank() + 1))
            dist.all_reduce(total)
            return float(total)

        assert ask(group, summed_ranks) == [3.0, 3.0]
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_DEBUG")
        assert (
            ask(group, lambda: tuple(os.environ[name] for name in names)) == [(f"{threads}", f"{threads}", "WARN")] * 2
        )
        assert ask(group, lambda: os.nice(0)) == [os.nice(0)] * 2, "as nice as the driver, not Ray's 15 more"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 5}, r"asks for 5 CPUs; .* 3 nodes with 4 CPUs and 0 GPUs .* room for 4 workers"),
        ({"num_workers": 2, "threads_per_worker": 3}, r"asks for 6 CPUs; .* 4 CPUs .* room for 0 workers"),
        ({"num_workers": 2, "gpus_per_worker": 1}, r"asks for 2 CPUs and 2 GPUs; .* 0 GPUs .* add nodes"),
    ],
)
def test_too_small_a_cluster_is_refused(cluster, tiny_folder, settings, said):
    cfg = cluster_config(cluster, **settings)
    with pytest.raises(ClusterError, match=said):
        check_cluster(cfg)
    with pytest.raises(ClusterError, match=said):
        WorkerGroup(cfg, spec(tiny_folder))
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_cluster_that_stays_busy_is_refused(cluster, monkeypatch):
    monkeypatch.setattr(placement, "_WAIT_S", 1.0)
    placement.start_ray(cluster_config(cluster))
    try:
        reserve(cluster_config(cluster, num_workers=3))
        with pytest.raises(ClusterError, match=r"asks for 2 CPUs; .* only 1 CPU and 0 GPUs were free within 1 s"):
            reserve(cluster_config(cluster, num_workers=2))
        assert len(reserve(cluster_config(cluster, num_workers=1)).nodes) == 1  # what was refused holds nothing
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not own_disks_are_possible(), reason="a process needs the right to mount a folder of its own")
def test_a_node_without_the_run_folder_is_named(cluster, tiny_folder, tmp_path):
    # Three workers of two threads: one on every node.
    cfg = cluster_config(cluster, num_workers=3, threads_per_worker=2)
    with (
        node_with_own_disk(cluster, THIRD, tmp_path, num_cpus=2),
        pytest.raises(ClusterError, match=rf"worker 2 on node {THIRD} does not see {tmp_path}/run .*output_dir"),
    ):
        WorkerGroup(cfg, spec(tiny_folder), shared=tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert not ray.is_initialized()


def test_files_that_a_node_does_not_see_are_refused_with_worker_node_folder_and_remedy(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 10)
    files = expected_files([tmp_path])
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 9)  # a stale one
    unseen = Worker.unseen(None, files)
    assert set(unseen) == set(files)
    nodes = Node("a", "10.0.0.1"), Node("b", "10.0.0.2")
    placement = Placement(None, (0, 1), nodes, driver=nodes[0])
    require_seen([(), ()], placement)
    with pytest.raises(ClusterError, match=rf"worker 1 on node 10\.0\.0\.2 .*{tmp_path} .*10\.0\.0\.1.*output_dir"):
        require_seen([(), unseen], placement)


@pytest.mark.slow
def test_an_address_where_no_ray_is_is_refused():
    with pytest.raises(ClusterError, match=r"'127\.0\.0\.2:1': no Ray cluster answers .*ray start --head"):
        check_cluster(ClusterConfig(address="127.0.0.2:1"))


def test_workers_that_share_a_gpu_need_fewer():
    found = torch.cuda.device_count()
    check_cluster(ClusterConfig(num_workers=max(2 * found, 1), gpus_per_worker=0.5 if found else 0))
    share = r"set cluster\.gpus_per_worker=0\.5 \(workers then share a GPU\)" if found else "=0,"
    with pytest.raises(ClusterError, match=rf"asks for {found + 1} GPUs?, this machine has {found}"):
        check_cluster(ClusterConfig(num_workers=2 * found + 1, gpus_per_worker=0.5))
    with pytest.raises(ClusterError, match=share):
        check_cluster(ClusterConfig(num_workers=max(2 * found, 1), gpus_per_worker=1))


@pytest.mark.parametrize(
    ("gpus", "share", "room"),
    [
        (1, 1.0, 2),
        (0.5, 0.5, 4),
        (0.4, 0.5, 4),  # as Ray would count, 2.0 GPUs have room for five: a third one on neither
        (0.6, 1.0, 2),
        (1 / 3, 0.3333, 6),
        (0.3333, 0.3333, 6),
        (0.25, 0.25, 8),
        (0, 0.0, 9),
    ],
)
def test_a_worker_gets_an_even_share_of_one_gpu(gpus, share, room):
    cfg = ClusterConfig(gpus_per_worker=gpus, num_workers=64)
    assert cfg.gpu_share == share
    assert placement._workers_that_fit({"CPU": 9.0, "GPU": 2.0}, cfg) == room
    assert cfg.shares_gpus == (0 < share < 1)
    assert not cfg.model_copy(update={"num_workers": 1}).shares_gpus


def test_only_the_networks_settings_are_passed_on_and_the_driver_may_refuse_huge_pages():
    small = "glibc.malloc.hugetlb=0"
    given = {"GLOO_SOCKET_IFNAME": "eth7", "SECRET": "x", "GLIBC_TUNABLES": small}
    passed = worker_environment(ClusterConfig(threads_per_worker=3), given)
    assert passed["GLIBC_TUNABLES"] == f"glibc.malloc.hugetlb=1:{small}"  # the last value counts
    assert passed["GLOO_SOCKET_IFNAME"] == "eth7"
    assert passed["OMP_NUM_THREADS"] == "3"
    assert "SECRET" not in passed


def test_a_ray_that_does_not_start_on_a_busy_machine_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(placement.ray, "init", init)
    with pytest.raises(RayNotStarted, match=r"far too busy.*same command"):
        start_ray(ClusterConfig(num_workers=1))
