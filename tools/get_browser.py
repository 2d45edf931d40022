"""See to it that the tests of the page find a Chromium: install Debian's where that is allowed.

    python tools/get_browser.py

Nothing is done where there is one already (MASKCONNECT_BROWSER names another), or where this may not install any: the
tests of the page are then skipped, unless CI=true, where they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """The browser, if there is one."""
    named = os.environ.get("MASKCONNECT_BROWSER")
    return shutil.which(named) if named else next((path for name in NAMES if (path := shutil.which(name))), None)


def main() -> int:
    """Install a browser, or say why not; never an error, for all other tests can run."""
    if find():
        return 0
    apt, before = shutil.which("apt-get"), _right_to_install()
    if apt is None or before is None:
        print("there is no Chromium, and none can be installed here: tests of the page are skipped, or fail if CI=true")
        return 0
    print("installing chromium, for the tests of the page", flush=True)
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
        variables = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run([*before, apt, *words], env=variables, stdout=subprocess.DEVNULL, check=False)
        if done.returncode and words[0] == "install":
            print("chromium could not be installed; tests of the page are skipped, or fail if CI=true")
    return 0


def _right_to_install() -> list[str] | None:
    """What to put before a command that root must run; None where that is not possible without a password."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    asked = sudo and subprocess.run([sudo, "-n", "true"], capture_output=True, check=False).returncode == 0
    return [sudo, "-n"] if sudo and asked else None


if __name__ == "__main__":
    sys.exit(main())
