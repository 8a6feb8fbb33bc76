"""The command `audit`."""

from dcpbench.cli.tree import Command, flag_option, folders_argument, format_options, repeatable_option

audit = Command(
    "audit",
    "dcpbench.plugins.audit.audit",
    """Check whether checkpoints of torch.distributed.checkpoint or of safetensors are complete, whichever
    program wrote them. Reports short and missing files, wrong keys, shapes and dtypes, chunks that overlap or
    leave holes, and bytes that belong to two keys. A folder of checkpoints is audited from the newest to the
    oldest. No code in them is run, and no data is read without --data.

    A checkpoint is complete, damaged (files and metadata contradict each other) or torn (its save did not
    finish). The last line counts them.

    The exit status is 0 if all are complete, 1 if one is torn or damaged, 2 if one is not a checkpoint. With
    --newest it is 0 if a complete one was found, 1 if none is complete, 2 if there is no checkpoint.""",
    folders_argument("checkpoints", "CHECKPOINT..."),
    flag_option(
        "--newest", "Print the newest complete checkpoint below these folders, by number, otherwise by time."
    ),
    flag_option("--bad", "Print only those that are not complete."),
    flag_option(
        "--data", "Read the data too, and compare it with the checksums that torch.save has written."
    ),
    repeatable_option("--beside", "FILE", "Another file that has to exist, such as Lightning's meta.pt."),
    flag_option("--all", "Print all keys and all mismatches."),
    *format_options("table", "markdown", "json"),
)
