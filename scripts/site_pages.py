"""Writes docs/reference.md from the code and from conf/, and adds the files at the top level to the site.

    python scripts/site_pages.py

mkdocs.yml names it under `hooks`. A column, a status or a value that nothing describes is an error. The site
shows the picture that fits the theme chosen there, which can differ from the system's.
"""

import pkgutil
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from dcpbench.cli import keys_help
from dcpbench.config import groups
from dcpbench.config.schema import Config
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import HOW_RUN
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.plugins import declared_values, load_plugins, plugins
from dcpbench.core.statuses import STATUSES
from dcpbench.records.row import column_help, column_types

_ROOT = Path(__file__).parents[1]
REFERENCE = _ROOT / "docs" / "reference.md"
_AT_THE_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that are pages too."""

_PICTURE = re.compile(r'<picture>\n<source [^>]*srcset="([^"]+)">\n<img src="([^"]+)"([^>]*)>\n</picture>')

_GUIDES = {
    "run": "sweeps.md",
    "plan": "sweeps.md#plan-a-sweep",
    "resume": "sweeps.md#resume-a-sweep",
    "report": "report.md",
    "show": "report.md#one-cell",
    "compare": "compare.md",
    "history": "compare.md#history-over-many-sweeps",
    "doctor": "sweeps.md#small-machines",
}
_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text"}
_PLACES = {
    "restored": "in restored state",
    "staged": "in state that is staged for a save",
    "written": "in the files of a checkpoint",
    "live": "in the live state, right after a save",
    "training": "in how a parallel run trains",
    "both": "in staged and in restored state",
}


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of plug-ins to the guides."""
    assert config.nav is not None
    guides = next(part["Guides"] for part in config.nav if "Guides" in part)
    pages = sorted((_ROOT / "docs" / "plugins").glob("*.md"))
    guides.append({"Plug-ins": [f"plugins/{path.name}" for path in pages]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files at the top level."""
    for name, path in _AT_THE_TOP.items():
        text = re.sub(r"\]\((?:docs/)?", "](", (_ROOT / name).read_text())
        for other, page in _AT_THE_TOP.items():
            text = text.replace(f"]({other}", f"]({page}")
        files.append(File.generated(config, path, content=re.sub('(src|srcset)="docs/', r'\1="', text)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each `<picture>` by two pictures, of which the site shows the one that fits its theme."""
    return _PICTURE.sub(r'<img src="\2#only-light"\3>\n<img src="\1#only-dark"\3>', markdown)


def reference_page() -> str:
    """Return the text of docs/reference.md.

    Raises:
        ValueError: a column, a status or a value is not described.
    """
    load_plugins()
    parts = (_commands, _axes, _keys, _experiments, _columns, _metrics, _checks, _statuses, _faults)
    return "\n".join(
        ["<!-- Written by `make samples`: do not edit. -->\n# Reference\n", *(part() for part in parts)]
    )


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(heads)]
    lines += [["---"] * len(lines[0])]
    lines += [[str(cell).replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _section(title: str, *parts: str) -> str:
    return f"## {title}\n\n" + "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def values_of(axis: str) -> list[tuple[str, str]]:
    """Return the values of an axis with their descriptions; ValueError if one has none."""
    values = keys_help.groups()[axis].values
    if silent := [name for name, said in values.items() if not said]:
        raise ValueError(f"conf/{axis}: no comment at the top describes {', '.join(silent)}")
    return [(f"`{name}`", said) for name, said in values.items()]


def _commands() -> str:
    guides = dict(_GUIDES)
    for plugin in plugins():
        guides |= dict.fromkeys(plugin.commands, f"plugins/{plugin.name}.md")
    rows = [
        (f"`dcpbench {name}`", purpose, f"[{name}]({guides[name]})")
        for name, purpose in keys_help.commands().items()
    ]
    return _section(
        "Commands",
        "`dcpbench COMMAND --help` prints every option. Overrides without a command are a `run`. "
        "`python -m dcpbench` is the same program.\n",
        _table(("command", "does", "guide"), rows),
        '`eval "$(dcpbench --completion bash)"` in `~/.bashrc` completes commands, axes and values; `zsh` '
        "works the same way.\n",
    )


def _axes() -> str:
    parts = [
        "`parallel=ddp,fsdp` runs a cell for each value. [Choose what to vary](axes.md) explains the axes "
        "that need more than a line; a YAML file of yours adds [a value](extending.md#a-value-of-an-axis). "
        "See also: [faults](#faults), [experiments](#experiments), [keys](#keys).\n"
    ]
    for axis in keys_help.groups().values():
        if axis.name in ("fault", "experiment"):
            continue
        parts.append(
            f"### {axis.name}\n\nDefault: `{axis.default}`. {axis.help[0].upper()}{axis.help[1:]}.\n"
        )
        if axis.name == "load_parallel":
            parts.append("The values of [`parallel`](#parallel).\n")
        else:
            parts.append(_table(("value", "meaning"), values_of(axis.name)))
    return _section("Axes", *parts)


def _keys() -> str:
    rows = [(f"`{key.name}`", f"`{key.default}`", key.full_help) for key in keys_help.keys().values()]
    how = sorted(item.name for item in fields(Config) if item.metadata.get(HOW_RUN))
    said = ", ".join(f"`{name}`" for name in how)
    return _section(
        "Keys",
        "Every key that a command line can set in addition to the [axes](#axes), with its default.\n",
        _table(("key", "default", "meaning"), rows),
        f"These affect how a cell runs and not its identity: {said}. Rows that differ only in them "
        "belong to one cell. Measure two values in two sweeps.\n",
        *(_group(kind) for kind in (groups.StorageConfig, groups.ModelConfig, groups.OptimizerConfig)),
    )


def _group(kind: type) -> str:
    name = kind.__name__.removesuffix("Config").lower()
    own = [item.name for item in fields(kind) if item.name not in ("name", "target", "options")]
    said = re.sub(r"`dcpbench[\w.]*\.(\w+)`", r"`\1`", re.sub(r"\s+", " ", kind.__doc__ or ""))
    keys = ", ".join(f"`{name}.{key}`" for key in own)
    return f"### Keys of {name}\n\n{said}\n\nKeys: {keys}, `{name}.options`.\n"


def _columns() -> str:
    rows, texts = [], column_help()
    for name, kind in column_types().items():
        if name in CHECKS:
            said = f"check: {CHECKS[name].help}"
        elif name in METRICS:
            said = f"metric: {METRICS[name].help}"
        elif name in AXES:
            said = "[axis](#axes)"
        elif kind.python is dict:
            continue
        else:
            said = texts[name]
            if not said:
                raise ValueError(f"column {name}: has no help")
        rows.append((f"`{name}`", _KINDS[kind.python], said))
    return _section(
        "Columns",
        "A line of `results.jsonl` is a row: these columns, then `config` (the configuration that "
        "identifies the cell, flat). `details.jsonl` contains mismatches, controls and losses of "
        "each rank, by `cell`, `repeat` and `started_at`. `results.csv` contains only the columns. "
        "A value that was not measured, or does not apply, is null.\n",
        _table(("column", "type", "meaning"), rows),
    )


def _metrics() -> str:
    shown = {"always": "yes", "measured": "if measured", "asked": "with `--metric`"}
    rows = [
        (f"`{name}`", spec.help, _aggregate(spec), spec.better or "-", shown[spec.shown])
        for name, spec in METRICS.items()
    ]
    return _section(
        "Metrics",
        "Measured values of a cell, each a column. `measurements.jsonl` contains every single "
        "value, with rank, phase and save. The unit is in the name.\n",
        _table(("metric", "meaning", "aggregate", "better", "in the table"), rows),
    )


def _aggregate(spec: Any) -> str:
    over_saves = "sum of the phase" if spec.whole_phase else f"{spec.over_saves} of the saves"
    return f"{over_saves}, max of the ranks"


def _checks() -> str:
    rows = [(f"`{name}`", spec.help) for name, spec in CHECKS.items()]
    return _section(
        "Checks",
        "Each check is a column: true, false, or null if it did not apply. "
        "[What each check proves, and what it does not detect](concepts/checks.md).\n",
        _table(("check", "passes if"), rows),
    )


def _statuses() -> str:
    rows = [(f"`{name}`", spec.help) for name, spec in STATUSES.items()]
    return _section(
        "Statuses",
        "The outcomes of a cell, worst first. [What to do about each](concepts/statuses.md).\n",
        _table(("status", "meaning"), rows),
    )


def _faults() -> str:
    specs = declared_values("fault")
    parts = [
        f"The {len(specs)} bugs that `fault=<name>` [injects](plugins/faults.md) into a cell. "
        "`detected by` is the check that must report it, or the exception that must refuse it; "
        "any of them is enough. [Results](results/index.md#injected-faults).\n"
    ]
    for place, where in _PLACES.items():
        rows = [
            (f"`{name}`", _what(spec), "all" if spec.rank is None else "one", _seen_by(spec), _only(spec))
            for name, spec in specs.items()
            if spec.at.value == place
        ]
        if rows:
            parts += [
                f"### Injected {where}\n",
                _table(("fault", "effect", "ranks", "detected by", "only with"), rows),
            ]
    if lost := {spec.at.value for spec in specs.values()} - _PLACES.keys():
        raise ValueError(f"scripts/site_pages.py does not describe: {', '.join(lost)}")
    return _section("Faults", *parts)


def _what(spec: groups.FaultConfig) -> str:
    """Return the docstring of the function that injects it, with the options of this fault."""
    said = " ".join((pkgutil.resolve_name(str(spec.target)).__doc__ or "").partition("\n\n")[0].split())
    options = ", ".join(f"`{key}={value}`" for key, value in spec.options.items())
    return f"{said} ({options})" if options else said


def _seen_by(spec: groups.FaultConfig) -> str:
    seen = (f"`{one.check or one.error or 'an error'}`" for one in spec.expects)
    return ", ".join(dict.fromkeys(seen))


def _only(spec: groups.FaultConfig) -> str:
    return "; ".join(f"`{key}={','.join(only.values)}`" for key, only in spec.only.items())


def _experiments() -> str:
    return _section(
        "Experiments",
        "Sweeps in YAML files: `experiment=<name>`. Other words on the command line select among "
        "their cells; `dcpbench plan experiment=<name>` prints them.\n",
        _table(("experiment", "cells"), values_of("experiment")),
    )


if __name__ == "__main__":
    REFERENCE.write_text(reference_page())
