"""The test device is as asynchronous as a GPU, and computes what the CPU does."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.lag as lag

SLOW = 0.15
"""Seconds that a slow kernel takes: enough for the host to be far ahead."""


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Each test begins and ends with nothing queued and no kernel held back."""
    torch.manual_seed(0)
    yield
    lag.fuzz(None)
    lag.poison(False)
    lag.synchronize()


# ---------------------------------------------------------------- queues


def test_host_goes_on() -> None:
    done = lag.Event()
    lag.sleep(SLOW)
    total = (torch.ones(3, device="lag") * 3).sum()
    done.record()
    assert not done.query()
    assert not lag.current_stream().query()
    assert total.item() == 9
    assert done.query()
    assert lag.current_stream().query()


def test_module_is_torchs() -> None:
    assert torch.get_device_module("lag") is lag
    assert torch.get_device_module(torch.device("lag", 0)) is lag
    assert torch.ones(1, device="lag").device == torch.device("lag", 0)
    assert lag.device_count() == 1


def test_streams_are_independent() -> None:
    other = lag.Stream(priority=-1)
    lag.sleep(SLOW)
    with lag.stream(other):
        assert lag.current_stream() is other
        one = torch.ones(1, device="lag")
    other.synchronize()
    assert not lag.default_stream().query()
    assert lag.current_stream() is lag.default_stream()
    lag.synchronize()
    assert one.item() == 1
    assert other.priority == -1


def test_threads_begin_on_the_default_stream() -> None:
    seen: list[lag.Stream] = []
    with lag.stream(lag.Stream()):
        thread = threading.Thread(target=lambda: seen.append(lag.current_stream()))
        thread.start()
        thread.join()
    assert seen == [lag.default_stream()]


def _crossing(wait: bool) -> float:
    """Written on one stream, read on another."""
    writer, reader = lag.Stream(), lag.Stream()
    data = torch.zeros(8, device="lag")
    lag.synchronize()
    for _ in range(30):
        with lag.stream(writer):
            data.add_(1)
            written = writer.record_event()
        if wait:
            reader.wait_event(written)
        with lag.stream(reader):
            data.mul_(1.01)
            read = reader.record_event()
        if wait:
            writer.wait_event(read)
    lag.synchronize()
    return float(data.sum().item())


def test_missing_wait_is_a_wrong_number() -> None:
    lag.fuzz(1)
    expected = _crossing(wait=True)
    right = torch.zeros(8)
    for _ in range(30):
        right.add_(1).mul_(1.01)
    assert expected == right.sum().item()
    assert _crossing(wait=False) != expected


def test_events() -> None:
    first, second = lag.Event(enable_timing=True), lag.Event(enable_timing=True)
    other = lag.Stream()
    first.synchronize()  # never recorded: nothing to wait for
    first.record()
    lag.sleep(SLOW)
    second.record()
    second.wait(other)
    after = other.record_event()
    assert not after.query()
    after.synchronize()
    assert second.query()
    assert first.elapsed_time(second) > SLOW * 900


def test_wait_stream_takes_what_is_queued_by_then() -> None:
    other = lag.Stream()
    x = torch.zeros(4, device="lag")
    lag.sleep(SLOW)
    x.add_(1)
    other.wait_stream(lag.current_stream())
    with lag.stream(other):
        y = x * 2
    other.synchronize()
    assert y.tolist() == [2.0] * 4


def test_failing_kernel_is_raised_at_the_next_wait(capfd: pytest.CaptureFixture[str]) -> None:
    table = torch.zeros(3, 2, device="lag")
    rows = F.embedding(torch.tensor([7], device="lag"), table)
    with pytest.raises(lag.KernelError, match="index out of range"):
        lag.synchronize()
    assert "index out of range" in capfd.readouterr().err
    assert rows.shape == (1, 2)
    assert table.sum().item() == 0


def test_stream_without_owner_ends_its_thread() -> None:
    stream = lag.Stream()
    thread = stream.thread
    assert thread.daemon
    assert thread.name.startswith("lag-stream-")
    del stream
    thread.join(5)
    assert not thread.is_alive()


# ---------------------------------------------------------------- the host and its waits


@pytest.mark.parametrize(
    "read",
    [
        Tensor.item,
        bool,
        float,
        Tensor.tolist,
        Tensor.cpu,
        Tensor.nonzero,
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(()).copy_(x),
        lambda x: x[x > 0],
        lambda x: lag.current_stream().synchronize(),
        lambda x: lag.synchronize(),
        lambda x: lag.current_stream().record_event().synchronize(),
    ],
)
def test_reading_waits_and_is_counted(read: Callable[[Tensor], Any]) -> None:
    x = torch.zeros((), device="lag")
    before = lag.host_waits()
    lag.sleep(SLOW / 3)
    x.add_(1)
    done = lag.current_stream().record_event()
    assert lag.host_waits() == before
    read(x)
    assert done.query()
    assert lag.host_waits() == before + 1
    assert "test_lag.py" in lag.host_wait_places()[-1]


