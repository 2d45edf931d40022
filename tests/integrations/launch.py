"""Run a script of tests/integrations/workers on two processes."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def torchrun(script, *words, ranks=2):
    """What it printed, from all ranks; an error if one of them failed."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    places = [HERE, HERE.parent / "workers", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [*command, str(HERE / "workers" / script), *map(str, words)], env=environment, **pipes
    ) as run:
        try:
            said, errors = run.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            run.terminate()  # on which torchrun ends its workers
            said, errors = run.communicate()
    assert run.returncode == 0, said + errors
    return said
