"""Scripts for kernels in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

ALONE = """
import torch
from tensorformer.gates import GATES
from tensorformer.ops.act_and_mul import native
torch.set_num_threads(1)
gate = GATES["swiglu"]
"""


def run_alone(*scripts: str) -> list[tuple[str, str]]:
    """What each script prints to stdout and stderr, all run at once, each with its children gone at the end."""
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", s], stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        for s in scripts
    ]
    try:
        return [p.communicate(timeout=100) for p in started]
    finally:
        for p in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
