"""vLLM: greedy texts with an EAGLE-3 head. Reads {"target", "head", "prompts", "draft_length", "token_count",
"report"} from stdin; writes its version and, of each prompt, the tokens, the number of drafts, and how many had their
draft token accepted at each position, to the file `report`."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    length = job["draft_length"]
    drafting = {"method": "eagle3", "model": job["head"], "num_speculative_tokens": length}
    model = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config=drafting,
    )

    def counts() -> tuple[int, list[int]]:
        found = {metric.name: metric for metric in model.get_metrics()}
        accepted = list(found[ACCEPTED].values) if ACCEPTED in found else []
        return (int(found[DRAFTS].value) if DRAFTS in found else 0), accepted or [0] * length

    params = SamplingParams(temperature=0, max_tokens=job["token_count"])
    answers, before = [], counts()
    for prompt in job["prompts"]:
        tokens = list(model.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
        after = counts()
        accepted = [own - other for own, other in zip(after[1], before[1])]
        answers.append({"tokens": tokens, "drafts": after[0] - before[0], "accepted": accepted})
        before = after
    Path(job["report"]).write_text(json.dumps({"version": version("vllm"), "answers": answers}))


if __name__ == "__main__":
    main()
