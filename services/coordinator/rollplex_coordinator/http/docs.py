"""The API's documentation as one page without scripts: it is written from the OpenAPI document and loads nothing.

(FastAPI's own page takes its scripts from another server and gives them the run's token.)
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ background: #f4f4f4; padding: .5rem; overflow-x: auto }} h2 {{ font: 1rem ui-monospace, monospace }}
</style></head><body><h1>{title}</h1><p>{description}</p>
<p>The same as data: <code>/openapi.json</code>. <code>$TOKEN</code> is the token in the run directory,
<code>$URL</code> this server.</p>
{operations}</body></html>
"""


def page(document: dict[str, Any]) -> str:
    """HTML for an OpenAPI document."""
    operations = [
        _operation(document, method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    info = document["info"]
    return _PAGE.format(
        title=escape(info["title"]), description=escape(info["description"]), operations="\n".join(operations)
    )


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    text = escape(operation.get("description", operation.get("summary", "")))
    parameters = "".join(
        f"<li><code>{escape(item['name'])}</code> ({escape(item['in'])})</li>"
        for item in operation.get("parameters", [])
    )
    listed = f"<ul>{parameters}</ul>" if parameters else ""
    command = "curl "
    if "security" in operation:
        command += '-H "Authorization: Bearer $TOKEN" '
    if method != "GET":
        body = json.dumps(_example(document, operation))
        command += f"-H 'Content-Type: application/json' -d '{body}' "
    command += f'"$URL{path}"'
    return f"<h2>{method} {escape(path)}</h2><p>{text}</p>{listed}<pre>{escape(command)}</pre>"


def _example(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any]:
    """A smallest body: the least allowed number, the first allowed word, a list of one."""
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = _resolved(document, schema)
    return {name: _value(document, schema["properties"][name]) for name in schema.get("required", [])}


def _value(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    schema = _resolved(document, schema)
    match schema:
        case {"enum": [first, *_]}:
            return first
        case {"type": "array", "items": items}:
            return [_value(document, items)]
        case {"type": "string"}:
            return "TEXT"
        case _:
            return int(schema.get("minimum", 0))


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else schema
