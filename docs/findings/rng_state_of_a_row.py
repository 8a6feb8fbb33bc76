"""torch.set_rng_state with a state that is a row of a larger tensor.

python rng_state_of_a_row.py
"""

import subprocess
import sys

import torch

SETTING = "import torch; state = torch.get_rng_state(); torch.set_rng_state({})"
WAYS = {
    "the state itself": "state",
    "row 0 of two stacked": "torch.stack([state, state])[0]",
    "row 1 of two stacked": "torch.stack([state, state])[1]",
    "a clone of row 1": "torch.stack([state, state])[1].clone()",
}

print(f"torch {torch.__version__}")
wrong = 0
for name, way in WAYS.items():
    code = f"{SETTING.format(way)}; print(torch.equal(torch.get_rng_state(), state))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    is_set = ended.stdout.strip() == "True"
    wrong += not is_set
    print(f"  {name}: {'set' if is_set else f'ended with {ended.returncode}'}")
sys.exit(bool(wrong))
