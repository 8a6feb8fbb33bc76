"""FsspecWriter and FsspecReader with options of a file system, given a checkpoint id: whose options are used?

python fsspec_options.py
"""

import sys
from collections import defaultdict
from typing import ClassVar

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException


class Accounts(MemoryFileSystem):
    """A store that has accounts, as that of s3fs with another `profile=` is another one."""

    protocol = "accounts"
    stores: ClassVar = defaultdict(dict)

    def __init__(self, account="nobody", **options):
        super().__init__(**options)
        self.store, self.pseudo_dirs = self.stores[account], [""]


def told() -> str:
    held = {account: sorted(names) for account, names in Accounts.stores.items() if names}
    return str(
        {account: [name.removeprefix("accounts://") for name in names] for account, names in held.items()}
    )


fsspec.register_implementation("accounts", Accounts)
print(f"torch {torch.__version__}, fsspec {fsspec.__version__}")

writer = FsspecWriter("accounts://run/step-1", account="mine", sync_files=False)
dcp.save({"weight": torch.ones(2)}, storage_writer=writer, no_dist=True)
print(f"  saved with account='mine': {told()}")
dcp.save(
    {"weight": torch.ones(2)}, checkpoint_id="accounts://run/step-2", storage_writer=writer, no_dist=True
)
print(f"  and with a checkpoint_id:  {told()}")

wrong = "nobody" in Accounts.stores
weight = torch.zeros(2)
reader = FsspecReader("accounts://run", account="mine")
try:
    dcp.load({"weight": weight}, checkpoint_id="accounts://run/step-1", storage_reader=reader, no_dist=True)
    print(f"  loaded with account='mine' and a checkpoint_id: {weight.tolist()}")
except CheckpointException as error:
    last = str(error).strip().splitlines()[-1]
    print(f"  loaded with account='mine' and a checkpoint_id: {type(error).__name__}: {last}")
    wrong = True
sys.exit(wrong)
