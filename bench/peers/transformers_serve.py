"""`transformers` as a process that answers requests on its standard input, one JSON object a line.

Usage: transformers_serve.py SETTINGS, a JSON object: model, dtype, threads, draft (a folder, or ""), and `generation`,
what `generate` is told beside. It prints a line {"ready": true}, then for each request {ids, max_tokens, temperature,
seed} a line for each piece of output, {"ids": [...]}, and {"end": true}.
"""

import json
import sys
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer


class Lines(BaseStreamer):
    """Prints every piece but the first, which is the prompt."""

    def __init__(self) -> None:
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            print(json.dumps({"ids": value.flatten().tolist()}), flush=True)
        self.is_prompt = False

    def end(self) -> None:
        pass


def load(folder: str, dtype: str) -> Any:
    """Loads a model whose texts have a fixed length."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def serve(asked: dict[str, Any]) -> None:
    torch.set_num_threads(asked["threads"])
    transformers.utils.logging.set_verbosity_error()
    target = load(asked["model"], asked["dtype"])
    more = dict(asked["generation"])
    if asked["draft"]:
        more["assistant_model"] = draft = load(asked["draft"], "float32")
        for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
            if name in more:
                setattr(draft.generation_config, name, more.pop(name))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        torch.manual_seed(request["seed"])
        ids = torch.tensor([request["ids"]])
        heat = request["temperature"]
        sampling = {"do_sample": True, "temperature": heat, "top_k": 0, "top_p": 1.0} if heat else {"do_sample": False}
        target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["max_tokens"],
            pad_token_id=0,
            streamer=Lines(),
            **sampling,
            **more,
        )
        print(json.dumps({"end": True}), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
