"""`python -m tests.readers TARGET HEAD`: an EAGLE-3 head that `specdec distill --eagle` made, read by vLLM on a CPU.

vLLM, in an environment of its own that is made once (some 2.5 GB), continues prompts with the head, one after another.
Its texts must be the target's greedy texts, and of each text the number of drafts, and of those whose first, second and
third token were accepted, must be those of the chains that our network drafts along it: a head that is read in another
way drafts others. Prints a table; ends with 1 if a text or a count differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from specdec.engine.eagle.features import states_entering
from specdec.engine.eagle.folder import load_eagle, target_facts
from specdec.engine.eagle.network import EagleHead
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.transformers_model import read_weights
from tests.support.environments import vllm_python

SCRIPT = Path(__file__).parent / "scripts" / "vllm_eagle3.py"
PROMPTS = Path("specdec/embedded/heldout_prompts.jsonl")
DRAFT_LENGTH, TOKENS = 3, 48


class Drafts:
    """The greedy chains of a head along texts of its target, in float32."""

    def __init__(self, target: str, head: Path) -> None:
        folder = open_model_folder(target)
        self.end_token_ids = folder.end_token_ids
        self._model = read_weights(target, folder, folder.digest, torch.float32).eval()
        self._head: EagleHead = load_eagle(head, target_facts(folder))

    @torch.inference_mode()
    def text(self, prompt: Sequence[int]) -> list[int]:
        """The target's own greedy text, up to its end, and a last chain beyond it."""
        ids = list(prompt)
        for _ in range(TOKENS + DRAFT_LENGTH):
            ids.append(int(self._model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    @torch.inference_mode()
    def chain(self, features: torch.Tensor, tokens: Sequence[int]) -> list[int]:
        """The draft tokens behind `tokens`, of whose positions but the last there are features."""
        table, head = self._model.get_input_embeddings().weight, self._head
        features, after, found = features[: len(tokens) - 1], list(tokens[1:]), []
        for _ in range(DRAFT_LENGTH):
            x = head(features[None], table[torch.tensor(after)][None], torch.arange(len(after)))[0, -1]
            found.append(int(head.target_ids[head.logits(x).argmax()]))
            features, after = torch.cat([features, x[None]]), [*after, found[-1]]
        return found

    @torch.inference_mode()
    def counted(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What vLLM's script prints of a prompt."""
        text = self.text(prompt)
        every = [*prompt, *text]
        with states_entering(self._model.base_model, self._head.config.aux_layer_ids) as states:
            self._model.base_model(input_ids=torch.tensor([every]))
        features = self._head.fc(torch.cat([states[index][0] for index in self._head.config.aux_layer_ids], -1))
        length, drafts, accepted = 1, 0, [0] * DRAFT_LENGTH
        while length < TOKENS and text[length - 1] not in self.end_token_ids:
            drafted = self.chain(features, every[: len(prompt) + length])
            following = text[length : length + DRAFT_LENGTH]
            right = next((place for place in range(DRAFT_LENGTH) if drafted[place] != following[place]), DRAFT_LENGTH)
            drafts += 1
            accepted = [count + (place < right) for place, count in enumerate(accepted)]
            committed = text[length : length + right + 1]
            ends = (place + 1 for place, token_id in enumerate(committed) if token_id in self.end_token_ids)
            length += next(ends, len(committed))
        return {"tokens": text[: min(length, TOKENS)], "drafts": drafts, "accepted": accepted}


def main(arguments: Sequence[str] | None = None) -> int:
    """Drafts on both sides and compares; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.readers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="folder of the target, in safetensors files")
    parser.add_argument("head", type=Path, help="folder of its head")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL with the field prompt (%(default)s)")
    parser.add_argument("--count", type=int, default=20, help="prompts that are read (%(default)s)")
    parser.add_argument(
        "--environments", type=Path, default=Path("out/clients"), help="folder of the environments (%(default)s)"
    )
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(Path(options.target) / "tokenizer.json"))
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.count]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    job = {"target": options.target, "head": str(options.head), "prompts": prompts}
    python = vllm_python(options.environments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"  # vLLM's processes print after it
        job |= {"draft_length": DRAFT_LENGTH, "token_count": TOKENS, "report": str(file)}
        done = subprocess.run([python, SCRIPT], input=json.dumps(job), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return 1
        report = json.loads(file.read_text(encoding="utf-8"))
    own = Drafts(options.target, options.head)
    table, is_equal = Table("prompt", "tokens", "drafts", "accepted by position", f"vLLM {report['version']}"), True
    for index, (prompt, theirs) in enumerate(zip(prompts, report["answers"], strict=True)):
        found = own.counted(prompt)
        is_equal &= found == theirs
        told = "equal" if found == theirs else f"{theirs['drafts']} drafts, {theirs['accepted']}"
        table.add_row(str(index), str(len(found["tokens"])), str(found["drafts"]), str(found["accepted"]), told)
    Console().print(table)
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main())
