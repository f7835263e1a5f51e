"""A small training run for ``accelerate launch``, see test_distill.py."""

import sys
from pathlib import Path

from accelerate import PartialState
from test_distill import run

run(Path(sys.argv[1]), (0, 2), (1,))
if PartialState().is_main_process:  # two processes that print at once mix their words
    print("processes", PartialState().num_processes)
