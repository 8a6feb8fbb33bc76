"""`report.html`: the rows of sweeps as one file that needs no other.

Styles and scripts are inlined, the rows are a packed block of data. Texts of rows reach the page only as
text; its Content-Security-Policy allows only scripts with the listed hashes, and loading nothing.
"""

import base64
import gzip
import hashlib
import html
import json
from importlib.resources import files
from pkgutil import resolve_name
from string import Template
from typing import Any

import pandas as pd

from dcpbench.analysis.frame import Sweeps, as_expected, is_true
from dcpbench.core.plugins import plugins
from dcpbench.records.store import RESULTS_CSV
from dcpbench.report.page.data import page_data, shortened
from dcpbench.report.page.summary import changes_since, page_head
from dcpbench.report.tables import detection

_SCRIPTS = (
    "dom.js",
    "runs.js",
    "state.js",
    "changes.js",
    "filters.js",
    "matrix.js",
    "findings.js",
    "checks.js",
    "costs.js",
    "losses.js",
    "cell.js",
    "stops.js",
    "environment.js",
    "main.js",
)
"""The parts of one module, in this order: each can use the names of those before it."""
_PACKED_BYTES, _LONGEST_TEXTS = 850_000, (4000, 1000, 300)
_PLAIN_ROWS, _PLAIN_REASON = 200, 300
"""The failed rows, and the characters of each reason, that are shown without scripts."""
_PLAIN = ["status", "cell", "reason"]


def page(sweeps: Sweeps, title: str, before: Sweeps | None = None) -> str:
    """Return the text of a page that shows sweeps, in ASCII; with several, `sweep` is one more axis.

    Up to about 1,000 rows it stays below 1 MB: long texts are shortened until it fits, and say so.

    Args:
        before: an earlier sweep, to show what changed.
    """
    changes = changes_since(before, sweeps) if before else {}
    css, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    sections = (resolve_name(target) for plugin in plugins() for target in plugin.sections)
    of_plugins = (section(sweeps.frame) for section in sections)
    policy = (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("page.html")).substitute(
        policy=policy,
        title=_text(title),
        css=css,
        script=script,
        head=_ascii(page_head(sweeps, changes)),
        rows=_packed(sweeps, changes.get("lines", [])),
        plain=_plain(sweeps.frame),
        sections="".join(
            f"<section><h2>{_text(heading)}</h2>{_table(table)}</section>"
            for heading, table in filter(None, of_plugins)
        ),
    )


def _asset(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="ascii")


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def _packed(sweeps: Sweeps, changes: list[dict[str, Any]]) -> str:
    """Return the data of the page as JSON, gzip and base64, with the longest texts that fit."""
    packed = ""
    for characters in _LONGEST_TEXTS:
        data = vars(page_data(sweeps, changes, characters))
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
        if len(packed) <= _PACKED_BYTES:
            break
    return packed


def _plain(frame: pd.DataFrame) -> str:
    """Return tables of what did not pass, for a browser without scripts."""
    parts = []
    passed = frame["status"].eq("pass").fillna(False).astype(bool) | is_true(frame["fault_seen"])
    chosen = frame[~(passed & as_expected(frame))]
    shown = chosen[_PLAIN].head(_PLAIN_ROWS).fillna("").map(shortened, characters=_PLAIN_REASON)
    for table in (detection(frame), shown):
        parts += [_table(table)] if len(table) else []
    if len(chosen) > len(shown):
        parts.append(f"<p>and {len(chosen) - len(shown)} more, which are in {RESULTS_CSV}</p>")
    return "".join(parts)


def _table(table: pd.DataFrame) -> str:
    return _ascii(table.to_html(index=False, border=0, classes="plain of-plugin"))


def _text(text: str) -> str:
    return _ascii(html.escape(text))


def _ascii(markup: str) -> str:
    """Escape all but ASCII: a reason can contain half a surrogate pair, which UTF-8 cannot encode."""
    return markup.encode("ascii", "xmlcharrefreplace").decode()
