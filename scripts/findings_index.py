"""The table of docs/findings/index.md, written from the front matter and the title of each finding.

    python scripts/findings_index.py

As a hook of mkdocs it shows the front matter below a finding's title, where a site hides it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FINDINGS = Path(__file__).parents[1] / "docs" / "findings"
INDEX = FINDINGS / "index.md"

SEVERITIES = ("silent", "lost", "crash", "error")
PARALLELISMS = ("any", "none", "DDP", "FSDP1", "HSDP", "FSDP1+TP", "FSDP2", "FSDP2+TP", "TP", "PP", "EP")
TRIED = ("2.11", "2.13", "2.15")
PARTS = ("Symptom", "Affected", "Script", "Cause", "Workaround", "Upstream")

_PAGE = re.compile(r"---\n(?P<facts>.*?)\n---\n# (?P<title>[^\n]*)\n(?P<text>.*)", re.DOTALL)
_HEADER = "finding|parallelism|torch|severity\n-|-|-|-\n"
_TABLE = re.compile(rf"{re.escape(_HEADER)}(.+\n)*")


@dataclass(frozen=True)
class Finding:
    """One page: its front matter, its title and its text."""

    page: str
    title: str
    severity: str
    parallelism: tuple[str, ...]
    torch: str
    """Versions it was seen with, `2.11 (CUDA), 2.13`; then, after `; not`, those without it."""
    seen: str
    text: str

    @property
    def versions(self) -> str:
        """The versions of torch that have it, as a range if that is every one that was tried."""
        named = re.findall(r"\d+\.\d+", self.torch.partition("; not")[0])
        return f"{TRIED[0]}–{TRIED[-1]}" if named == [*TRIED] else ", ".join(named)


def findings() -> list[Finding]:
    """Return every finding, the worst first."""
    found = [_finding(page) for page in FINDINGS.glob("*.md") if page != INDEX]
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.page))


def _finding(page: Path) -> Finding:
    parts = _PAGE.fullmatch(page.read_text())
    if not parts:
        raise ValueError(f"{page.name}: no front matter and title; copy those of another finding")
    facts: dict[str, Any] = yaml.safe_load(parts["facts"])
    finding = Finding(
        page=page.name,
        title=parts["title"],
        severity=str(facts["severity"]),
        parallelism=tuple(str(facts["parallelism"]).split(", ")),
        torch=str(facts["torch"]),
        seen=str(facts["seen"]),
        text=parts["text"],
    )
    if finding.severity not in SEVERITIES:
        raise ValueError(f"{page.name}: severity={finding.severity}: choose one of {', '.join(SEVERITIES)}")
    if unknown := sorted({*finding.parallelism} - {*PARALLELISMS}):
        raise ValueError(
            f"{page.name}: parallelism={', '.join(unknown)}: choose from {', '.join(PARALLELISMS)}"
        )
    return finding


def indexed(index: str) -> str:
    """Return the text of index.md with the table of the findings that there are."""
    rows = (
        f"[{one.title.replace('|', '&#124;')}]({one.page})|{', '.join(one.parallelism)}"
        f"|{one.versions}|{one.severity}\n"
        for one in findings()
    )
    table = _HEADER + "".join(rows)
    written, tables = _TABLE.subn(lambda _: table, index)
    if tables != 1:
        raise ValueError(f"{INDEX.name}: no table that begins with {_HEADER.splitlines()[0]}")
    return written


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show a finding's front matter below its title."""
    if "severity" not in page.meta:
        return markdown
    facts = (f"{name}: {page.meta[name]}" for name in ("severity", "parallelism", "torch", "seen"))
    title, text = markdown.split("\n", 1)
    return f"{title}\n\n*{' · '.join(facts)}*\n{text}"


if __name__ == "__main__":
    INDEX.write_text(indexed(INDEX.read_text()))
