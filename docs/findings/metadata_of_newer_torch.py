"""A checkpoint of this torch, loaded by the torch of another interpreter.

python metadata_of_newer_torch.py OTHER_PYTHON
"""

import subprocess
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

_, first, *folder = sys.argv
if first == "load":
    state = {"weight": torch.zeros(4)}
    try:
        dcp.load(state, checkpoint_id=folder[0], no_dist=True)
        print(f"loaded by {torch.__version__}: {state['weight'].tolist()}")
    except CheckpointException as error:
        *_, why = str(error).strip().splitlines()
        print(f"loaded by {torch.__version__}: {type(error).__name__}: {why[:150]}")
        sys.exit(1)
else:
    with tempfile.TemporaryDirectory() as place:
        dcp.save({"weight": torch.ones(4)}, checkpoint_id=place, no_dist=True)
        print(f"saved by {torch.__version__}", flush=True)
        sys.exit(subprocess.run([first, __file__, "load", place], stderr=subprocess.DEVNULL).returncode)
