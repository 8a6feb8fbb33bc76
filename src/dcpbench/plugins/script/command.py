"""The command `script`."""

import shlex

import click

from dcpbench.cli.tree import Command
from dcpbench.plugins.script.judge import STATUS
from dcpbench.plugins.script.stops import checked_stop

script = Command(
    "script",
    "dcpbench.plugins.script.script",
    f"""Stop your own training script, resume it with the same command, and compare it with the uninterrupted
    run.

    The script is not changed. Write {{out}} where the command names the folder of its checkpoints, as in
    -- env LOGDIR={{out}} python train.py if a variable names it; without it, the working folder is copied
    for each stop. Everything after -- is the command.

    A verdict is {", ".join(STATUS)}. The exit status is 0 if every stop is exact, 1 if one is not, 2 if the
    command does not run, or a stop could not be judged.""",
    click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND..."),
    click.Option(["--stop"], multiple=True, type=checked_stop, metavar="STOP",
                 help="kill@STEP, term@STEP, rank1@STEP (before that optimizer step), write@PART:N, "
                 "torn@PART:N (at the N-th change of a file with PART in its path). "
                 "Default: kill, term, write, and rank1 with several ranks."),
    click.Option(["--resume-args"], metavar="WORDS", default="", type=shlex.split,
                 help="Words that the resume adds to the command. {newest:checkpoint-*} is the newest path "
                 "below {out} that fits, {step} the digits in it."),
    click.Option(["--gate"], metavar="KINDS", default="", type=lambda text: text.split(",") if text else (),
                 help="Kinds of stops that decide the exit status, as kill,term,rank; others only report."),
    click.Option(["--again"], metavar="FOLDER", type=click.Path(exists=True, file_okay=False),
                 help="Resume the copies that a check kept in FOLDER, of all stops that failed or those at "
                 "--stop, with the script as it now is. The saves are the old script's."),
    click.Option(["--every"], metavar="N", type=click.IntRange(1), default=1, show_default=True,
                 help="Record weights, gradients and optimizer state at every N-th step."),
    click.Option(["--saves"], metavar="N", type=click.IntRange(0), default=0,
                 help="End each run some steps after its N-th save, for jobs of hours. The number of steps "
                 "is then not compared."),
    click.Option(["--look"], is_flag=True,
                 help="Run three steps, and print what is seen: ranks, optimizers, seeds, saves, and how "
                 "many runs would follow."),
    click.Option(["--deterministic"], is_flag=True,
                 help="Set torch's deterministic algorithms in all runs: on GPUs few are exact without."),
    click.Option(["--timeout"], metavar="SECONDS", type=click.IntRange(1), default=600, show_default=True,
                 help="Longest time of the uninterrupted run. A resumed run has ten times its time."),
    click.Option(["--grace"], metavar="SECONDS", type=click.IntRange(1), default=30, show_default=True,
                 help="Time to end after SIGTERM, or after the death of a rank."),
    click.Option(["--dir", "folder"], type=click.Path(), metavar="FOLDER",
                 help="Folder of the results. Default: one below outputs/."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print the rows as JSON."),
)  # fmt: skip
