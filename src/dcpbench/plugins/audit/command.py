"""The command `audit`."""

import click

from dcpbench.cli.tree import command, flag, places, several

audit = command(
    "audit",
    "dcpbench.plugins.audit.audit",
    """Tell whether checkpoints of torch.distributed.checkpoint, or of safetensors, are whole, whoever wrote
    them: files short or missing, keys, shapes, dtypes, chunks that overlap or leave holes, bytes that are of
    two keys. A folder of checkpoints stands for all of them, the newest first. Nothing in them is run, and
    no data are read unless --data is given.

    Ends with 0 when all are whole, with 1 when one is torn or damaged, with 2 when one is no checkpoint.""",
    places("checkpoints", "CHECKPOINT..."),
    flag("--newest", "Print the newest whole checkpoint below these folders, by number, else by time."),
    flag("--data", "Read the data too, and hold them against the checksums that torch.save has written."),
    several("--beside", "FILE", "A file that has to be there too, as Lightning's meta.pt."),
    flag("--all", "Every key and every finding, however many there are."),
    click.Option(["--json", "as_json"], is_flag=True, help="All of it as JSON."),
)
