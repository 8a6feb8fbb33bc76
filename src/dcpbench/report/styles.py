"""How a status looks in the terminal; rich's style names. Without pandas, for the progress display."""

_STYLES = {
    "pass": "green",
    "skip": "dim",
    "xfail": "yellow",
    "xpass": "bold yellow",
    "vacuous": "bold magenta",
}
BAD = "bold red"


def style_of(status: str) -> str:
    """The style of a status; what is not known to be harmless stands out."""
    return _STYLES.get(status, BAD)
