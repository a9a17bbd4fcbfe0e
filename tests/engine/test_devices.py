"""The memory that the libraries keep: for shapes, and between steps."""

from __future__ import annotations

import subprocess
import sys

GROWTH_MB_MAX = 150.0
PRODUCTS = """
import torch
from specdec.engine.loading.devices import prepare_libraries

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

prepare_libraries(1)
weight = torch.ones(64, 32, dtype=torch.bfloat16)
begin_mb = resident_mb()
with torch.inference_mode():
    for rows in range(1, 1025):
        torch.nn.functional.linear(torch.ones(rows, 32, dtype=torch.bfloat16), weight)
print(resident_mb() - begin_mb)
"""


def test_the_memory_of_the_cpu_library_is_bounded() -> None:
    """Claim: products of 1,024 different numbers of rows leave less than GROWTH_MB_MAX behind. Source: a draft grew by
    more than 200 MB in its first hour. Conclusive on CPUs where bfloat16 products are oneDNN's: by its own settings it
    keeps some 400 MB; elsewhere nothing grows."""
    done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < GROWTH_MB_MAX


STEPS = """
import resource
import torch
from specdec.engine.loading.devices import keep_freed_memory, prepare_libraries

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    tensors = [torch.ones(1 << 21, dtype=torch.uint8) for _ in range(12)]

prepare_libraries(1)
keep_freed_memory()
step()
begin = faults()
for _ in range(10):
    step()
print(faults() - begin)
"""


def test_a_step_takes_no_memory_anew() -> None:
    """Claim: tensors of a step, 12 of 2 MiB, cost next to no page faults once a step has had them. Source: by glibc's
    own settings each such step faults 6,100 times, which took two thirds of the time of a step of prompts. Conclusive
    with glibc: ten steps are counted, without the setting they fault 61,000 times; a kernel that takes idle pages back
    may cause one step's again."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 12_300
