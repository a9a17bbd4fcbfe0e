"""AIPerf: a short profile of chats, whole or, with `--streaming`, streamed; counts as its report has them."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

job = json.load(sys.stdin)
with tempfile.TemporaryDirectory() as folder:
    command = [
        Path(sys.executable).with_name("aiperf"),
        "profile",
        "--endpoint-type=chat",
        *sys.argv[1:],
        f"--url={job['base_url']}",
        f"--model={job['model']}",
        f"--tokenizer={job['folder']}",
        f"--request-count={job['request_count']}",
        "--concurrency=2",
        "--isl=20",
        "--osl=16",
        "--random-seed=1",
        "--ui=none",
        "--workers-max=1",
        "--no-gpu-telemetry",
        "--no-server-metrics",
        f"--output-artifact-dir={folder}",
    ]
    if code := subprocess.call(command, stdout=sys.stderr):
        sys.exit(f"aiperf ended with code {code}")
    report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
answers = {
    "answered": report["request_count"]["avg"],
    "failed": len(report["error_summary"]),
    "prompt tokens": report["total_usage_prompt_tokens"]["avg"],
    "output tokens": report["total_usage_completion_tokens"]["avg"],
    "drafts": report["total_spec_decode_steps"]["avg"],
    "draft tokens": report["total_draft_tokens"]["avg"],
    "accepted draft tokens": report["total_accepted_draft_tokens"]["avg"],
}
print(json.dumps({"version": version("aiperf"), "answers": answers}))
