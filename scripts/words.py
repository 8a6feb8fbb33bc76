"""Check that docs, comments and messages are plain English, and that pages are short."""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

AVOIDED = {
    r"told": "reported, notified, passed",
    r"(held|holds?) against": "compared with",
    r"as (it|they|one) should": "as expected",
    r"(go|goes|went) on": "continue, resume",
    r"made of": "built from",
    r"beside": "in addition to, next to, other than",
    r"by (itself|themselves)": "separately, automatically",
    r"anew": "again, rebuild",
    r"whoever": "users who",
    r"c[oa]mes? (to|back)": "end as, is restored",
    r"(left|leaves?) behind": "leaked",
    r"at work in|under way": "using, in flight",
    r"strangers?|oracles?": "unrestored run, reference run",
    r"(brought|brings?) (it |them )?back": "restored",
    r"mend(s|ed|ing)?": "fix",
    r"what (stands|lies|is there)": "the noun",
    r"(no|some)body": "another user, another process",
    r"(any|no) more(?! than)": "no longer",
    r"given up|br[oe]ken? off": "abandoned, interrupted",
    r"by chance|planted|put together|all else": "randomly, injected, merged, the rest",
}
"""Phrases that no engineer says aloud, and what to write instead."""
KEPT = re.compile(r'"beside"|--beside|beside\\?\.|written, beside another|no more data|`[^`\n]*`')
"""Names and texts that users or known failures refer to."""
LIMITS = {
    "README.md": 900,
    "CHANGELOG.md": 450,
    "docs/findings/index.md": 930,
    "docs/findings": 9_790,
    "docs/results": 1_900,
    "docs": 21_890,
}
"""The most words of a page, or of the pages below a folder together, counted as `wc -w` does; those of `docs`
without the other folders and the generated reference."""
PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}


def prose(path: Path) -> str:
    """Return a page without code, links and comments; the comments and strings of a module."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = "\n".join(token.string for token in tokens if token.type in PROSE)
    if path.suffix == ".md":
        code = r"^```.*?^```|<!--.*?-->|^    .*?$|\]\([^)]*\)|`[^`]*`"
        text = re.sub(code, " ", text, flags=re.DOTALL | re.MULTILINE)
    return KEPT.sub(" ", text)


def avoided(path: Path) -> Iterator[str]:
    """Yield a sentence for each avoided phrase in a file."""
    text = prose(path)
    for phrase, better in AVOIDED.items():
        for found in re.finditer(rf"\b({phrase})\b", text, re.IGNORECASE):
            around = " ".join(text[max(0, found.start() - 40) : found.end() + 40].split())
            yield f"{path}: '{found[0]}' in '{around}': write {better}"


def too_long(root: Path) -> Iterator[str]:
    """Yield a sentence for each limit that pages exceed."""
    pages = {*root.glob("docs/**/*.md"), *root.glob("*.md")} - {root / "docs/reference.md"}
    for place, limit in LIMITS.items():
        own = {page for page in pages if page.is_relative_to(root / place)}
        if place == "docs":
            own = {page for page in own if page.parent.name not in ("findings", "results")}
        if (words := sum(len(page.read_text().split()) for page in own)) > limit:
            yield f"{place}: {words:,} words, {limit:,} are allowed"


def main(root: Path) -> int:
    """Print what is wrong, and return the exit status."""
    folders = ("docs", "src", "conf", "scripts")
    files = [path for folder in folders for path in (root / folder).rglob("*") if _is_checked(path)]
    wrong = [line for path in [*root.glob("*.md"), *files] for line in avoided(path)]
    wrong += too_long(root)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return int(bool(wrong))


def _is_checked(path: Path) -> bool:
    """Leave out generated pages, scripts of findings, and this file, which lists the phrases."""
    if path in (Path(__file__), Path(__file__).parents[1] / "docs/reference.md"):
        return False
    in_docs = path.is_relative_to(Path(__file__).parents[1] / "docs")
    return path.suffix in (".md",) if in_docs else path.suffix in (".py", ".yaml")


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
