"""The short way of repeated calls with real torch tensors: torch's own comparison tells apart what it must, and results stay those of
a kernel that sees the call for the first time."""

from __future__ import annotations

import pytest

import fagen
from fagen.interop.pytorch import matcher, strided_allocator
from fagen.launch import Kernel

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernel(compiled):
    return compiled("fa3", head_dim=64)


def fresh(kernel):
    return Kernel(kernel.plan, kernel.source, kernel.cubin, kernel.report)


def qkv(torch, batch=2, sq=130, sk=200, hq=4, hkv=2, seed=0, d=64):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(batch, n, h, d, device="cuda", generator=generator).bfloat16() for n, h in ((sq, hq), (sk, hkv), (sk, hkv))]


def same(torch, a, b):
    torch.cuda.synchronize()
    return all(torch.equal(x.contiguous(), y.contiguous()) for x, y in zip(a, b))


def test_torchs_comparison_tells_apart_what_it_must(torch):
    q, k, v = qkv(torch)
    matches = matcher(torch, (q, k, v))
    assert matches(q, k, v) and matches(*qkv(torch, seed=1)), "else every call takes the longer way"
    assert matches(q.new_empty(q.shape).fill_(0), k, v), "another address is the same kind"
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    others = {
        "dtype": q.half(),
        "shape": q[:, :-1].contiguous(),
        "strides": turned,
        "a view": torch.cat((q, q), 2)[:, :, :4],
        "device": q.cpu(),
        "layout": q.to_sparse(),
        "meta": q.to("meta"),
        "negated": torch._neg_view(q),
        "NumPy": q.float().cpu().numpy(),
        "None": None,
    }
    for name, other in others.items():
        assert not matches(other, k, v), name
    assert not matches(q, k, v.float()) and not matches(q, k.cpu(), v)
    if torch.cuda.device_count() > 1:
        assert not matches(q.to("cuda:1"), k, v)
    changed = q.clone()
    assert matches(changed, k, v)
    changed.resize_(2, 100, 4, 64)
    assert not matches(changed, k, v), "the same object has other sizes"


def test_the_fast_functions_of_torch_are_there(torch):
    """They are not public. Without them calls are as right, and slower."""
    q, k, v = qkv(torch)
    assert matcher(torch, (q, k, v))(q, k, v)
    out = strided_allocator(torch)((2, 3, 4), (12, 4, 1), torch.float32)
    assert out.is_contiguous() and out.shape == (2, 3, 4) and out.dtype == torch.float32 and out.is_cuda
    with torch.inference_mode():
        assert strided_allocator(torch)((2, 3), (3, 1), torch.float32).is_inference()


def test_kinds_of_call_in_any_order(torch, kernel):
    plain = [qkv(torch, seed=i) for i in range(3)]
    short = qkv(torch, sq=77, seed=5)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(torch, seed=6)]
    packed = torch.cat([x.unsqueeze(2) for x in qkv(torch, sk=130, hkv=4, seed=7)], 2).unbind(2)
    calls = [*plain, short, turned, packed]
    want = [fresh(kernel)(*c) for c in calls]
    for order in ((0, 1, 2, 3, 4, 5), (5, 0, 4, 1, 3, 2), (0, 0, 3, 3, 5, 5), (4, 3, 2, 1, 0, 0)):
        for i in order:
            given = [torch.full_like(x, float("nan")) for x in want[i]]
            assert same(torch, kernel(*calls[i]), want[i])
            assert same(torch, kernel(*calls[i], *given), want[i]) and same(torch, given, want[i])


def test_inputs_that_come_and_go(torch, kernel):
    """The allocator hands the same addresses out again, for other tensors."""
    for i in range(30):
        tensors = qkv(torch, sq=64 + 32 * (i % 3), sk=100 + 50 * (i % 2), seed=i)
        assert same(torch, kernel(*tensors), fresh(kernel)(*tensors))
        del tensors


def test_modes_of_autograd(torch, kernel):
    q, k, v = qkv(torch)
    want = kernel(q, k, v)
    with torch.inference_mode():
        out, lse = kernel(q, k, v)
        assert out.is_inference() and same(torch, (out, lse), want)
    with torch.no_grad():
        assert same(torch, kernel(q, k, v), want)
    q.requires_grad_()
    out, lse = kernel(q, k, v)
    assert not out.requires_grad and same(torch, (out, lse), want)


def test_attention_without_lse_on_streams_and_in_graphs(torch):
    """All of them may write the unwanted lse to the same place at the same time."""
    problems = [qkv(torch, sq=900 + 128 * i, sk=3000, seed=i, d=128) for i in range(4)]
    want = [fagen.attention(*p, return_lse=True) for p in problems]
    for p in problems:
        fagen.attention(*p)
    streams = [torch.cuda.Stream() for _ in problems]
    graphs = []
    for p, stream in zip(problems[2:], streams[2:]):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fagen.attention(*p)  # the warm-up on this stream
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = fagen.attention(*p)
        graphs.append((graph, result))
    torch.cuda.synchronize()
    for _ in range(20):
        eager = []
        for p, stream in zip(problems[:2], streams):
            with torch.cuda.stream(stream):
                eager.append(fagen.attention(*p))
        for (graph, _), stream in zip(graphs, streams[2:]):
            with torch.cuda.stream(stream):
                graph.replay()
        lse = fagen.attention(*problems[0], return_lse=True)[1]
        torch.cuda.synchronize()
        for out, (expected, _) in zip([*eager, *(r for _, r in graphs)], want):
            assert torch.equal(out, expected)
        assert torch.equal(lse, want[0][1])


def test_outputs_are_on_the_device_of_the_inputs(torch, kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, want = qkv(torch), None
    second = [x.to("cuda:1") for x in first]
    for current in (0, 1):
        with torch.cuda.device(current):
            for tensors in (first, second, first, second):
                out, lse = kernel(*tensors)
                assert out.device == lse.device == tensors[0].device
                assert fagen.attention(*tensors).device == tensors[0].device
                want = want or (out.cpu(), lse.cpu())
                assert same(torch, (out.cpu(), lse.cpu()), want)
