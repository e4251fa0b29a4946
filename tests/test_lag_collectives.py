"""Collectives of the test device: queued on a stream of their own, as NCCL's are."""

from __future__ import annotations

import multiprocessing
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tests.lag as lag
from tests.lag import groups

TIMEOUT = timedelta(seconds=30)


def _rank(rank: int, port: int, results: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, TIMEOUT)
    group: Any = groups.LagGroup(store, rank, 2, TIMEOUT)
    lag.fuzz(rank)
    found: dict[str, Any] = {}
    lag.sleep(0.15)
    x = torch.full((4,), rank + 1.0, device="lag")
    work = group.allreduce([x])
    work.wait()
    y = x * 2
    found["host went on"] = not work.is_completed()
    found["sum"] = y.tolist()
    options = dist.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([x.fill_(rank)], options).wait()
    found["root's"] = x.tolist()
    out = torch.zeros(2, 3, device="lag")
    data = torch.full((3,), float(rank), device="lag", dtype=torch.float32)
    group.allgather([list(out.unbind(0))], [data]).wait()
    found["gathered"] = out.tolist()
    group.barrier().wait()
    lag.synchronize()
    found.update(_beside_computation(group, rank))
    found.update(_aborted(group, rank))
    _meet(store, "aborted")
    found.update(_failed(store, rank))
    _meet(store, "all done")
    results.put((rank, found))
    results.close()
    results.join_thread()


def _beside_computation(group: Any, rank: int) -> dict[str, Any]:
    """A collective on its own stream ends while the compute stream is still busy."""
    busy = lag.Stream()
    with lag.stream(busy):
        lag.sleep(1.0)
        computed = busy.record_event()
    one = torch.ones(2, device="lag")
    work = group.allreduce([one])
    work.wait()
    return {"beside": one.tolist(), "still computing": not computed.query()}


def _aborted(group: Any, rank: int) -> dict[str, Any]:
    """Rank 1 never comes: rank 0 aborts, and its streams go on."""
    if rank == 1:
        return {}
    x = torch.ones(2, device="lag")
    work = group.allreduce([x])
    work.wait()
    time.sleep(0.1)
    pending = not work.is_completed()
    group.abort()
    lag.synchronize()
    late = group.barrier()
    lag.synchronize()
    errors = [type(each.exception()).__name__ for each in (work, late)]
    return {"pending": pending, "errors": errors, "success": work.is_success()}


def _meet(store: Any, place: str) -> None:
    """Here nobody leaves before the other has come."""
    store.add(place, 1)
    while store.add(place, 0) < 2:
        time.sleep(0.01)


def _failed(store: Any, rank: int) -> dict[str, Any]:
    """Rank 1 leaves the group: what waits for the collective waits until it is aborted."""
    group: Any = groups.LagGroup(dist.PrefixStore("other", store), rank, 2, TIMEOUT)
    group.barrier().wait()
    lag.synchronize()
    if rank == 1:
        group.abort()
        return {}
    x = torch.ones(2, device="lag")
    work = group.allreduce([x])
    work.wait()
    done = lag.current_stream().record_event()
    while not work.is_completed():
        time.sleep(0.01)
    time.sleep(0.1)
    waits = not done.query()
    group.abort()
    lag.synchronize()
    return {"waits": waits, "work's": str(work.exception())}


def test_collectives() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(r, port, results)) for r in range(2)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(10)
        assert process.exitcode == 0
    for rank in range(2):
        mine = found[rank]
        assert mine["host went on"]
        assert mine["sum"] == [6.0] * 4
        assert mine["root's"] == [1.0] * 4
        assert mine["gathered"] == [[0.0] * 3, [1.0] * 3]
        assert mine["beside"] == [2.0, 2.0]
        assert mine["still computing"]
    assert found[0]["pending"]
    assert found[0]["errors"] == ["AbortedError"] * 2
    assert not found[0]["success"]
    assert found[0]["waits"] and found[0]["work's"]


def test_collectives_are_registered() -> None:
    assert dist.Backend.default_device_backend_map["lag"] == "lagccl"
