"""`python -m maskconnect` is the command `maskconnect`."""

from maskconnect.cli.launch import end
from maskconnect.cli.main import main

if __name__ == "__main__":
    end(main())
