"""schemathesis: requests made of the server's own description, right and wrong ones; none may be a server error."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

CASES_MAX = 200  # of the fuzzing phase, for each operation

job = json.load(sys.stdin)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "report.json"
    command = [
        Path(sys.executable).with_name("schemathesis"),
        "run",
        job["tools_url"].removesuffix("/v1") + "/openapi.json",
        "--checks=not_a_server_error",
        "--phases=examples,coverage,fuzzing",
        f"--max-examples={CASES_MAX}",
        "--seed=1",
        "--generation-database=none",
        "--continue-on-failure",
        "--request-timeout=60",
        "--report=json",
        f"--report-json-path={path}",
    ]
    subprocess.call(command, stdout=sys.stderr, cwd=folder)  # where it keeps files of its own
    report = json.loads(path.read_text())
answers = {
    "coverage": report["phases"]["coverage"]["status"],
    "fuzzing": report["phases"]["fuzzing"]["status"],
    "untested": report["operations"]["selected"] - report["operations"]["tested"],
    "server errors": report["failures"],
    "errors": report["errors"],
}
print(json.dumps({"version": version("schemathesis"), "answers": answers}))
