"""`python -m maskconnect` is the command `maskconnect`."""

from maskconnect.cli.launch import end, has_ended
from maskconnect.cli.main import main

if __name__ == "__main__":
    end(0 if has_ended() else main())
