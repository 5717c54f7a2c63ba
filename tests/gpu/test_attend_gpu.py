"""`fagen.attention` on a GPU: right by the policy of `fagen check`, and capturable."""

from __future__ import annotations

import pytest

import fagen
from fagen import Attention, oracle, tuned
from fagen.oracle import CheckProblem, make_case
from fagen.plan.kernel import Problem

pytestmark = pytest.mark.gpu

CASES = [
    (head_dim, dtype, mask, sq, sk)
    for head_dim in (64, 128, 256)
    for dtype in ("bf16", "fp16")
    for mask in ("full", "causal")
    for sq, sk in ((203, 511), (333, 4100))
] + [(128, dtype, mask, 203, 511) for dtype in ("e4m3", "int8") for mask in ("full", "causal")]


@pytest.mark.parametrize(("head_dim", "dtype", "mask", "sq", "sk"), CASES)
def test_numpy_against_float64(device, head_dim, dtype, mask, sq, sk):
    attention = Attention(head_dim=head_dim, dtype=dtype, mask=mask)
    problem = CheckProblem(2, sq, sk, 4, 2)
    schedule = tuned.choose(attention, problem, device).schedule
    c = make_case(attention, schedule, problem, seed=sq + sk)
    out, lse = fagen.attention(c.q, c.k, c.v, causal=mask == "causal", return_lse=True, **c.descales)
    verdict = oracle.check(attention, c.q, c.k, c.v, out, lse, schedule=schedule, **c.row_descales)
    assert verdict.passed, verdict.reason


def tensors(torch, batch=2, sq=300, sk=700, hq=4, hkv=2, d=128):
    generator = torch.Generator(device="cuda").manual_seed(sq)
    sizes = ((sq, hq), (sk, hkv), (sk, hkv))
    return [torch.randn(batch, n, h, d, device="cuda", generator=generator).bfloat16() for n, h in sizes]


def test_torch_gives_the_bits_of_the_chosen_kernel(torch, device):
    q, k, v = tensors(torch)
    attention = Attention(head_dim=128, mask="causal")
    choice = tuned.choose(attention, Problem(2, 300, 700, 4, 2), device)
    want, want_lse = fagen.compile(attention, choice.schedule)(q, k, v)
    out, lse = fagen.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_a_graph_captures_it_after_one_call(torch):
    q, k, v = tensors(torch)
    want = fagen.attention(q, k, v)
    out = torch.empty_like(want)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fagen.attention(q, k, v, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        fagen.attention(q, k, v, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
