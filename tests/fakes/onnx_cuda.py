"""A stand-in for ONNX Runtime with its CUDA provider, over the simulated driver: the CPU does the work, on the stream.

It has the calls of `onnxruntime` that taktd.engines.onnx_cuda makes; a test holds them to the real module.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as real

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
NUMPY = {1: "f4", 6: "i4", 7: "i8", 9: "?", 10: "f2"}


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_cuda_host_address.restype = ctypes.c_uint64
    library.fake_cuda_host_address.argtypes = [ctypes.c_uint64]
    library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3
    library.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    return library


class OrtValue:
    def __init__(self, value: np.ndarray) -> None:
        self._dims, self._address, self._life = value.shape, ctypes.c_uint64(), _library().fake_cuda_generation()
        _library().cuMemAlloc_v2(ctypes.byref(self._address), ctypes.c_size_t(max(1, value.nbytes)))
        ctypes.memmove(_library().fake_cuda_host_address(self._address.value), value.ctypes.data, value.nbytes)

    def shape(self) -> list[int]:
        return list(self._dims)

    def data_ptr(self) -> int:
        return int(self._address.value)

    def __del__(self) -> None:
        if self._life == _library().fake_cuda_generation():  # else it went with its context
            _library().cuMemFree_v2(self._address.value)


class IOBinding:
    def __init__(self, session: InferenceSession) -> None:
        self._names = [o.name for o in session._session.get_outputs()]
        self.inputs: dict[str, tuple[int, tuple[int, ...], int]] = {}
        self.outputs: dict[str, int | None] = {}
        self.made: dict[str, OrtValue] = {}

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: int, shape: tuple[int, ...], buffer_ptr: int
    ) -> None:
        assert device_type == "cuda"
        self.inputs[name] = element_type, shape, buffer_ptr

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: Any = None, shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        assert device_type == "cuda"
        self.outputs[name] = buffer_ptr

    def get_outputs(self) -> list[OrtValue]:
        return [self.made[name] for name in self._names]


class InferenceSession:
    def __init__(self, path: str, sess_options: Any, providers: Any, enable_fallback: int = 1) -> None:
        ((name, options),) = providers
        assert name == CUDA
        assert not enable_fallback
        self._stream = int(options["user_compute_stream"])
        self._session = real.InferenceSession(path, providers=[CPU])
        self._failure: Exception | None = None

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def disable_fallback(self) -> None:
        pass

    def io_binding(self) -> IOBinding:
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding) -> None:
        library, failures = _library(), []

        def work(_: int) -> None:
            try:
                self._work(library, iobinding)
            except Exception as error:
                failures.append(error)

        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)
        code = library.cuLaunchHostFunc(self._stream, ctypes.cast(function, ctypes.c_void_p), None)
        code = code or library.cuStreamSynchronize(self._stream)
        for name, address in iobinding.outputs.items():
            if address is None and not code and not failures:
                iobinding.made[name] = OrtValue(self._results[name])
        if code or failures:
            raise RuntimeError(failures[0] if failures else f"CUDA failure {code}")

    def _work(self, library: Any, binding: IOBinding) -> None:
        feed = {}
        for name, (number, dims, address) in binding.inputs.items():
            kind = np.dtype(NUMPY[number])
            size = int(np.prod(dims, dtype=np.int64)) * kind.itemsize
            memory = (ctypes.c_char * size).from_address(library.fake_cuda_host_address(address))
            feed[name] = np.frombuffer(memory, kind).reshape(dims)
        names = list(binding.outputs)
        self._results = dict(zip(names, map(np.ascontiguousarray, self._session.run(names, feed)), strict=True))
        for name, to in binding.outputs.items():
            if to is not None:
                value = self._results[name]
                ctypes.memmove(library.fake_cuda_host_address(to), value.ctypes.data, value.nbytes)


def module(**overrides: Any) -> SimpleNamespace:
    """What stands for `onnxruntime`; `overrides` replace names of it."""
    names = {
        "SessionOptions": real.SessionOptions,
        "InferenceSession": InferenceSession,
        "get_available_providers": lambda: [CUDA, CPU],
    }
    return SimpleNamespace(**{**names, **overrides})
