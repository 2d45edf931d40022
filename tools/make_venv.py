"""Create `.venv` with the package, every extra and the development tools; needs only the standard library.

The only choice is the build of torch. pip's default on Linux brings several gigabytes of CUDA, which a machine
without an accelerator does not need, so this first asks pip what it would install. The environment variable
MASKCONNECT_TORCH overrides the choice: `pip` takes pip's build; any other word (`cpu`, `cu128`, `auto`) is
passed to uv as its `--torch-backend`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
QUIET = [] if sys.stdout.isatty() else ["-qq"]  # a terminal shows the progress of downloads
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]


def main() -> int:
    """Create or update the environment; return 1 if pip fails, after its own message."""
    if sys.version_info < (3, 11):
        print(f"maskconnect needs Python 3.11 or newer; this is {platform.python_version()}.", file=sys.stderr)
        return 1
    try:
        if not works(PYTHON):
            venv.create(VENV, with_pip=True, clear=VENV.exists())
        install_torch(os.environ.get("MASKCONNECT_TORCH", ""))
        print("setting up .venv: maskconnect, its extras and the development tools", flush=True)
        subprocess.run([*PIP, "install", *QUIET, *CONSTRAINTS, "-e", f"{ROOT}[all,dev]"], check=True)
    except subprocess.CalledProcessError as error:
        print(f"setting up .venv failed at: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def works(python: Path) -> bool:
    """Return whether there is an interpreter that runs and has pip."""
    return (
        python.exists()
        and subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    )


def install_torch(choice: str) -> None:
    """Install the build of torch that `choice` names; by default, one without CUDA unless there is a GPU."""
    would_take = what_pip_takes()
    if would_take is None and not choice:
        return  # the pinned version is already installed
    useless_cuda = would_take is not None and is_cuda_build(would_take) and not has_accelerator()
    backend = choice or ("cpu" if useless_cuda else "pip")
    if backend != "pip" and install_with_uv(backend):
        return
    print(f"setting up .venv: torch {(would_take or {}).get('version', '')} with pip", flush=True)
    subprocess.run([*PIP, "install", *QUIET, *CONSTRAINTS, "torch"], check=True)


def what_pip_takes() -> dict[str, object] | None:
    """Return the metadata of the torch that pip would install, or None if the pinned one is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ask = [
            *PIP,
            "install",
            "-qq",
            "--dry-run",
            "--no-deps",
            "--report",
            str(report),
            *CONSTRAINTS,
            "torch",
        ]
        subprocess.run(ask, check=True)
        installs = json.loads(report.read_text())["install"]
    return installs[0]["metadata"] if installs else None


def is_cuda_build(metadata: dict[str, object]) -> bool:
    """Return whether a build of torch depends on NVIDIA's packages."""
    needs = metadata.get("requires_dist") or []
    assert isinstance(needs, list)
    return platform.system() == "Linux" and any(str(need).startswith(("nvidia-", "cuda-")) for need in needs)


def has_accelerator() -> bool:
    """Return whether the kernel shows an NVIDIA or AMD GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def install_with_uv(backend: str) -> bool:
    """Install torch with uv, which knows where each build is; return False if that fails."""
    print(f"setting up .venv: torch for backend {backend} with uv", flush=True)
    if shutil.which("uv", path=str(VENV / "bin")) is None:
        subprocess.run([*PIP, "install", *QUIET, "uv"], check=False)
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(PYTHON)]
    try:
        subprocess.run([*uv, f"--torch-backend={backend}", *CONSTRAINTS, "torch"], check=True)
    except (OSError, subprocess.CalledProcessError):
        print("uv failed; using pip's build instead", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
