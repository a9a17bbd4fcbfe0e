"""guidellm: a short benchmark of chats, whole or, with `--streaming`, streamed; counts as its report has them."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

job = json.load(sys.stdin)
is_streamed = str("--streaming" in sys.argv).lower()
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "report.json"
    command = [
        Path(sys.executable).with_name("guidellm"),
        "run",
        "--disable-console",
        f"--backend=kind=openai_http,target={job['base_url']},model={job['model']},stream={is_streamed}",
        "--profile=kind=synchronous",
        f"--constraint=kind=max_requests,count={job['request_count']}",
        "--data=kind=synthetic_text,prompt_tokens=20,output_tokens=16",
        f"--tokenizer=kind=huggingface_auto,model={job['folder']}",
        f"--output=kind=json,path={path}",
    ]
    if code := subprocess.call(command, stdout=sys.stderr):
        sys.exit(f"guidellm ended with code {code}")
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
requests, totals = benchmark["requests"]["successful"], benchmark["metrics"]["request_totals"]
speculation = [request["response_metrics"]["speculative_decoding"] for request in requests]
answers = {
    "answered": totals["successful"],
    "failed": totals["errored"] + totals["incomplete"],
    "prompt tokens": benchmark["metrics"]["prompt_token_count"]["successful"]["total_sum"],
    "output tokens": benchmark["metrics"]["output_token_count"]["successful"]["total_sum"],
    "drafts": sum(own["num_spec_steps"] for own in speculation),
    "draft tokens": sum(own["num_draft_tokens"] for own in speculation),
    "accepted draft tokens": sum(own["num_accepted_draft_tokens"] for own in speculation),
}
print(json.dumps({"version": version("guidellm"), "answers": answers}))
