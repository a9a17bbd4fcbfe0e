"""Devices: their names on the command line, errors for missing ones, default block sizes, free memory."""

from __future__ import annotations

import ctypes
import os
import re

import torch

from specdec.errors import ConfigError

# torch's CPU library keeps code and scratch memory for every shape it has seen, in two caches of 1,024 shapes, which
# would take hundreds of megabytes.
SHAPE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}  # of oneDNN, and of torch's use
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # options of glibc's mallopt
MAPPED_BYTES_MIN = 32 << 20  # the most it takes; larger allocations are mapped anew
FREED_BYTES_MAX = 64 << 20  # some eight of the largest tensors of a step
DEVICE_NAME = re.compile(r"cuda(:\d{1,3})?")


def find_device(asked: str) -> torch.device:
    """Returns the device of a name: cpu, cuda (the first GPU), cuda:N, or auto, a GPU if there is one.

    Raises ConfigError, which names the available devices and the remedy.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cpu":
        return torch.device("cpu")
    if not DEVICE_NAME.fullmatch(asked):
        raise ConfigError(f"device is {asked!r}; it must be auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        reason = "finds no GPU it can use" if torch.version.cuda else "was built without CUDA"
        raise ConfigError(
            f"device is {asked!r}, but torch {torch.__version__} {reason}: give cpu, or install the driver and a torch "
            "built for it"
        )
    index = int(asked.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device is {asked!r}, but this machine has {count} GPUs: give cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def default_block_size(device: torch.device) -> int:
    """Returns the default positions in a cache block: attention on a GPU reads blocks of 256 in place."""
    return 256 if device.type == "cuda" else 64


def free_memory_bytes(device: torch.device) -> int:
    """Returns the free memory of the device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def prepare_libraries(threads: int | None) -> None:
    """Sets the number of CPU threads of a step (None: all cores), and bounds the memory that the CPU library keeps,
    unless the environment does. Call it before the first computation."""
    for name, capacity in SHAPE_CACHES.items():
        os.environ.setdefault(name, capacity)
    torch.set_num_threads(threads or os.cpu_count() or 1)


def keep_freed_memory() -> None:
    """Tells the C library to keep up to FREED_BYTES_MAX of the memory that a step frees for the next one. Call it after
    loading.

    By default glibc gives the end of its heap back when twice the largest freed tensor is free there, and the kernel
    zeroes each page of the next: measured, two thirds of the time of a step of prompts. Other libraries have no such
    options.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        mallopt(M_TRIM_THRESHOLD, FREED_BYTES_MAX)
