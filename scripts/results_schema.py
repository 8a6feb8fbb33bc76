"""Prints the JSON Schema of `results.jsonl`, made from the registries of columns.

python scripts/results_schema.py > src/dcpbench/results.schema.json
"""

import json
from typing import Any

from dcpbench.core.plugins import load_plugins, plugins
from dcpbench.core.statuses import STATUSES
from dcpbench.records.row import REQUIRED, SCHEMA_VERSION, column_help, column_types

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}


def results_schema() -> dict[str, Any]:
    """Return the JSON Schema of a line of `results.jsonl`, with the columns of all plug-ins.

    Later versions can add columns without a new schema version, so unknown columns are allowed.
    """
    load_plugins()
    added_by: dict[str, str] = {}
    for plugin in plugins():
        added_by |= {spec.name: plugin.name for spec in plugin.columns}
    texts = column_help()
    properties: dict[str, Any] = {}
    for name, kind in column_types().items():
        python = _TYPES[kind.python]
        types = [python, "null"] if kind.optional else python
        properties[name] = {"type": types, "description": texts[name]}
        if name in added_by:
            properties[name]["$comment"] = f"of the plug-in {added_by[name]}"
    properties["status"]["enum"] = [*STATUSES]
    properties["schema_version"]["const"] = SCHEMA_VERSION
    del properties["details"]  # a file of its own
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of results.jsonl: one run of one cell of dcpbench",
        "type": "object",
        "properties": properties,
        "required": [*REQUIRED, "schema_version"],
    }


if __name__ == "__main__":
    print(json.dumps(results_schema(), indent=1))
