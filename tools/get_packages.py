"""Install programs that tests need and pip does not have, from Debian packages, if permitted.

    python tools/get_packages.py chromium slurm

This does nothing if a program is installed (MASKCONNECT_BROWSER names another browser), or if it has no permission to
install one: then the tests that need it are skipped, or fail if CI=true.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = {
    "chromium": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    "slurm": ("slurmctld",),
}
"""For each name, the programs of which one is enough."""

PACKAGES = {"chromium": ("chromium",), "slurm": ("slurm-wlm", "munge")}
PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))


def find(name: str) -> str | None:
    """Return the path of the program, or None."""
    named = os.environ.get("MASKCONNECT_BROWSER") if name == "chromium" else None
    names = (named,) if named else PROGRAMS[name]
    return next((path for program in names if (path := shutil.which(program, path=PLACES))), None)


def main(names: list[str]) -> int:
    """Install what is missing, or say why not; never fail, because all other tests can run."""
    for name in names:
        if find(name) is None:
            _install(name)
    return 0


def _install(name: str) -> None:
    apt, before = shutil.which("apt-get"), _right_to_install()
    if apt is None or before is None:
        print(f"{name} is missing and cannot be installed here: its tests are skipped, or fail if CI=true")
        return
    print(f"installing {name}, for tests", flush=True)
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES[name]]):
        variables = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run([*before, apt, *words], env=variables, stdout=subprocess.DEVNULL, check=False)
        if done.returncode and words[0] == "install":
            print(f"{name} could not be installed; its tests are skipped, or fail if CI=true")


def _right_to_install() -> list[str] | None:
    """Return the prefix of a command that root must run; None if that needs a password."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    asked = sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0
    return [sudo, "-n"] if sudo and asked else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
