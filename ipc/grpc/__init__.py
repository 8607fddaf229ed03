"""The Open Inference Protocol v2 over gRPC: protocol code over `taktd.ipc.inference.Backend`. Called by the gateway.

`inference.proto` is the source of `inference_pb2*`; `messages.py` turns bytes into requests and answers into bytes,
`service.py` has the methods, `server.py` one listener with health and reflection.
"""
