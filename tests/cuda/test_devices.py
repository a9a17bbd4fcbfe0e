"""Devices by name: those of the machine, the error of a missing one, and the settings that follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.config import DraftSettings
from specdec.engine.loading.devices import default_block_size, find_device, free_memory_bytes
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import backend_for
from specdec.errors import ConfigError
from tests.support.engine_models import make_tiny_model

CUDA = torch.device("cuda:1")


def test_a_device_that_is_not_there_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: without a GPU `auto` is a CPU and `cuda` an error with reason and remedy; with two, `auto` and `cuda` are
    the first, and a third is an error that names the existing ones; other names are errors of their own.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"'cuda', but torch .* give cpu, or install"):
        find_device("cuda")
    for name in ("tpu", "cuda:", "cuda:x", "cuda:-1", "meta", ""):
        with pytest.raises(ConfigError, match="it must be auto, cpu, cuda or cuda:N"):
            find_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda", 0)
    assert find_device("cuda:1") == CUDA
    with pytest.raises(ConfigError, match="has 2 GPUs: give cuda:0 to cuda:1"):
        find_device("cuda:2")


def test_loading_refuses_before_it_reads(tmp_path: Path) -> None:
    """Claim: a missing device is refused before the folder is read."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="device is 'cuda:0'"):
        load_model(str(tmp_path / "nowhere"), device="cuda:0")


def test_what_follows_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: blocks are 64 positions, on a GPU 256; free memory is the GPU's own; --enforce-eager disables graphs, and
    --no-dependent-launch what its name says."""
    assert default_block_size(torch.device("cpu")) == 64 and default_block_size(CUDA) == 256
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert free_memory_bytes(CUDA) == 123 and free_memory_bytes(torch.device("cpu")) > 1 << 20
    for enforce_eager in (False, True):
        backend = backend_for(CUDA, torch.bfloat16, 512, enforce_eager, has_stable_rows=True)
        assert backend.with_graphs != enforce_eager
        other = backend_for(CUDA, torch.bfloat16, 512, False, has_stable_rows=True, dependent_launch=enforce_eager)
        assert other.is_dependent is (None if enforce_eager else False)
    assert DraftSettings(model="m").enforce_eager is False and DraftSettings(model="m").dependent_launch
    assert DraftSettings(model="m").block_size == 0


def test_block_sizes_of_a_cpu_are_eight_or_whole_groups_of_sixteen(tmp_path: Path) -> None:
    """Claim: a CPU's cache takes blocks of 8 positions and of multiples of 16, a GPU's 256 among them; another size is
    an error that names them."""
    model = load_model(str(make_tiny_model(tmp_path / "llama", "llama")))
    for size in (8, 16, 48, 256):
        model.allocate(3, size)
    with pytest.raises(ConfigError, match="block size is 24; on a CPU it must be 8, or a multiple of 16"):
        model.allocate(3, 24)
