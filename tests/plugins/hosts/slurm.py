"""A Slurm of two nodes on this machine, for as long as a test needs it. Needs root.

A node is a network namespace with a name, processes, `/dev/shm` and `/tmp/ray` of its own: what a job leaves
behind ends with its node, and `ray stop` sees no other Ray.
"""

import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import wait_for
from plugins.hosts.namespaces import Namespace, namespaces

_CONF = """\
ClusterName=dcpbench
SlurmctldHost=node1({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,defer_batch
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=30

SlurmdParameters=config_overrides
NodeName=node1 NodeAddr={addresses[0]} CPUs=8 RealMemory=4000 State=UNKNOWN
NodeName=node2 NodeAddr={addresses[1]} CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=node1,node2 Default=YES MaxTime=60 State=UP
"""
_NODE = """\
hostname "$1" && shift
mount --bind "$1" /etc/hosts && shift
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
"$@"
exit # no exec above: the shell is the node's first process, and waits for those that have lost their parents
"""
_APART = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child", "sh", "-ec", _NODE, "sh")


class Slurm:
    """Its commands, as they are given on the first node."""

    def __init__(self, folder: Path, hosts: list[Namespace]) -> None:
        self._first = hosts[0]
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, **more: str) -> str:
        """Return the output of a command; `more` extends its environment."""
        command = (*self._first.prefix, *words)
        around = os.environ | more | self.environment
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, env=around)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return shown.partition("JobState=")[2].split()[0]


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Bring it up below a folder, and end it."""
    for name in ("munge", "state", "spool-node1", "spool-node2"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    with namespaces() as hosts:
        names = [f"node{number}" for number in range(1, 1 + len(hosts))]
        known = "".join(f"{host.address} {name}\n" for host, name in zip(hosts, names, strict=True))
        for name in names:  # Debian gives a machine's own name a loopback address, before any other
            (folder / f"hosts-{name}").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{known}")
        addresses = [host.address for host in hosts]
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, addresses=addresses))
        made = Slurm(folder, hosts)
        at = folder / "munge"
        files = [f"--{name}-file={at}/{name}" for name in ("key", "pid", "log", "seed")]
        nodes = [
            ("nsenter", f"--net=/run/netns/{host.name}", *_APART, name, f"{folder}/hosts-{name}")
            for host, name in zip(hosts, names, strict=True)
        ]
        daemons = [
            ("munged", "--foreground", "--force", f"--socket={at}/socket", *files, "--num-threads=2"),
            (*nodes[0], "slurmctld", "-D", "-c"),
            *((*node, "slurmd", "-D") for node in nodes),
        ]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for number, daemon in enumerate(daemons):
                with (folder / f"daemon{number}.out").open("wb") as out:
                    around = os.environ | made.environment
                    running.append(subprocess.Popen(daemon, stdout=out, stderr=out, env=around))
                if daemon[0] == "munged":
                    wait_for(lambda: (at / "socket").exists(), 10)
            wait_for(lambda: _states(made) == ["idle"] * len(hosts), 30)
            yield made
        finally:
            for process in reversed(running):
                process.kill()
                process.wait()


def _states(made: Slurm) -> list[str]:
    try:
        return made.run("sinfo", "--noheader", "--Node", "--format=%t").split()
    except AssertionError:  # it does not answer yet
        time.sleep(0.1)
        return []
