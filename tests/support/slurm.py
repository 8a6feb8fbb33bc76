"""A Slurm of one node on this machine, on loopback only, for as long as a test needs it. Needs root."""

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import wait_for

_CONF = """\
ClusterName=dcpbench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,defer_batch
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5

SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 NodeHostname={host} CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=60 State=UP
"""


class Slurm:
    """Its commands."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, **more: str) -> str:
        """What a command prints; `more` is of its environment."""
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=60, env=self.environment | more
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return shown.partition("JobState=")[2].split()[0]


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Bring it up below a folder, and end it."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [one.getsockname()[1], two.getsockname()[1]]
    conf = _CONF.format(host=socket.gethostname(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(conf)
    made = Slurm(folder)
    at = folder / "munge"
    files = [f"--{name}-file={at}/{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={at}/socket", *files, "--num-threads=2"],
        ["slurmctld", "-D", "-c"],
        # With processes of its own: what a job leaves behind ends with it, and `ray stop` sees no other Ray.
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "slurmd", "-D"],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for daemon in daemons:
            with (folder / f"{daemon[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(daemon, stdout=out, stderr=out, env=made.environment))
            if daemon[0] == "munged":
                wait_for(lambda: (at / "socket").exists(), 10)
        wait_for(lambda: "idle" in _nodes(made), 30)
        yield made
    finally:
        for process in reversed(running):
            process.kill()
            process.wait()


def _nodes(made: Slurm) -> str:
    try:
        return made.run("sinfo", "--noheader", "--format=%t")
    except AssertionError:  # it does not answer yet
        time.sleep(0.1)
        return ""
