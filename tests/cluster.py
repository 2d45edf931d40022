"""A real SLURM of one node and two CPUs, on loopback, with all its files in one folder."""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager

from get_packages import PLACES

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge.sock
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def running(place):
    """Start it; yields the environment in which its commands reach it."""
    (place / "state").mkdir()
    (place / "spool").mkdir()
    (place / "key").write_bytes(secrets.token_bytes(1024))
    (place / "key").chmod(0o600)
    host, configuration = socket.gethostname().partition(".")[0], place / "slurm.conf"
    values = {"host": host, "user": getpass.getuser(), "place": place, "ports": _free_ports(2)}
    configuration.write_text(CONFIGURATION.format_map(values))
    environment = {"SLURM_CONF": str(configuration)}
    munged = ["munged", "--force", "--foreground", f"--socket={place}/munge.sock", f"--key-file={place}/key"]
    munged += [f"--pid-file={place}/munged.pid", f"--seed-file={place}/seed"]
    with ExitStack() as stack:
        for words in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = stack.enter_context((place / f"{words[0]}.log").open("wb"))
            program = shutil.which(words[0], path=PLACES)
            variables = os.environ | environment
            process = subprocess.Popen([program, *words[1:]], env=variables, stdout=log, stderr=log)
            stack.callback(_end, process)
            if words is munged:
                _wait(lambda: (place / "munge.sock").exists(), place)
        _wait(lambda: ask(environment, "sinfo", "--noheader", "--format=%T") == "idle", place)
        yield environment


def ask(environment, *words):
    """What a command of SLURM says."""
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def kill(environment, number):
    """Kill the processes of a job's step, as a fault of its machine would: SLURM is not asked."""
    queue = ask(environment, "squeue", "--noheader", "--array", "--format=%i %A").splitlines()
    own = dict(map(str.split, queue))[number]  # the number that this part of an array has for itself
    for line in ask(environment, "scontrol", "listpids", own).splitlines()[1:]:
        process, _, step = line.split()[:3]
        if step != "batch":
            os.kill(int(process), signal.SIGKILL)


def _free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait(is_there, place, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text(errors="replace")[-1000:] for log in place.glob("*.log"))
            raise TimeoutError(f"SLURM does not start:\n{logs}")
        time.sleep(0.1)


def _end(process):
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
