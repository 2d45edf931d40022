"""The end of a worker: threads of torch that are still there when Python ends abort the process now and then."""

import os
import sys


def leave_at_once():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
