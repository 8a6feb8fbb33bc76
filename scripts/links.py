"""Check the relative links of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/, as GitHub resolves them."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_BLOCKS = re.compile(r"^```.*?^```|<!--.*?-->", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r'\]\(([^)\s]+)|(?:src|srcset|href)="([^"]+)"')


def broken(root: Path) -> Iterator[str]:
    """Yield a line for each link to a file or a heading that does not exist. Links to the page of a plug-in
    that was deleted, as by `make without`, are ignored."""
    for page in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")]):
        for found in _LINK.finditer(re.sub(r"`[^`\n]*`", "", _BLOCKS.sub("", page.read_text()))):
            path, _, anchor = unquote(link := found[1] or found[2]).partition("#")
            target = (page.parent / path).resolve() if path else page
            plugin = root / "src/dcpbench/plugins" / target.stem
            deleted = target.parent == root / "docs/plugins" and not target.exists() and not plugin.exists()
            if ":" in path or deleted:
                continue
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                yield f"{page.relative_to(root)}: {link}: no such file or heading"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.*?) *$", _BLOCKS.sub("", page.read_text()), re.MULTILINE)
    texts = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    counts = Counter(re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts)
    return {
        f"{slug}-{number}" if number else slug for slug, count in counts.items() for number in range(count)
    }


if __name__ == "__main__":
    sys.exit("\n".join(broken(Path(__file__).resolve().parents[1])) or 0)
