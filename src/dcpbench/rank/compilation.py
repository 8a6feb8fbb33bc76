"""What torch.compile made of a cell on this rank, by Dynamo's own counts; it falls back to eager code without
an error when it gives up on a frame."""

from torch._dynamo.utils import counters, graph_break_reasons

_RECOMPILED_TOO_OFTEN = "Dynamo recompile limit exceeded"


def graph_breaks() -> list[str]:
    """Where Dynamo broke a graph in two, and why, in the order in which it did."""
    told = []
    for one in graph_break_reasons:
        places = [f" ({_short(frame.filename)}:{frame.lineno})" for frame in one.user_stack[-1:]]
        told.append(f"{_first_line(one.reason)}{''.join(places)}")
    return list(dict.fromkeys(told))


def why_not_compiled() -> str | None:
    """Why some of the model ran as eager code, or all of it; None where none did."""
    given_up = [*counters["unimplemented"], *counters["recompile_limit"]]
    if any(reason.startswith(_RECOMPILED_TOO_OFTEN) for reason in given_up) or counters["recompile_limit"]:
        return "Dynamo's recompile limit was reached: some of it ran as eager code"
    if counters["stats"]["unique_graphs"]:
        return None
    why = [*graph_breaks(), *map(_first_line, given_up)]
    return f"nothing was compiled{f': {why[0]}' if why else ''}"


def _short(path: str) -> str:
    """A path as an import would name it, if it is a library's."""
    return path.rpartition("site-packages/")[2]


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0]
