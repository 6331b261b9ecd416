"""An S3 server on loopback (moto), and a look at what is in it by a client of its own (boto3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLES = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class Bucket:
    """A bucket of the server. `client`: of boto3."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name
        client.create_bucket(Bucket=name)

    def __str__(self) -> str:
        return f"s3://{self.name}"

    def names(self, folder: str = "") -> list[str]:
        """The names of all objects below a folder, sorted."""
        found = self.client.list_objects_v2(Bucket=self.name, Prefix=folder).get("Contents", [])
        return sorted(each["Key"].removeprefix(folder) for each in found)

    def read(self, name: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.name, Key=name)["Body"].read()
        return content

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=content)

    def gone(self) -> bool:
        """Remove the bucket. False: a process has put an object meanwhile."""
        for name in self.names():
            self.client.delete_object(Bucket=self.name, Key=name)
        try:
            self.client.delete_bucket(Bucket=self.name)
        except self.client.exceptions.ClientError:
            return False
        return True

    def begin_upload(self, name: str, part: bytes) -> None:
        """Begin an upload in parts that nobody will complete, as a process does that is killed."""
        upload = self.client.create_multipart_upload(Bucket=self.name, Key=name)["UploadId"]
        self.client.upload_part(Bucket=self.name, Key=name, UploadId=upload, PartNumber=1, Body=part)

    def uploads(self) -> list[str]:
        """The names of all uploads that nobody has completed."""
        found = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [each["Key"] for each in found]


@contextmanager
def served() -> Iterator[str]:
    """The endpoint of a server, while the context lasts."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()
