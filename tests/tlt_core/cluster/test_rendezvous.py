"""Where a group meets, and over which interface its workers talk."""

import socket

import pytest
import torch.distributed as dist

from tlt_core.cluster.rendezvous import backend_of, host_store, interface_of

KNOWN = [
    ("lo", "127.0.0.1", "255.0.0.0"),
    ("docker0", "172.17.0.1", "255.255.0.0"),
    ("eth0", "10.1.0.7", "255.255.255.0"),
    ("ib0", "10.2.0.7", "255.255.255.0"),
    ("eth1", "10.1.0.9", "255.255.255.0"),
]


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.1.0.7", "eth0"),
        ("10.1.0.9", "eth1"),  # its own, though eth0 is on the same network and comes first
        ("10.2.0.7", "ib0"),
        ("127.0.0.1", "lo"),
        ("127.0.0.3", "lo"),
        ("192.168.5.5", None),
    ],
)
def test_traffic_goes_through_the_interface_of_the_nodes_address(address: str, interface: str | None) -> None:
    assert interface_of(address, KNOWN) == interface


def test_the_store_listens_on_the_given_address_alone() -> None:
    store, meeting_point = host_store("127.0.0.3", world_size=2)
    host, _, port = meeting_point.rpartition(":")
    assert host == "127.0.0.3"
    guest = dist.TCPStore(host, int(port), 2, is_master=False, wait_for_workers=False)
    guest.set("greeting", "hello")
    assert store.get("greeting") == b"hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5).close()


def test_nccl_is_for_workers_with_a_gpu_each() -> None:
    assert backend_of("cpu", shares_gpus=False) == backend_of("cuda", shares_gpus=True) == "gloo"
    assert backend_of("cuda", shares_gpus=False) == "cpu:gloo,cuda:nccl"
