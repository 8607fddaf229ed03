"""`make proto`: inference_pb2.py, its stub and the gRPC stubs from inference.proto, adapted to where they live.

Needs grpcio-tools. Two changes to what the compiler writes: messages go into our own pool (see pool.py), and the gRPC
stubs import by package.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_POOL = "_descriptor_pool.Default()"


def main() -> int:
    """Write the files; the exit code."""
    from grpc_tools import protoc

    outputs = [f"--{kind}_out={HERE}" for kind in ("python", "pyi", "grpc_python")]
    code = int(protoc.main(["protoc", f"-I{HERE}", *outputs, str(HERE / "inference.proto")]))
    if code:
        return code
    _replace("inference_pb2.py", DEFAULT_POOL, "_pool.POOL", "import descriptor as _descriptor\n",
             "import descriptor as _descriptor\nfrom taktd.ipc.grpc import pool as _pool\n")  # fmt: skip
    _replace("inference_pb2_grpc.py", "import inference_pb2 as", "from taktd.ipc.grpc import inference_pb2 as")
    return 0


def _replace(name: str, *pairs: str) -> None:
    path = HERE / name
    text = path.read_text(encoding="utf-8")
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        if old not in text:
            raise SystemExit(f"{name}: the compiler no longer writes {old!r}; adapt {__file__}")
        text = text.replace(old, new, 1)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
