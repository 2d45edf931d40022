"""See to it that tests find programs that pip cannot bring: install Debian's packages where that is allowed.

    python tools/get_packages.py chromium slurm

Nothing is done where a program is there already (MASKCONNECT_BROWSER names another browser), or where this may not
install any: the tests that need it are then skipped, unless CI=true, where they fail.
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
"""Of each thing, the programs any of which is enough."""

PACKAGES = {"chromium": ("chromium",), "slurm": ("slurm-wlm", "munge")}
PLACES = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))


def find(name: str) -> str | None:
    """The program, if there is one."""
    named = os.environ.get("MASKCONNECT_BROWSER") if name == "chromium" else None
    names = (named,) if named else PROGRAMS[name]
    return next((path for program in names if (path := shutil.which(program, path=PLACES))), None)


def main(names: list[str]) -> int:
    """Install what is missing, or say why not; never an error, for all other tests can run."""
    for name in names:
        if find(name) is None:
            _install(name)
    return 0


def _install(name: str) -> None:
    apt, before = shutil.which("apt-get"), _right_to_install()
    if apt is None or before is None:
        print(f"there is no {name}, and none can be installed here: its tests are skipped, or fail if CI=true")
        return
    print(f"installing {name}, for tests", flush=True)
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES[name]]):
        variables = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run([*before, apt, *words], env=variables, stdout=subprocess.DEVNULL, check=False)
        if done.returncode and words[0] == "install":
            print(f"{name} could not be installed; its tests are skipped, or fail if CI=true")


def _right_to_install() -> list[str] | None:
    """What to put before a command that root must run; None where that is not possible without a password."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    asked = sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0
    return [sudo, "-n"] if sudo and asked else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