def test_a_training_step_does_not_wait() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)).to("lag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 4).to("lag"), torch.randint(2, (8,)).to("lag")
    before = lag.host_waits()
    lag.sleep(SLOW * 3)
    done = lag.current_stream().record_event()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert lag.host_waits() == before
    assert not done.query()


def test_copies_without_blocking() -> None:
    pinned = torch.zeros(3).pin_memory()
    assert pinned.is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned()
    assert not torch.zeros(3).is_pinned()
    before = lag.host_waits()
    lag.sleep(SLOW)
    x = torch.ones(3, device="lag")
    pinned.copy_(x, non_blocking=True)
    host = torch.zeros(3).copy_(x, non_blocking=True)
    moved = x.to("cpu", non_blocking=True)
    copied = lag.current_stream().record_event()
    assert pinned.sum() == 0
    assert lag.host_waits() == before
    copied.synchronize()
    assert pinned.tolist() == host.tolist() == moved.tolist() == [1, 1, 1]


def test_copies_to_the_device() -> None:
    plain, pinned = torch.zeros(3), torch.zeros(3).pin_memory()
    lag.sleep(SLOW)
    snapshot = plain.to("lag", non_blocking=True)
    blocking = pinned.to("lag")
    late = pinned.to("lag", non_blocking=True)
    plain.add_(1)
    pinned.add_(1)
    assert snapshot.sum().item() == 0
    assert blocking.sum().item() == 0
    assert late.sum().item() == 3


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="lag") + torch.ones(3)
    with pytest.raises(TypeError, match="numpy"):
        torch.ones(3, device="lag").numpy()
    assert (torch.ones(3, device="lag") * torch.tensor(2.0)).sum().item() == 6


# ---------------------------------------------------------------- memory


def test_memory_is_counted_by_storage() -> None:
    gc.collect()
    before = lag.memory_allocated()
    lag.reset_peak_memory_stats()
    buffer = torch.empty(1000, device="lag")
    parts = buffer.split(100)
    assert lag.memory_allocated() == before + 4000
    del buffer
    assert lag.memory_allocated() == before + 4000
    del parts
    assert lag.memory_allocated() == before
    assert lag.max_memory_allocated() == before + 4000


def test_addresses() -> None:
    a, b = torch.empty(10, device="lag"), torch.empty(10, device="lag")
    assert 0 != a.data_ptr() != b.data_ptr() != 0
    assert a[3:].data_ptr() == a.data_ptr() + 12
    assert a[3:].untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    assert a.view(torch.uint8).shape == (40,)
    assert a.view(2, 5).t().untyped_storage().data_ptr() == a.untyped_storage().data_ptr()


def _freed_too_early(record: bool) -> float:
    other = lag.Stream()
    x = torch.ones(100, device="lag")
    other.wait_stream(lag.current_stream())
    with lag.stream(other):
        lag.sleep(SLOW)
        total = x.sum()
    if record:
        x.record_stream(other)
    del x
    other.synchronize()
    return float(total.item())


def test_memory_freed_too_early_is_poisoned() -> None:
    lag.poison(True)
    assert _freed_too_early(record=True) == 100
    assert _freed_too_early(record=False) != 100


def test_flat_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to("lag")
    sizes = [p.numel() for p in model.parameters()]
    buffer = torch.zeros(sum(sizes), device="lag")
    for p, part in zip(model.parameters(), buffer.split(sizes), strict=True):
        p.grad = part.view_as(p)
    model(torch.ones(2, 3, device="lag")).sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert torch.equal(torch.cat([g.flatten() for g in grads if g is not None]), buffer)
    assert buffer.abs().sum().item() > 0
    other = torch.zeros_like(buffer)
    torch._foreach_copy_(list(other.split(sizes)), list(buffer.split(sizes)))
    torch._foreach_add_(list(other.split(sizes)), list(buffer.split(sizes)), alpha=2.0)
    assert torch.equal(other, buffer * 3)
    assert torch.equal(buffer.view(torch.uint8).cpu(), buffer.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7, dtype=dtype)
    both = [((t @ t.t()).softmax(-1) * 3 + t.mean(1)).cpu() for t in (x, x.to("lag"))]
    assert both[1].dtype is dtype
    assert torch.equal(*both)


# ---------------------------------------------------------------- modules


def test_modules_move_copy_and_are_saved() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    weight = model[0].weight
    model.to("lag")
    assert model[0].weight is weight
    assert weight.device.type == "lag"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight.add_(1)
    assert not torch.equal(twin[0].weight, weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location="cpu")
    assert {value.device.type for value in state.values()} == {"cpu"}
    twin.load_state_dict(state)
    assert torch.equal(twin[0].weight, weight)
    file.seek(0)
    assert torch.load(file)["0.weight"].device.type == "lag"
    model.cpu()
    assert model[0].weight is weight
    assert torch.equal(weight, state["0.weight"])


def test_autograd_hooks() -> None:
    seen: list[tuple[str, lag.Stream]] = []
    stream = lag.Stream()
    w = torch.ones(3, device="lag", requires_grad=True)
    w.register_hook(lambda g: seen.append(("grad", lag.current_stream())))
    w.register_post_accumulate_grad_hook(lambda p: seen.append(("done", lag.current_stream())))
    loss = (w * w).sum()
    with lag.stream(stream):
        stream.wait_stream(lag.default_stream())
        loss.backward(retain_graph=True)
        loss.backward()
        stream.synchronize()
        assert w.grad is not None
        assert w.grad.tolist() == [4, 4, 4]
    assert seen == [("grad", stream), ("done", stream)] * 2


def test_backward_is_queued_on_the_callers_stream() -> None:
    stream = lag.Stream()
    w = torch.ones(3, device="lag", requires_grad=True)
    loss = w.exp().sum()
    lag.synchronize()
    with lag.stream(stream):
        lag.sleep(SLOW)
        loss.backward()
    assert lag.default_stream().query()
    assert not stream.query()
