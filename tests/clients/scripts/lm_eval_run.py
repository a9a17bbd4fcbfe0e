"""lm-eval: choices and whole texts of local data, scored by `local-completions` with the remote tokenizer and by its
own `hf` model of the same folder; what differs."""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["OMP_NUM_THREADS"] = "1"  # the model is small

import lm_eval  # noqa: E402  # reads the environment

CHOICE_COUNT = 4
NATS_MAX = 1e-3
job = json.load(sys.stdin)
texts = job["texts"]
halves = [(text[: len(text) // 2].rstrip(), text[len(text) // 2 :].split(" ", 1)[-1]) for text in texts]
documents = [
    {
        "text": text,
        "query": query,
        "choices": [halves[(at + step) % len(halves)][1] for step in range(CHOICE_COUNT)],
        "gold": 0,
    }
    for at, (text, (query, _)) in enumerate(zip(texts, halves))
]


def task(folder: Path, name: str, **own: object) -> dict[str, object]:
    """A task on the documents."""
    data = {"test": str(folder / "data.jsonl")}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test", **own}


def samples(model: str, arguments: dict[str, object], folder: Path) -> dict[str, list[dict[str, object]]]:
    """Every document's responses, by task."""
    choice = task(
        folder,
        "choices",
        output_type="multiple_choice",
        doc_to_text="{{query}}",
        doc_to_choice="choices",
        doc_to_target="gold",
        metric_list=[{"metric": "acc"}],
    )
    rolling = task(
        folder,
        "texts",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    found = lm_eval.simple_evaluate(
        model, model_args=arguments, tasks=[choice, rolling], bootstrap_iters=0, random_seed=0, log_samples=True
    )
    return found["samples"]


def numbers(sample: dict[str, object]) -> list[tuple[float, bool]]:
    """Log-likelihood and greediness of each response."""
    return [own if isinstance(own, (list, tuple)) else (own, False) for own in sample["filtered_resps"]]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "data.jsonl").write_text("".join(json.dumps(own) + "\n" for own in documents), encoding="utf-8")
    served = {
        "model": job["model"],
        "base_url": f"{job['base_url']}/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 2,
    }
    remote = samples("local-completions", served, folder)
    local = samples("hf", {"pretrained": job["folder"], "dtype": "float32", "device": "cpu"}, folder)
pairs = [
    (mine, theirs)
    for kind in ("choices", "texts")
    for one, other in zip(remote[kind], local[kind], strict=True)
    for mine, theirs in zip(numbers(one), numbers(other), strict=True)
]
picks = [[own["acc"] for own in side["choices"]] for side in (remote, local)]
largest = max(abs(float(mine[0]) - float(theirs[0])) for mine, theirs in pairs)
answers = {
    "log-likelihoods": len(pairs),
    "within 1e-3 nats": largest < NATS_MAX,
    "other picks": sum(one != other for one, other in zip(*picks)),
    "other greedy ones": sum(bool(mine[1]) != bool(theirs[1]) for mine, theirs in pairs),
}
correct = sum(picks[0])
print(json.dumps({"version": version("lm_eval"), "answers": answers, "largest": largest, "correct": correct}))
