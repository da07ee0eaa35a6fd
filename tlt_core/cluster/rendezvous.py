"""How the workers of a group find each other: the store where torch.distributed meets, and the network that it uses.

    worker 0:  host_store(its own node's address) -> "address:port"  --driver-->  every worker: join_group

The port is chosen by binding it on the node that uses it, so nobody can take it in between.
"""

import ipaddress
import os
import socket
from collections.abc import Iterable

import psutil
import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def host_store(address: str, *, world_size: int) -> tuple[dist.TCPStore, str]:
    """The store, listening on that address only, and its "address:port".  It lives as long as the object."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return store, f"{address}:{port}"


def join_group(
    meeting_point: str, *, own_address: str, rank: int, world_size: int, backend: str, store: dist.Store | None
) -> None:
    """Form the torch.distributed group.

    backend: see `backend_of`.  store: given by the worker that hosts it.  own_address: of this worker's node.  Traffic
    goes through the interface with that address, because the host's name resolves to the loopback on many machines.
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME take precedence.
    """
    host, _, port = meeting_point.rpartition(":")
    if store is None:
        store = dist.TCPStore(host, int(port), world_size, is_master=False, wait_for_workers=False)
    known = [
        (name, found.address, found.netmask)
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if found.family == socket.AF_INET
    ]
    interface = interface_of(own_address, known)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if "nccl" in backend and not ipaddress.ip_address(own_address).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def backend_of(device: str, *, shares_gpus: bool) -> str:
    """Of torch.distributed: gloo on CPUs; on GPUs NCCL, and gloo for CPU tensors.  NCCL refuses two workers on one GPU;
    there gloo sums the GPU's tensors, too, in main memory.  Sums of gradients are exact, so both give the same bits."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" and not shares_gpus else "gloo"


def interface_of(address: str, known: Iterable[tuple[str, str, str | None]]) -> str | None:
    """The network interface that has the address, or is on its network.  known: (interface, address, netmask)."""
    wanted, same_network = ipaddress.ip_address(address), None
    for name, own, netmask in known:
        interface = ipaddress.ip_interface(f"{own}/{netmask}" if netmask else own)
        if interface.ip == wanted:
            return name
        if wanted in interface.network:
            same_network = same_network or name
    return same_network
