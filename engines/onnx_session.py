"""The one place that makes an ONNX Runtime session, so that every process of taktd makes the same one.

Imports ONNX Runtime with its telemetry off (from 1.29 on it reports from Linux too, unless told before the import).
"""

from __future__ import annotations

import os
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime

from taktd.engines.errors import ModelRefused

__all__ = ["RUNTIME_VERSION", "open_session"]

RUNTIME_VERSION: str = onnxruntime.__version__

onnxruntime.set_default_logger_severity(4)  # fatal only: what matters comes back as an exception


def open_session(path: str, *, optimized_path: str | None = None) -> Any:
    """An ``InferenceSession`` on the CPU that runs in the caller's thread, optimised as by default.

    ``optimized_path``: also write the optimised graph there. Raises ``ModelRefused`` with ONNX Runtime's own words.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4
    if optimized_path is not None:
        options.optimized_model_filepath = optimized_path
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes have no common base below Exception
        raise ModelRefused(
            "ONNX Runtime can't load the model",
            found=str(error).strip(),
            allowed=f"a model that ONNX Runtime {RUNTIME_VERSION} runs on the CPU",
            hint="Check it with onnx.checker.check_model; an unknown operator needs another opset or export.",
        ) from error
    if session.get_providers() != ["CPUExecutionProvider"]:
        raise ModelRefused(
            "ONNX Runtime chose another provider than asked",
            found=", ".join(session.get_providers()),
            allowed="CPUExecutionProvider",
            hint="Reinstall onnxruntime.",
        )
    return session


def open_reference_session(path: str) -> Any:
    """A session as anybody gets it who sets nothing: what engines are compared with. It has threads of its own, which
    end with it. Raises ``ModelRefused``."""
    try:
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelRefused(
            "ONNX Runtime can't load the model",
            found=str(error).strip(),
            allowed=f"a model that ONNX Runtime {RUNTIME_VERSION} runs on the CPU",
            hint="Check it with onnx.checker.check_model; an unknown operator needs another opset or export.",
        ) from error
