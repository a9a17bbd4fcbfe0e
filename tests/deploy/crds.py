"""Custom resources against their definitions: the schema of a CustomResourceDefinition as a strict JSON schema.

Kubernetes prunes fields that a definition does not name; here they are errors, since they are typing mistakes. Rules in
CEL and the checks of an operator's webhook are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.hygiene.sources import ROOT

FOLDER = ROOT.parent / "shared" / "crds"  # beside the checkout, if definitions were put there
Key = tuple[str, str]  # apiVersion, kind
INT_OR_STRING = "x-kubernetes-int-or-string"
OPEN = "x-kubernetes-preserve-unknown-fields"
EMBEDDED = "x-kubernetes-embedded-resource"


def strict(schema: Any) -> Any:
    """The JSON schema that refuses fields that a definition's schema does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get(INT_OR_STRING):
        return {"type": ["integer", "string"]}
    made = {key: strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:  # its keys are names of fields, not words of the schema
        made["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if not (schema.get(OPEN) or "additionalProperties" in schema):
            made["additionalProperties"] = False
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        made["type"] = [schema["type"], "null"]
    if schema.get(EMBEDDED):
        for name in ("apiVersion", "kind", "metadata"):
            made.setdefault("properties", {}).setdefault(name, {})
    return made


def schemas_of(definitions: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """The schema of every version of every custom resource; metadata is the API server's affair and is left open."""
    found: dict[Key, dict[str, Any]] = {}
    for definition in definitions:
        spec = definition["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            for name in ("apiVersion", "kind", "metadata"):
                schema["properties"][name] = {}
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return found


@cache
def definition_of(kind: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """The definition of a kind among a folder's YAML files; None where there is none."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # they have tens of thousands of lines
    for file in sorted(folder.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        if re.search(rf"^ +kind: {kind}$", text, re.MULTILINE):
            for content in yaml.load_all(text, Loader=loader):
                if content["kind"] == "CustomResourceDefinition" and content["spec"]["names"]["kind"] == kind:
                    found: dict[str, Any] = content
                    return found
    return None


def problems(schema: dict[str, Any], resource: dict[str, Any]) -> list[str]:
    """The errors of a resource, one sentence each, with the path of the field."""
    from jsonschema import Draft7Validator

    errors = Draft7Validator(schema).iter_errors(resource)
    return sorted(f"{'/'.join(map(str, error.path))}: {error.message[:200]}" for error in errors)
