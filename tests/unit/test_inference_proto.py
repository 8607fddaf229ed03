"""inference.proto against what Triton's client was generated from: names, numbers, types. Generated code is current."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from taktd.ipc.grpc import inference_pb2 as pb

HERE = Path(__file__).resolve().parents[2] / "ipc/grpc"


def shape_of(module: Any) -> tuple[dict[str, dict[str, tuple[Any, ...]]], dict[str, tuple[Any, ...]], dict[str, int]]:
    """(message → field → number, type, label, type's name), (method → types, streaming), enum values."""
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    messages: dict[str, dict[str, tuple[Any, ...]]] = {}

    def take(message: Any, prefix: str) -> None:
        messages[prefix + message.name] = {f.name: (f.number, f.type, f.label, f.type_name) for f in message.field}
        for nested in message.nested_type:
            take(nested, f"{prefix}{message.name}.")

    for message in file.message_type:
        take(message, "")
    methods = {
        m.name: (m.input_type, m.output_type, m.client_streaming, m.server_streaming)
        for service in file.service
        for m in service.method
    }
    return messages, methods, {v.name: v.number for enum in file.enum_type for v in enum.value}


def test_messages_and_methods_are_those_of_the_published_protocol() -> None:
    ours, our_methods, our_enums = shape_of(pb)
    theirs, their_methods, _ = shape_of(service_pb2)
    config, _, their_enums = shape_of(model_config_pb2)
    theirs |= config
    assert our_methods == their_methods
    for name, fields in ours.items():
        for field, about in fields.items():
            assert theirs[name][field] == about, f"{name}.{field}"
    assert our_enums.items() <= their_enums.items()
    left_out = {name for name in theirs if name not in ours and name not in config}
    assert not left_out, "messages of the service that ours lacks"


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    assert protoc.main(["protoc", f"-I{HERE}", f"--python_out={tmp_path}", str(HERE / "inference.proto")]) == 0
    fresh, committed = (p.read_text() for p in (tmp_path / "inference_pb2.py", HERE / "inference_pb2.py"))
    line = next(text for text in fresh.splitlines() if "AddSerializedFile" in text)
    assert line.partition("AddSerializedFile")[2] in committed, "run make proto"


def test_ours_can_be_imported_beside_others() -> None:
    """Two definitions of one message name can't share protobuf's default pool."""
    assert pb.ModelInferRequest.DESCRIPTOR is not service_pb2.ModelInferRequest.DESCRIPTOR
    theirs = service_pb2.ModelInferRequest(model_name="x")
    assert pb.ModelInferRequest.FromString(theirs.SerializeToString()).model_name == "x"
