"""`specdec advise` with packed weights, of the target and of a draft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gguf_models import make_tiny_gguf


@pytest.mark.more
def test_a_packed_target_and_its_dense_and_packed_drafts(tmp_path: Path) -> None:
    """Claim: target and drafts may be GGUF files or folders in any mixture: agreement is measured with the packed
    weights, and the packed draft is as good as the dense one of which it was made. Conclusive: both are the target but
    for the rounding of 8 bits, so greedy acceptance is nearly 1; of random models it would be some 0."""
    target = make_tiny_gguf(tmp_path / "a", "llama", "Q8_0")
    packed = make_tiny_gguf(tmp_path / "b", "llama", "Q4_1")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def total(values):\nreturn sum\nfor value in\nif value is not None\n")
    told = f"--target {target} --draft {tmp_path / 'a' / 'source'} --draft {packed} --prompts {prompts} --json"
    flags = f"{told} --text-tokens 16 --text-temperatures 0 --threads 1 --device cpu".split()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "specdec.cli", "advise", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for draft in json.loads(done.stdout)["drafts"]:
        (cell,) = draft["cells"]
        assert cell["acceptance"]["GREEDY"]["value"] > 0.7, draft
