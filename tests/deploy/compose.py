"""deploy/compose.yaml as values: its services, with variables at their defaults."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import yaml

from tests.hygiene.sources import ROOT

FILE = ROOT / "deploy" / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
OWN = ("specdec-coordinator", "specdec-target", "specdec-draft", "specdec-gateway")


@cache
def compose() -> dict[str, Any]:
    """The file, merged, with the default of `${NAME:-default}`, as where NAME is not set."""
    text = VARIABLE.sub(lambda match: match.group(2) or "", FILE.read_text(encoding="utf-8"))
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def role_of(service: str) -> str:
    """`target` of `specdec-target`."""
    return service.removeprefix("specdec-")
