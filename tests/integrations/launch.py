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
    done = subprocess.run(
        [*command, str(HERE / "workers" / script), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
