"""The messages of ``worker.proto``, and its methods, for both ends of a connection."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "octavo.worker.v1"
SERVICE: Final = f"{PACKAGE}.Worker"
FLOAT32, BFLOAT16 = 0, 1
"""Values of ``LogitsType``."""
UNLIMITED: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
"""Options of a worker: the logits of a step have many megabytes, and it trusts who has its key."""


def _classes() -> dict[str, Any]:
    files = descriptor_pb2.FileDescriptorSet()
    files.ParseFromString(resources.files("octavo_fleet.worker").joinpath("worker.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    found: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name for file in files.file], pool)
    return found


_BY_NAME = _classes()
DescribeRequest: Any = _BY_NAME[f"{PACKAGE}.DescribeRequest"]
Description: Any = _BY_NAME[f"{PACKAGE}.Description"]
Step: Any = _BY_NAME[f"{PACKAGE}.Step"]
Sequence: Any = _BY_NAME[f"{PACKAGE}.Sequence"]
StepResult: Any = _BY_NAME[f"{PACKAGE}.StepResult"]
Error: Any = _BY_NAME[f"{PACKAGE}.Error"]
