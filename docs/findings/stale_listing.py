"""FsspecReader and FsspecWriter on S3, in a process that has listed a folder before somebody saved into it.

python stale_listing.py        (with s3fs, moto[s3], flask, flask-cors: the server is moto's)
"""

import os
import socket
import subprocess
import sys
import time
import warnings

import s3fs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

PLACE = "s3://bucket/step-1"
SERVE = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"
warnings.simplefilter("ignore")


def save(value: float, **options) -> None:
    writer = FsspecWriter(PLACE, sync_files=False, **options)
    dcp.save({"weight": torch.full((2,), value)}, storage_writer=writer, no_dist=True)


def tried(do) -> str:
    try:
        return f"done {do() or ''}".strip()
    except CheckpointException as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def loaded() -> list[float]:
    weight = torch.zeros(2)
    dcp.load({"weight": weight}, storage_reader=FsspecReader(PLACE), no_dist=True)
    return weight.tolist()


if sys.argv[1:]:  # the other process
    save(1.0)
    sys.exit()

print(f"torch {torch.__version__}, s3fs {s3fs.__version__}")
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
os.environ |= {
    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
}
server = subprocess.Popen([sys.executable, "-c", SERVE, port], stderr=subprocess.DEVNULL)
try:
    while socket.socket().connect_ex(("127.0.0.1", int(port))):
        time.sleep(0.1)
    client = s3fs.S3FileSystem()
    client.mkdir("bucket")
    client.pipe_file(f"{PLACE}/__0_0.distcp", b"the other process has begun to save")
    print(f"  listed: {client.ls(PLACE)}")
    subprocess.run([sys.executable, __file__, "save"], check=True)
    print("  another process has saved [1.0, 1.0] there, and its save has ended")
    print(f"  load: {tried(loaded)}")
    refused = tried(lambda: save(2.0, overwrite=False))
    print(f"  save of [2.0, 2.0] with overwrite=False: {refused}")
    client.invalidate_cache()
    held = loaded()
    print(f"  it holds {held}")
finally:
    server.terminate()
    server.wait()
sys.exit(held != [1.0, 1.0])
