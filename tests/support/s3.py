"""A server with S3's interface, on this machine and for a test alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "of-the-tests", "AWS_SECRET_ACCESS_KEY": "told-to-nobody"}


@dataclass(frozen=True)
class Server:
    """One that is up, and a bucket in it."""

    endpoint: str
    bucket: str

    @property
    def options(self) -> dict[str, Any]:
        """For `storage=fsspec_s3`."""
        return {"url": f"s3://{self.bucket}/below", "file_system": {"endpoint_url": self.endpoint}}

    @property
    def words(self) -> tuple[str, str]:
        """The same as overrides."""
        return (
            f"storage.options.url=s3://{self.bucket}/below",
            f"storage.options.file_system.endpoint_url={self.endpoint}",
        )

    def objects(self) -> Mapping[str, bytes]:
        """The contents of the bucket."""
        from moto.s3.models import s3_backends

        held = s3_backends["123456789012"]["aws"].buckets[self.bucket].keys.items()
        return {name: key.value for name, key in held}


@contextmanager
def s3_server(bucket: str) -> Iterator[Server]:
    """Meanwhile a server is up, in a thread, on a port that was free."""
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        s3_backends["123456789012"]["aws"].create_bucket(bucket, "us-east-1")
        yield Server("http://{}:{}".format(*server.get_host_and_port()), bucket)
    finally:
        server.stop()
