"""The short way of a call with torch tensors: kinds of call that were checked once and are launched straight away.

A kind of call is all that its checks and its launch depend on, but for addresses, the stream and descales that are numbers: shape,
strides, dtype and device of every tensor, and which arguments are given. Those and the addresses are read from the tensors in every
call, so nothing but sizes outlives one, and no tensor can be taken for another. Every line costs the host: tests/gpu/test_host_cost_gpu.py
prints how much.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .interop import stream_handle
from .interop.arrays import FRAMEWORK_NAMES, contiguous_strides
from .interop.pytorch import matcher, raw_stream, strided_allocator
from .plan.kernel import DESCALES

if TYPE_CHECKING:
    from .arguments import BoundCall

Scales = tuple[Any, Any, Any] | None
"""The DESCALES; None without any."""
Key = tuple[Any, ...]
MAX_LESSONS = 8
"""See `ReadyCall.learn`."""


def key_of(q: Any, k: Any, v: Any, out: Any, lse: Any, scales: Scales) -> Key:
    """The kind of a call; out and lse None where the caller gave none. AttributeError, TypeError or RuntimeError: not all of torch, or
    one without strides (sparse). Contiguous tensors need no strides: of a dimension with one element they do not matter."""
    key: Key = (
        q.shape, k.shape, v.shape, q.is_contiguous() or q.stride(), k.is_contiguous() or k.stride(), v.is_contiguous() or v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip
    if out is not None:
        key += ("out", out.shape, out.is_contiguous() or out.stride(), out.dtype, out.device)
    if lse is not None:
        key += ("lse", lse.shape, lse.is_contiguous() or lse.stride(), lse.dtype, lse.device)
    if scales is not None:
        key += tuple((x.shape, x.stride(), x.dtype, x.device) if hasattr(x, "data_ptr") else None for x in scales)
    return key


class ReadyCall:
    """What calls of one kind need. `number(name, value)`: a descale as the kernel takes it, InputError if it is no number. `tensors`:
    those of q, k, v, out, lse that one such call was given."""

    __slots__ = (
        "_lessons", "_torch", "bound", "current_stream", "device", "empty", "empty_elsewhere", "lse_shape", "lse_sink", "lse_strides",
        "lse_type", "matches", "number", "out_shape", "out_strides", "out_type",
    )  # fmt: skip

    def __init__(self, torch: Any, bound: BoundCall, number: Callable[[str, Any], float], tensors: tuple[Any, ...]):
        self.bound, self.number, self.device = bound, number, bound.device
        self.out_shape, self.lse_shape = bound.out_shape, bound.lse_shape
        self.out_strides, self.lse_strides = contiguous_strides(self.out_shape), contiguous_strides(self.lse_shape)
        self.out_type, self.lse_type = getattr(torch, FRAMEWORK_NAMES[bound.out_dtype]), torch.float32
        self.current_stream = raw_stream(torch)
        self.empty = strided_allocator(torch)
        """On torch's current device, which need not be that of the inputs."""
        self.empty_elsewhere = torch.empty
        self._torch, self._lessons = torch, MAX_LESSONS
        self.matches = matcher(torch, tensors)
        """Whether tensors are of this kind, cheaper than by their key. A False proves nothing: it is also one in another mode of torch
        (inference, autocast) than that in which it was learnt."""
        self.lse_sink = 0
        """Address where an lse that nobody wants is written; 0: none, it is allocated like one that is wanted."""

    def learn(self, tensors: tuple[Any, ...]) -> None:
        """`matches` shall be True of these, which are of this kind; a few times only, lest modes that alternate cost more than they save."""
        if self._lessons:
            self._lessons -= 1
            self.matches = matcher(self._torch, tensors)


class TorchCalls:
    """At most `limit` kinds of call; then the oldest go. Safe to use from many threads."""

    def __init__(self, limit: int):
        self._limit = limit
        self._calls: dict[Key, ReadyCall] = {}
        self._latest: list[ReadyCall | None] = [None, None]
        """Of the latest call without descales that was given both outputs [0], and neither [1]."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._calls)

    def run(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, stream: Any, scales: Scales, with_lse: bool = True
    ) -> tuple[Any, Any] | None:
        """(out, lse) of a call that is queued; lse may be None if neither given nor wanted. None: no such call is remembered, and
        nothing was done. Errors as for `Kernel`."""
        call = None
        if scales is None and (out is None) == (lse is None):
            latest = self._latest[out is None]
            if latest is not None and (latest.matches(q, k, v) if out is None else latest.matches(q, k, v, out, lse)):
                call = latest
        if call is None:
            call = self._find(q, k, v, out, lse, scales)
        if call is None or call.bound.retired:
            return None
        device = call.device
        if out is None:
            out = call.empty(call.out_shape, call.out_strides, call.out_type)
            if out.get_device() != device:
                out = call.empty_elsewhere(call.out_shape, dtype=call.out_type, device=device)
        if lse is None and (with_lse or not call.lse_sink):
            lse = call.empty(call.lse_shape, call.lse_strides, call.lse_type)
            if lse.get_device() != device:
                lse = call.empty_elsewhere(call.lse_shape, dtype=call.lse_type, device=device)
        handle = call.current_stream(device) if stream is None else stream_handle(stream)
        sink = call.lse_sink if lse is None else lse.data_ptr()
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), sink)
        if scales is None:
            call.bound.run(addresses, handle)
        else:
            given = [(x.data_ptr(), 1.0) if hasattr(x, "data_ptr") else (0, call.number(n, x)) for n, x in zip(DESCALES, scales)]
            call.bound.run(addresses, handle, *zip(*given))
        return out, lse

    def _find(self, q: Any, k: Any, v: Any, out: Any, lse: Any, scales: Scales) -> ReadyCall | None:
        try:
            call = self._calls.get(key_of(q, k, v, out, lse, scales))
        except (AttributeError, TypeError, RuntimeError):
            return None
        if call is not None and scales is None and (out is None) == (lse is None):
            if call is self._latest[out is None]:
                call.learn((q, k, v) if out is None else (q, k, v, out, lse))
            self._latest[out is None] = call
        return call

    def get(self, key: Key) -> ReadyCall | None:
        return self._calls.get(key)

    def remember(self, key: Key, call: ReadyCall) -> None:
        with self._lock:
            self._calls.pop(key, None)
            while len(self._calls) >= self._limit:
                self._calls.pop(next(iter(self._calls)))
            self._calls[key] = call

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()
            self._latest = [None, None]
