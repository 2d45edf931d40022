"""`python -m maskconnect` is the command `maskconnect`."""

from maskconnect.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
