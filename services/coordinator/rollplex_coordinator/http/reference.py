"""docs/http.md, made from the routes themselves.

    python -m rollplex_coordinator.http.reference docs/http.md      write it anew

Owns how the OpenAPI document becomes text: each route with its parameters, body and answer, then each model with its
fields. Knows nothing of what a route does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from rollplex_coordinator.http.app import create_app
from rollplex_coordinator.http.control import Control
from rollplex_coordinator.records.journal import Journal

HEAD = """<!-- Made by: python -m rollplex_coordinator.http.reference docs/http.md -->

# HTTP

The coordinator's control API: start and stop iterations, look at the run. On the loopback address unless the
configuration says otherwise (`http`). Address and token are in the run directory:

```
RUN=runs/latest; URL=$(python3 -c "import json;print(json.load(open('$RUN/http.json'))['url'])")
curl -H "Authorization: Bearer $(cat $RUN/token)" $URL/status
```

Each address but `/healthz`, and the dashboard's own files, needs the token in a header, never in the address. What
changes something is POST with a JSON body (`Content-Type: application/json`). Unknown fields are refused. A running
coordinator shows this page with examples at `/docs`, and as data at `/openapi.json`.
"""


def reference() -> str:
    """The whole document."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        Journal(path).close()
        # Nobody is asked: the routes are only described.
        document = create_app(cast("Control", None), path, "t" * 43, ()).openapi()
    operations = [
        _operation(method.upper(), route, operation)
        for route, methods in sorted(document["paths"].items())
        for method, operation in methods.items()
    ]
    models = [_model(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return "\n".join([HEAD, "## Routes\n", *operations, "## Models\n", *models]).rstrip() + "\n"


def _operation(method: str, route: str, operation: dict[str, Any]) -> str:
    lines = [f"### {method} {route}\n", _text(operation) + "\n"]
    parameters = operation.get("parameters", [])
    if parameters:
        lines += ["| parameter | in | | |", "|---|---|---|---|"]
        lines += [
            f"| `{item['name']}` | {item['in']} | {_kind(item['schema'])} | {_text(item) or _default(item['schema'])} |"
            for item in parameters
        ]
        lines.append("")
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        lines.append(f"Body: {_kind(body['application/json']['schema'])}.\n")
    lines += [f"- {status}: {answer}" for status, answer in _answers(operation)]
    return "\n".join(lines) + "\n"


def _answers(operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Status and what comes with it; refusals are the same everywhere."""
    for status, answer in sorted(operation["responses"].items()):
        if status in {"4XX", "5XX", "422"}:
            continue
        kinds = [
            _kind(content["schema"]) if content.get("schema") else f"`{media}`"
            for media, content in answer.get("content", {}).items()
        ]
        yield status, (" or ".join(dict.fromkeys(kinds)) or "nothing") + "."


def _model(name: str, schema: dict[str, Any]) -> str:
    lines = [f"### {name}\n", _text(schema) + "\n"]
    required = set(schema.get("required", ()))
    if "enum" in schema:
        lines.append("One of " + ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"]) + ".\n")
    rows = [
        f"| `{field}` | {_kind(inner)}{'' if field in required else _optional(inner)} | {_text(inner)} |"
        for field, inner in schema.get("properties", {}).items()
    ]
    if rows:
        lines += ["| field | | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _optional(schema: dict[str, Any]) -> str:
    return f", {default}" if (default := _default(schema)) else ""


def _default(schema: dict[str, Any]) -> str:
    return f"default `{json.dumps(schema['default'])}`" if "default" in schema else ""


def _text(part: dict[str, Any]) -> str:
    text = part.get("description") or ""
    return " ".join(text.split()).replace("|", "\\|")


def _kind(schema: dict[str, Any]) -> str:
    """A schema in words; a model is a link to its own table."""
    text = "any"
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            text = f"[{name}](#{name.lower()})"
        case {"anyOf": kinds}:
            text = " or ".join(_kind(kind) for kind in kinds)
        case {"enum": values} | {"const": values}:
            text = ", ".join(f"`{json.dumps(value)}`" for value in (values if isinstance(values, list) else [values]))
        case {"type": "array", "items": items}:
            text = f"list of {_kind(items)}"
        case {"type": "object", "additionalProperties": dict() as inner}:
            text = f"mapping to {_kind(inner)}"
        case {"type": kind}:
            bounds = [
                f"{sign} {_number(schema[key])}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in schema
            ]
            text = " ".join([str(kind), *bounds])
        case _:
            pass
    return text


def _number(bound: float) -> str:
    return str(int(bound) if float(bound).is_integer() else bound)


def main(argv: list[str]) -> int:
    """Write the document; 2 for a wrong call."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m rollplex_coordinator.http.reference docs/http.md\n")
        return 2
    Path(argv[0]).write_text(reference(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
