"""The command line: `maskconnect VERB ...`."""
