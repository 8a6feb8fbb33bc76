"""Measure what recording costs a step of a small model: `python bench/script.py`.

A transformer with two layers trains on one thread, alternately with and without the recorder. The last line
is the median step of each, and their ratio.
"""

# ruff: noqa: T201

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDER = Path(__file__).parents[1] / "src" / "dcpbench" / "plugins" / "script" / "recorder"


def train(device: str, steps: int, width: int) -> None:
    """Print the CPU seconds of each step, or of a GPU's step the seconds until it has ended."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(16, 32, width, device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter  # CPU seconds: others may compute too
    seconds = []
    for _ in range(steps):
        began = clock()
        loss = (model(inputs) - inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        seconds.append(clock() - began)
    print(json.dumps(seconds[5:]))


def measured(options: argparse.Namespace, recorded: bool) -> list[float]:
    """Return the seconds of each step of one process."""
    words = [
        sys.executable,
        __file__,
        "--train",
        *(f"--{key}={value}" for key, value in vars(options).items() if key != "train"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if recorded:
            settings = Path(folder, "settings.json")
            known = {"records": folder, "watched": f"{folder}/out", "every": options.every, "stops": []}
            settings.write_text(json.dumps(known))
            environment |= {"DCPBENCH_SCRIPT": str(settings), "PYTHONPATH": str(RECORDER)}
        ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout)


def main() -> None:
    """Alternate both, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    if options.train:
        train(options.device, options.steps, options.width)
        return
    plain, recorded = [], []
    for _ in range(options.pairs):
        plain += measured(options, False)
        recorded += measured(options, True)
    before, after = (1e3 * statistics.median(seconds) for seconds in (plain, recorded))
    print(f"step {before:.2f} ms, recorded {after:.2f} ms: {after / before - 1:+.0%}")


if __name__ == "__main__":
    main()
