"""Stage `bandwidth`: how fast the device reads and copies memory."""

from __future__ import annotations

import torch

from bench.gpu_session.timing import device_s
from bench.gpu_session.worker import Session

READS = 20


def run(session: Session) -> None:
    """Reports 10^9 bytes a second of the faster of a sum over a large buffer and a copy of it, best of several."""
    byte_count = 1 << (22 if session.is_small else 31)
    buffer = torch.ones(byte_count // 4, device=session.device)
    other = torch.empty_like(buffer)
    read_s = min(device_s(session.device, buffer.sum) for _ in range(READS))
    copied_s = min(device_s(session.device, lambda: other.copy_(buffer)) for _ in range(READS))
    read, copied = byte_count / read_s / 1e9, 2 * byte_count / copied_s / 1e9
    session.add(gb_per_s=max(read, copied), read_gb_per_s=read, copy_gb_per_s=copied, buffer_bytes=byte_count)
