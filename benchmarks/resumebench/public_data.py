"""Write synthetic data for the public scripts of `public.json` into a folder of their checkouts."""

import pickle
import random
from pathlib import Path

import numpy as np


def write(folder):
    """Write tokens for nanoGPT and llama2.c, where they are checked out, and names for makemore."""
    rng = np.random.default_rng(0)
    if (folder / "nanoGPT").exists():
        place = folder / "nanoGPT" / "data" / "tiny"
        place.mkdir(parents=True, exist_ok=True)
        for split in ("train", "val"):
            rng.integers(0, 60, 4000).astype(np.uint16).tofile(place / f"{split}.bin")
        (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 60, "itos": {}, "stoi": {}}))
    if (folder / "llama2.c").exists():
        place = folder / "llama2.c" / "data" / "tok64"
        place.mkdir(parents=True, exist_ok=True)
        for number in range(3):
            rng.integers(0, 64, 3000).astype(np.uint16).tofile(place / f"data{number:02}.bin")
    names = ["".join(random.Random(number).choices("abcdefgh", k=6)) for number in range(2000)]
    (folder / "data").mkdir(exist_ok=True)
    Path(folder, "data", "names.txt").write_text("\n".join(names))
