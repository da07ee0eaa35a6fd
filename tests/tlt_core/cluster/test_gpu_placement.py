"""A dry run of the GPU configurations' placement, on nodes that pretend to have GPUs."""

import os
from collections import Counter

import pytest
import ray

from conf.load import load
from conf.system import ClusterConfig
from tests.fake_cluster import fake_cluster
from tlt_core.cluster.placement import ClusterError, require_room, reserve, start_ray

pytestmark = [pytest.mark.slow, pytest.mark.long]  # test_placement is its short form
NODES = ("127.0.0.2", "127.0.0.3")


class _Seat:
    """What a worker's process would see."""

    def see(self) -> tuple[str, str]:
        return ray.util.get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(("config", "nodes"), [("multi_node", 2), ("gpu_32b", 1)])
def test_every_worker_gets_a_gpu_of_its_own_and_neighbours_have_consecutive_ranks(config: str, nodes: int) -> None:
    cfg = load(f"conf/{config}.yaml")
    wanted, each = cfg.cluster, cfg.rollout.workers_per_engine
    with fake_cluster(dict.fromkeys(NODES[:nodes], 8 * wanted.threads_per_worker), gpus=8) as cluster:
        there = wanted.model_copy(update={"address": cluster.address})
        start_ray(there)
        require_room(there, each)
        placement = reserve(there, each)
        actor = ray.remote(num_cpus=there.threads_per_worker, num_gpus=there.gpus_per_worker)(_Seat)
        seats = [
            actor.options(scheduling_strategy=placement.worker(rank)).remote() for rank in range(there.num_workers)
        ]
        seen = ray.get([seat.see.remote() for seat in seats])
    assert [address for address, _ in seen] == [node.address for node in placement.nodes]
    assert [address for address, _ in seen] == [address for address in NODES[:nodes] for _ in range(8)]
    assert len(set(seen)) == there.num_workers == 8 * nodes
    assert Counter(gpu for _, gpu in seen) == Counter(dict.fromkeys(map(str, range(8)), nodes))


@pytest.mark.parametrize(("gpus", "each"), [(0.5, 2), (0.4, 2), (0.3333, 3)])
def test_workers_share_gpus_and_are_refused_where_one_more_would_be(gpus: float, each: int) -> None:
    """Four GPUs on two nodes.  Half a GPU of each would be Ray's choice for the fifth part of 0.4."""
    wanted = ClusterConfig(num_workers=4 * each, gpus_per_worker=gpus)
    with fake_cluster(dict.fromkeys(NODES, 2 * each), gpus=2) as cluster:
        there = wanted.model_copy(update={"address": cluster.address})
        start_ray(there)
        require_room(there)
        placement = reserve(there)
        actor = ray.remote(num_cpus=1, num_gpus=there.gpu_share)(_Seat)
        seats = [actor.options(scheduling_strategy=placement.worker(r)).remote() for r in range(there.num_workers)]
        seen = ray.get([seat.see.remote() for seat in seats])
        with pytest.raises(ClusterError, match=rf"asks for \d+ CPUs and 5 GPUs; .* room for {4 * each} workers"):
            require_room(there.model_copy(update={"num_workers": 4 * each + 1}))
    assert [address for address, _ in seen] == [address for address in NODES for _ in range(2 * each)]
    assert Counter(seen) == {(node, gpu): each for node in NODES for gpu in "01"}


def test_workers_that_share_an_engine_are_on_one_node() -> None:
    """Three GPUs a node: an engine of two and one GPU that is left.  Ray alone would put the third worker there."""
    wanted = load("conf/gpu_32b.yaml").cluster.model_copy(update={"num_workers": 4, "threads_per_worker": 1})
    with fake_cluster(dict.fromkeys(NODES, 3), gpus=3) as cluster:
        there = wanted.model_copy(update={"address": cluster.address})
        start_ray(there)
        require_room(there, 2)
        nodes = [node.address for node in reserve(there, 2).nodes]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_nodes_that_no_whole_engine_fits_into_are_refused() -> None:
    wanted = load("conf/gpu_32b.yaml").cluster.model_copy(update={"num_workers": 4, "threads_per_worker": 1})
    with fake_cluster(dict.fromkeys(NODES, 3), gpus=3) as cluster:
        there = wanted.model_copy(update={"address": cluster.address})
        start_ray(there)
        with pytest.raises(ClusterError, match=r"4 of them on one node .* room for \[3, 3\] workers"):
            require_room(there, 4)
