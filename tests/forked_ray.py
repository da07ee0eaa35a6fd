"""In the place of Ray: actors as processes that are forked from one with all modules loaded.

A worker of Ray takes seconds to import torch; this one takes none, so that dozens of runs fit into minutes.  Only what
`tlt_core/cluster` asks of Ray is there; everything else in a run is real.  A call that fails raises here, with the
actor's traceback.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from conf.system import ClusterConfig
from tlt_core.cluster import environments, group, heartbeat, worker
from tlt_core.cluster.placement import Node, Placement

MODULES = ["pytest", "deepspeed", "peft", "tlt_core.cluster.worker", "tlt_core.grpo.lora", __name__]
_HERE = Node("00" * 28, "127.0.0.1")
_alive: dict[Any, multiprocessing.process.BaseProcess] = {}  # by address


class ActorFailed(RuntimeError):
    """The text is the actor's traceback."""


class Handle:
    """Of an actor: `handle.method.remote(...)` gives a Future.  It can be sent to other actors."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self._connection: Connection | None = None
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Handle, (self.address,)

    def __getattr__(self, name: str) -> "_Method":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Method(self, name)

    def call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> "Future[Any]":
        with self._lock:
            if self._connection is None:
                self._connection = Client(self.address, authkey=bytes(multiprocessing.current_process().authkey))
                threading.Thread(target=self._read, args=(self._connection,), daemon=True).start()
            number, future = len(self._pending), Future[Any]()
            self._pending[number] = future
            try:
                self._connection.send_bytes(pickle.dumps((number, name, arguments, options)))
            except OSError:
                future.set_exception(ActorFailed(f"the actor has ended before {name}"))
        return future

    def _read(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, failure, answer = pickle.loads(connection.recv_bytes())
                future = self._pending[number]
                future.set_result(answer) if failure is None else future.set_exception(ActorFailed(failure))
        for future in [f for f in self._pending.values() if not f.done()]:
            future.set_exception(ActorFailed("the actor has ended"))


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *arguments: Any, **options: Any) -> "Future[Any]":
        return self._handle.call(self._name, arguments, options)


class _Actor:
    def __init__(self, kind: type) -> None:
        self._kind = kind

    def options(self, **_: Any) -> "_Actor":
        return self

    def remote(self, *arguments: Any) -> Handle:
        # A process that was forked from the server itself has all modules, and would start a server of its own.
        context: Any = multiprocessing.get_context("forkserver" if multiprocessing.parent_process() is None else "fork")
        multiprocessing.set_forkserver_preload(MODULES)
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, self._kind, arguments), daemon=True)
        process.start()
        there.close()
        address = here.recv()
        _alive[address] = process
        return Handle(address)


def _serve(ready: Connection, kind: type, arguments: tuple[Any, ...]) -> None:
    """The actor's process: one call after the other, each client's in its order."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a forked driver has handlers of its own
        signal.signal(number, signal.SIG_DFL)
    worker.ray = heartbeat.ray = sys.modules[__name__]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener = Listener(("127.0.0.1", 0), backlog=8, authkey=bytes(multiprocessing.current_process().authkey))
    calls: SimpleQueue[tuple[Connection, bytes]] = SimpleQueue()

    def listen(client: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                calls.put((client, client.recv_bytes()))

    def accept() -> None:
        while True:
            threading.Thread(target=listen, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    ready.send(listener.address)
    actor = kind(*arguments)
    while True:
        client, call = calls.get()
        number, name, given, options = pickle.loads(call)
        try:
            answer = (number, None, getattr(actor, name)(*given, **options))
        except Exception:
            answer = (number, traceback.format_exc(), None)
        with contextlib.suppress(OSError):
            client.send_bytes(pickle.dumps(answer))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# -------------------------------------------------------------------------------- as in the module `ray`


def remote(**_: Any) -> type[_Actor]:
    return _Actor


def get(calls: Any, *, timeout: float | None = None) -> Any:
    return calls.result(timeout) if isinstance(calls, Future) else [call.result(timeout) for call in calls]


def wait(calls: Sequence[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    """At least one: `num_returns` is how many there may be at most."""
    ready = wait_for(calls, timeout=timeout, return_when=FIRST_COMPLETED).done
    done = [call for call in calls if call in ready][:num_returns]
    return done, [call for call in calls if call not in done]


def is_initialized() -> bool:
    return bool(_alive)


def get_runtime_context() -> SimpleNamespace:
    return SimpleNamespace(get_node_id=lambda: _HERE.id)


def kill(actor: Handle, *, no_restart: bool = True) -> None:
    assert no_restart, "nothing starts again here"
    process = _alive.pop(actor.address, None)
    if process is not None:
        process.kill()
        process.join()


def shutdown() -> None:
    for address in list(_alive):
        kill(Handle(address))


@contextlib.contextmanager
def in_place_of_ray() -> Iterator[None]:
    def reserve(cluster: ClusterConfig, _: int) -> Placement:
        count = cluster.num_workers
        return Placement(None, tuple(range(count)), (_HERE,) * count, _HERE)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        for module in (group, environments):
            patch.setattr(module, "ray", sys.modules[__name__])
        patch.setattr(group, "start_ray", lambda _: None)
        patch.setattr(group, "require_room", lambda *_: None)
        patch.setattr(group, "reserve", reserve)
        try:
            yield
        finally:
            shutdown()
