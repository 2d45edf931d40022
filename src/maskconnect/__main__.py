"""`python -m maskconnect` is the command `maskconnect`."""

from maskconnect.cli.launch import end, is_over
from maskconnect.cli.main import main

if __name__ == "__main__":
    end(0 if is_over() else main())
