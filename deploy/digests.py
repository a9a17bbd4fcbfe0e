"""Writes the digest behind the tag of every image from outside that deploy/ names: `name:tag@sha256:...`.

A tag may be given to another image later, a digest not. `make digests` asks the registry through the first of docker,
skopeo and crane on this machine, and leaves every file as it was if one image has no answer. Images of specdec itself
are built by those who deploy it and keep their tags.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
# A reference in a Dockerfile's ARG or a manifest's `image:`; a digest that is there already is asked for again.
REFERENCE = re.compile(
    r"^(?P<start>ARG \w+_IMAGE=|\s+(?:- )?image: )(?P<image>(?!specdec-)[\w./-]+:[\w.-]+)(?:@sha256:[0-9a-f]{64})?",
    re.MULTILINE,
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
TOOLS = {
    "docker": ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}"],
    "skopeo": ["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}"],
    "crane": ["crane", "digest"],
}
TIMEOUT_S = 120


def files() -> list[Path]:
    """The files that name images."""
    return [DEPLOY / "Dockerfile", DEPLOY / "compose.yaml", *sorted(DEPLOY.glob("kubernetes/**/*.yaml"))]


def images(texts: dict[Path, str]) -> list[str]:
    """The images from outside, `name:tag`, each once."""
    return sorted({match["image"] for text in texts.values() for match in REFERENCE.finditer(text)})


def digest_of(tool: str, image: str) -> str:
    """Returns what the registry has behind the tag, for all platforms. Ends the command without an answer."""
    name = f"docker://{image}" if tool == "skopeo" else image
    done = subprocess.run([*TOOLS[tool], name], capture_output=True, text=True, timeout=TIMEOUT_S)
    found = DIGEST.search(done.stdout) if done.returncode == 0 else None
    if found is None:
        sys.exit(f"{tool} found no digest of {image}; nothing was written. {done.stderr.strip()}")
    return found.group()


def main() -> None:
    tool = next((name for name in TOOLS if shutil.which(name)), None)
    if tool is None:
        sys.exit(f"install one of {', '.join(TOOLS)}: it asks the registry for digests")
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    digests = {image: digest_of(tool, image) for image in images(texts)}
    for path, text in texts.items():
        path.write_text(
            REFERENCE.sub(lambda match: f"{match['start']}{match['image']}@{digests[match['image']]}", text),
            encoding="utf-8",
        )
    for image, digest in digests.items():
        print(f"{image}@{digest}")


if __name__ == "__main__":
    main()
