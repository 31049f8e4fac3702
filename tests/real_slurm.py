"""A real Slurm on this machine, private to the tests: munged, slurmctld and a slurmd for each of some nodes.

It needs Debian's packages munge, slurmctld, slurmd and slurm-client, no root, no systemd and no cgroups.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

NODES = 4
CPUS, MEMORY_MB, GPUS = 4, 4000, 2
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
_ADMIN = "/usr/sbin:/sbin"

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=60
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PlugStackConfig=/dev/null
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
{listens}
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=60
SlurmctldTimeout=30
SlurmdTimeout=60
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
GresTypes=gpu
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] \
CPUs={cpus} RealMemory={memory} Gres=gpu:fake:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 LLN=YES State=UP
PartitionName=short Nodes=ALL MaxTime=1 DefaultTime=1 State=UP
"""


def missing() -> list[str]:
    """Return the programs that are not installed."""
    path = f"{os.environ['PATH']}:{_ADMIN}"
    return [program for program in _PROGRAMS if shutil.which(program, path=path) is None]


def ask(*command: str) -> str:
    """Return what a command of Slurm prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def states() -> dict[str, str]:
    """Return the state of each job that Slurm remembers, by its number."""
    lines = ask("squeue", "--noheader", "--states=all", "--format=%i %T").splitlines()
    return dict(line.split() for line in lines)


def queue() -> list[str]:
    """Return the numbers of the jobs that wait or run."""
    return ask("squeue", "--noheader", "--format=%i").split()


@contextmanager
def running_slurm() -> Iterator[Path]:
    """Run Slurm; commands of this process and of those that it starts talk to it.

    The munge socket's path must be short, and its folder open to others.
    """
    folder = Path(tempfile.mkdtemp(prefix="ff-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    pids: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ['PATH']}:{_ADMIN}")
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        try:
            _start(folder, pids)
            yield folder
        finally:
            _stop(pids)
            shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, pids: list[int]) -> None:
    for name in ("state", "spool", "dev", "private"):
        (folder / name).mkdir(mode=0o700 if name == "private" else 0o755)
    key = folder / "private" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    munge = [f"--{name}={folder}/{file}" for name, file in _MUNGE_FILES.items()]
    _run(folder, "munged", "--force", f"--key-file={key}", *munge)
    pids.append(_pid(folder / "munged.pid"))
    for gpu in range(GPUS):  # slurmd wants a character device behind the name, whose last digit is the index
        (folder / "dev" / f"nvidia{gpu}").symlink_to("/dev/null")
    (folder / "gres.conf").write_text(
        f"AutoDetect=off\nNodeName=n[0-{NODES - 1}] Name=gpu Type=fake Flags=nvidia_gpu_env "
        f"File={folder}/dev/nvidia[0-{GPUS - 1}]\n"
    )
    (folder / "slurm.conf").write_text(_configuration(folder))
    _run(folder, "slurmctld", "-c", "-f", str(folder / "slurm.conf"))
    pids.insert(0, _pid(folder / "slurmctld.pid"))
    for i in range(NODES):
        (folder / "spool" / f"n{i}").mkdir()
        _run(folder, "slurmd", "-N", f"n{i}", "-f", str(folder / "slurm.conf"))
        pids.insert(0, _pid(folder / f"slurmd.n{i}.pid"))
    deadline = time.monotonic() + 60
    while ask("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split().count("idle") != NODES:
        if time.monotonic() > deadline:
            raise RuntimeError(f"Slurm did not come up:\n{(folder / 'slurmctld.log').read_text()}")
        time.sleep(0.1)


_MUNGE_FILES = {
    "socket": "munge.socket",
    "pid-file": "munged.pid",
    "log-file": "private/munged.log",
    "seed-file": "private/munged.seed",
}


def _configuration(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    port = _free_ports(1 + NODES)
    try:
        is_loopback = socket.gethostbyname(host).startswith("127.")
    except OSError:
        is_loopback = False
    return _CONFIGURATION.format(
        folder=folder,
        host=host,
        user=ask("id", "-un"),
        port=port,
        first_port=port + 1,
        last_port=port + NODES,
        last=NODES - 1,
        cpus=CPUS,
        memory=MEMORY_MB,
        gpus=GPUS,
        listens="CommunicationParameters=NoInAddrAny,NoCtldInAddrAny" if is_loopback else "",
    )


def _free_ports(n: int) -> int:
    """Return the first of `n` free ports in a row, of other ones in each process: none is taken at once."""
    starts = range(16_817, 30_000, 50)
    for i in range(len(starts)):
        first = starts[(os.getpid() + i) % len(starts)]
        with suppress(OSError):
            for port in range(first, first + n):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
    raise RuntimeError("there are no free ports")


def _run(folder: Path, *command: str) -> None:
    # Not pipes: daemons would inherit them and keep them open.
    with (folder / "private" / "start.log").open("ab") as log:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False, timeout=60
        )
    if done.returncode:
        told = (folder / "private" / "start.log").read_text()
        raise RuntimeError(f"{command[0]} failed with status {done.returncode}:\n{told}")


def _pid(path: Path) -> int:
    deadline = time.monotonic() + 30
    while not (path.is_file() and path.read_text().strip()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path.name} was not written")
        time.sleep(0.02)
    return int(path.read_text())


def _stop(pids: list[int]) -> None:
    """Cancel what runs and end the daemons: nodes first, munged last."""
    with suppress(subprocess.SubprocessError, OSError):
        if jobs := queue():
            ask("scancel", "--full", *jobs)
            deadline = time.monotonic() + 15
            while queue() and time.monotonic() < deadline:
                time.sleep(0.2)
    for pid in pids:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(pid, sent)
            deadline = time.monotonic() + 5
            while _is_alive(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            if not _is_alive(pid):
                break


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
