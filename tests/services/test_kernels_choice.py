"""SPECDEC_KERNELS with real services: it is no setting, and reaches every process that loads a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.config import DraftSettings
from specdec.engine.cpu.kernels import CHOICE_VARIABLE
from specdec.errors import ConfigError
from specdec.launch.children import Child, arguments_of
from specdec.settings import KERNELS_VARIABLE
from tests.support.engine_models import make_tiny_model


@pytest.mark.lengthy
@pytest.mark.more
def test_the_choice_of_kernels_reaches_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: with SPECDEC_KERNELS=off in the environment of a command its services run without kernels, which the log
    says; an instruction set that is none ends the start with the names there are.

    Conclusive: the service is a process of its own, started as `serve` starts it.
    """
    assert KERNELS_VARIABLE == CHOICE_VARIABLE
    model = make_tiny_model(tmp_path / "model", "llama")
    arguments = arguments_of(DraftSettings(model=str(model), port=0, threads=1))
    with (tmp_path / "log").open("w+") as log:
        monkeypatch.setenv(KERNELS_VARIABLE, "sse")
        refused = Child("draft", arguments)
        monkeypatch.setenv(KERNELS_VARIABLE, "off")
        with refused, Child("draft", arguments, stderr=log) as child:
            child.wait_ready()
            with pytest.raises(ConfigError, match="SPECDEC_KERNELS is 'sse'; it must be one of avx2"):
                refused.wait_ready()
        log.seek(0)
        lines = [json.loads(line) for line in log]
    (serving,) = [line for line in lines if line["event"] == "serving"]
    assert serving["kernels"] == "none"
    assert any("kernels" in line["event"] and "off" in line["event"] for line in lines)
