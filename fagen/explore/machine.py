"""The machine as the model sees it: rates and sizes of one GPU, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.steps import DTYPE_BYTES


@dataclass(frozen=True)
class Device:
    """One GPU. Rates are per second, or per clock of one SM."""

    name: str
    sms: int
    clock_mhz: float
    wgmma_flops: int
    """Dense 16-bit WGMMA, operations per clock and SM; 8-bit types twice as many."""
    mma_sync_share: float
    """What mma.sync reaches of the rate of WGMMA."""
    exponentials: int
    """ex2.approx per clock and SM. Packed forms are no faster."""
    hbm_bytes_per_second: float
    """Read plus written, as a copy reaches it."""
    l2_bytes: int
    l2_share: float
    """The part of L2 that holds what all SMs read: each half keeps its own copy of a line that SMs on both sides use."""
    smem_per_sm: int
    smem_reserved: int
    """Shared memory that the system takes of each CTA's."""
    registers_per_sm: int
    threads_per_sm: int
    ctas_per_sm: int
    launch_us: float
    """From the end of one kernel to the first instruction of the next on the same stream."""
    memory_latency_us: float
    """A load that misses L2, until its data can be used."""

    @property
    def l2_usable(self) -> float:
        return self.l2_bytes * self.l2_share

    def tensor_rate(self, unit: str, dtype: str) -> float:
        """Operations per second of one SM's tensor cores with that instruction ("wgmma", "mma_sync") and operand type."""
        rate = self.wgmma_flops * (2 if DTYPE_BYTES[dtype] == 1 else 1) * (self.mma_sync_share if unit == "mma_sync" else 1.0)
        return rate * self.clock_mhz * 1e6

    @property
    def exp_rate(self) -> float:
        """Exponentials per second of one SM."""
        return self.exponentials * self.clock_mhz * 1e6


H200 = Device(
    name="NVIDIA H200",
    sms=132,
    clock_mhz=1830.0,  # at which 132 · 4096 operations a clock are the 989 TFLOP/s of the data sheet; under load the power limit sets less
    wgmma_flops=4096,
    mma_sync_share=0.62,  # Luo et al. 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture": 62 % on average
    exponentials=16,  # CUDA C++ Programming Guide, throughput of special functions on 9.0; measured: 16, packed forms too
    hbm_bytes_per_second=4.3e12,  # measured by a copy, read + written, of 4.8 TB/s on the data sheet
    l2_bytes=60 << 20,
    l2_share=0.5,
    smem_per_sm=228 << 10,
    smem_reserved=1 << 10,
    registers_per_sm=65536,
    threads_per_sm=2048,
    ctas_per_sm=32,
    launch_us=3.0,
    memory_latency_us=1.0,
)
