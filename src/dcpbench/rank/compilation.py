"""Report what torch.compile did not compile in a cell on this rank, from Dynamo's counters. torch.compile
raises no error when it runs a frame as eager code."""

from collections.abc import Set

from torch._dynamo.utils import counters, graph_break_reasons

_RECOMPILED_TOO_OFTEN = "Dynamo recompile limit exceeded"


def graph_breaks() -> list[str]:
    """Return where and why Dynamo broke a graph in two, in the order of the breaks."""
    breaks = []
    for graph_break in graph_break_reasons:
        places = [f" ({_short(frame.filename)}:{frame.lineno})" for frame in graph_break.user_stack[-1:]]
        breaks.append(f"{_first_line(graph_break.reason)}{''.join(places)}")
    return list(dict.fromkeys(breaks))


def why_not_compiled(trained: Set[str]) -> str | None:
    """Return why some or all of the model ran as eager code; None if none did, or no module was trained. The
    forwards of those that were `trained` are defined in these packages."""
    abandoned = [*counters["unimplemented"], *counters["recompile_limit"]]
    if any(reason.startswith(_RECOMPILED_TOO_OFTEN) for reason in abandoned) or counters["recompile_limit"]:
        return "Dynamo's recompile limit was reached: part of the model ran as eager code"
    if counters["stats"]["unique_graphs"] or not trained:
        return None
    reasons = [*graph_breaks(), *map(_first_line, abandoned)]
    if trained == {"torch"}:
        reasons = ["torch.compile skips torch's own forwards; give the model a forward of its own"]
    return f"nothing was compiled{f': {reasons[0]}' if reasons else ''}"


def _short(path: str) -> str:
    """Return a library's path relative to site-packages; other paths are unchanged."""
    return path.rpartition("site-packages/")[2]


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0]
