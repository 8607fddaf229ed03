"""A stand-in for NVIDIA's `tensorrt` on the simulated CUDA driver; under its other name, for `tensorrt_rtx`. For tests.

Its engines are ONNX Runtime on the CPU, put on the stream as host functions, over the simulated driver's memory. It has
only names that the real bindings of the version it plays have: `names/*.json` are dumps of those, and what a version
lacks is taken away at import. Failures come back as the real ones do: None, False, and words in the log.

As with the real one, the first logger is the logger of all for as long as anything made with it lives, weights are in
device memory, and the operators that its plugins bring exist only after init_libnvinfer_plugins.

FAKE_TENSORRT_VERSION: 11.4.0.106 (default), 10.16.1.11 or 10.3.0. FAKE_TENSORRT_OLD_DRIVER: it is one that TensorRT
does not work with. FAKE_TENSORRT_LEAVES_BADLY: a process that has loaded it crashes when it ends.
FAKE_TENSORRT_STEP_S: how long each step of a build takes. FAKE_TENSORRT_TROUBLE: a file that a test writes; while it
says `nan`, outputs are NaN, and while it says `slow SECONDS` each run takes that much longer.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
import json
import os
import time
import weakref
from pathlib import Path

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnx
import onnxruntime

_RTX = __name__ == "tensorrt_rtx"
__version__ = "1.7.1.116" if _RTX else os.environ.get("FAKE_TENSORRT_VERSION", "11.4.0.106")
_NAMES = json.loads((Path(__file__).resolve().parents[2] / "names" / f"{__version__}.json").read_text())["classes"]
_MAGIC = b"FAKEPLAN"
_STEPS = 5
_ONNX_TO_TRT = {1: "FLOAT", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF", 16: "BF16", 2: "UINT8"}
_NUMPY = {"FLOAT": "f4", "INT8": "i1", "INT32": "i4", "INT64": "i8", "BOOL": "?", "HALF": "f2", "UINT8": "u1"}


def _enum(name: str) -> type[enum.IntEnum]:
    kind = enum.IntEnum(name, {member: i for i, member in enumerate(_NAMES[name]["enum"])})
    kind.__module__ = __name__
    return kind


BuilderFlag = _enum("BuilderFlag")
NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag")
ExecutionContextAllocationStrategy = _enum("ExecutionContextAllocationStrategy")
MemoryPoolType = _enum("MemoryPoolType")
DataType = _enum("DataType")
TensorIOMode = _enum("TensorIOMode")
TensorLocation = _enum("TensorLocation")
TensorFormat = _enum("TensorFormat")
if _RTX:
    DynamicShapesKernelSpecializationStrategy = _enum("DynamicShapesKernelSpecializationStrategy")
ErrorCode = _enum("ErrorCode")
_Severity = _enum("ILogger.Severity")


def _cuda() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.fake_cuda_host_address.restype = ctypes.c_uint64
    library.fake_cuda_host_address.argtypes = [ctypes.c_uint64]
    library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    return library


def _device() -> tuple[str, int]:
    """What decides whether a plan can be used (the real one: compute capability), and what makes it another card."""
    device, name, size = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    try:
        cuda = _cuda()
    except OSError:
        return "no device", 0
    if cuda.cuCtxGetDevice(ctypes.byref(device)) or cuda.cuDeviceGetName(name, 128, device):
        return "no device", 0
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return name.value.decode(), size.value


class ILogger:
    Severity = _Severity

    def __init__(self):
        pass


class Logger(ILogger):
    def __init__(self, min_severity=_Severity.WARNING):
        super().__init__()
        self.min_severity = min_severity

    def log(self, severity, msg):
        print(severity, msg)


_made = weakref.WeakSet()
_logger = None
_plugins = False


if os.environ.get("FAKE_TENSORRT_LEAVES_BADLY"):
    atexit.register(os.abort)


def _begin(made, logger):
    """Which logger hears what `made` has to say. Raises what the bindings raise where the library made nothing."""
    global _logger
    if not _made:
        _logger = logger
    elif _logger is not logger:
        _logger.log(_Severity.WARNING, "The logger passed into createInfer… differs from one already registered")
    if os.environ.get("FAKE_TENSORRT_OLD_DRIVER"):
        _logger.log(_Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")
    _made.add(made)
    return _logger


class IProgressMonitor:
    def __init__(self):
        pass


class IHostMemory(bytes):
    @property
    def nbytes(self):
        return len(self)


class ITensor:
    def __init__(self, value):
        self.name = value.name
        self.dtype = getattr(DataType, _ONNX_TO_TRT[value.type.tensor_type.elem_type])
        dims = value.type.tensor_type.shape.dim
        self.shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)
        self.is_shape_tensor = False


class INetworkDefinition:
    def __init__(self):
        self._model = None
        self._inputs, self._outputs = [], []

    @property
    def num_inputs(self):
        return len(self._inputs)

    @property
    def num_outputs(self):
        return len(self._outputs)

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]


class ParserError:
    def __init__(self, code, desc, node=-1, name="", operator=""):
        self._told = code, desc, node, name, operator

    def code(self):
        return self._told[0]

    def desc(self):
        return self._told[1]

    def node(self):
        return self._told[2]

    def node_name(self):
        return self._told[3]

    def node_operator(self):
        return self._told[4]


class OnnxParser:
    def __init__(self, network, logger):
        self._network, self._logger, self._errors = network, logger, []

    @property
    def num_errors(self):
        return len(self._errors)

    def get_error(self, index):
        return self._errors[index]

    def parse_from_file(self, model):
        try:
            loaded = onnx.load(model)
        except Exception as error:
            self._errors.append(ParserError(ErrorCode.MODEL_DESERIALIZE_FAILED, f"Failed to parse: {error}"))
            return False
        for index, node in enumerate(loaded.graph.node):
            if not onnx.defs.has(node.op_type, node.domain) and not (_plugins and node.op_type.endswith("_TRT")):
                desc = f"Plugin not found, are the plugin name, version, and namespace correct? ({node.op_type})"
                self._errors.append(ParserError(ErrorCode.UNSUPPORTED_NODE, desc, index, node.name, node.op_type))
        if self._errors:
            return False
        weights = {i.name for i in loaded.graph.initializer}
        for value in (*loaded.graph.input, *loaded.graph.output):
            if value.type.tensor_type.elem_type not in _ONNX_TO_TRT:
                self._errors.append(ParserError(ErrorCode.UNSUPPORTED_GRAPH, f"unsupported type of {value.name}"))
                return False
        self._network._model = loaded
        self._network._inputs = [ITensor(v) for v in loaded.graph.input if v.name not in weights]
        self._network._outputs = [ITensor(v) for v in loaded.graph.output]
        return True


class IOptimizationProfile:
    def __init__(self):
        self._shapes = {}

    def set_shape(self, input, min, opt, max):
        if not all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
            raise ValueError("profile dimensions must satisfy min <= opt <= max")
        self._shapes[input] = [list(min), list(opt), list(max)]

    def get_shape(self, input):
        return [tuple(shape) for shape in self._shapes[input]]


class ITimingCache:
    def __init__(self, content):
        self._content = content

    def serialize(self):
        return IHostMemory(self._content or b"timing")


class IBuilderConfig:
    def __init__(self):
        self._limits, self._profiles, self._cache = {}, [], None
        self._flags = {BuilderFlag.TF32}
        self.max_aux_streams, self.builder_optimization_level, self.progress_monitor = -1, 3, None

    def set_memory_pool_limit(self, pool, pool_size):
        self._limits[pool] = pool_size

    def set_flag(self, flag):
        self._flags.add(flag)

    def clear_flag(self, flag):
        self._flags.discard(flag)

    def get_flag(self, flag):
        return flag in self._flags

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache):
        content = bytes(serialized_timing_cache)
        if content and not content.startswith(b"timing of "):
            _logger.log(_Severity.ERROR, "createTimingCache: the blob is damaged")
            return None
        return ITimingCache(content)

    def set_timing_cache(self, cache, ignore_mismatch):
        if not isinstance(cache, ITimingCache):
            raise TypeError("set_timing_cache(): incompatible function arguments")
        if cache._content and cache._content != b"timing of " + __version__.encode():
            _logger.log(_Severity.ERROR, "setTimingCache: another version's cache")
            return ignore_mismatch
        self._cache = cache
        return True

    def get_timing_cache(self):
        return self._cache


class IPluginRegistry:
    def load_library(self, plugin_path):
        return object() if Path(plugin_path).is_file() else None


class Builder:
    def __init__(self, logger):
        self._logger = _begin(self, logger)

    def create_network(self, flags=0):
        strong = getattr(NetworkDefinitionCreationFlag, "STRONGLY_TYPED")  # noqa: B009
        expected = 1 << int(strong) if __version__.startswith("10") else 0
        if flags != expected:
            self._logger.log(_Severity.ERROR, f"the stand-in wants strongly typed networks: flags {expected}")
            return None
        return INetworkDefinition()

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def get_plugin_registry(self):
        return IPluginRegistry()

    def build_serialized_network(self, network, config):
        monitor = config.progress_monitor
        dynamic = [t for t in network._inputs if -1 in t.shape]
        if dynamic and not config._profiles:
            self._logger.log(_Severity.ERROR, "Network has dynamic inputs, but no optimization profile is defined.")
            return None
        if monitor:
            monitor.phase_start("Building Engine", None, _STEPS)
        for step in range(_STEPS):
            time.sleep(float(os.environ.get("FAKE_TENSORRT_STEP_S", "0")))
            if monitor and not monitor.step_complete("Building Engine", step):
                self._logger.log(_Severity.ERROR, "Build was cancelled")
                return None
        if monitor:
            monitor.phase_finish("Building Engine")
        if config._cache is not None:
            config._cache._content = b"timing of " + __version__.encode()
        header = {
            "version": __version__,
            "device": "any" if _RTX else _device()[0],
            "memory": _device()[1],
            "profiles": [p._shapes for p in config._profiles],
            "inputs": [[t.name, t.dtype.name, t.shape] for t in network._inputs],
            "outputs": [[t.name, t.dtype.name, t.shape] for t in network._outputs],
            "flags": sorted(f.name for f in config._flags),
            "aux_streams": config.max_aux_streams,
            "limits": {pool.name: size for pool, size in config._limits.items()},
            "level": config.builder_optimization_level,
        }
        text = json.dumps(header).encode()
        model = network._model.SerializeToString()
        return IHostMemory(_MAGIC + len(text).to_bytes(8, "little") + text + model)


class Runtime:
    def __init__(self, logger):
        self._logger = _begin(self, logger)

    def get_plugin_registry(self):
        return IPluginRegistry()

    def deserialize_cuda_engine(self, serialized_engine):
        plan = bytes(serialized_engine)
        if plan[:8] != _MAGIC:
            self._logger.log(_Severity.ERROR, "IRuntime::deserializeCudaEngine: magic tag does not match")
            return None
        size = int.from_bytes(plan[8:16], "little")
        header = json.loads(plan[16 : 16 + size])
        if header["version"] != __version__:
            self._logger.log(_Severity.ERROR, f"built with version {header['version']}, this is {__version__}")
            return None
        device, memory = ("any", header["memory"]) if _RTX else _device()
        if header["device"] != device:
            self._logger.log(_Severity.ERROR, f"built on {header['device']}, this is {device}")
            return None
        if header["memory"] != memory:
            said = "Using an engine plan file across different models of devices is not recommended"
            self._logger.log(_Severity.WARNING, said)
        weights = ctypes.c_uint64()
        if _cuda().cuMemAlloc_v2(ctypes.byref(weights), ctypes.c_size_t(len(plan))):
            self._logger.log(_Severity.ERROR, "Error Code 2: OutOfMemory (Requested size was for weights.)")
            return None
        return ICudaEngine(self, header, plan[16 + size :], weights.value)


class ICudaEngine:
    _weights = 0

    def __init__(self, runtime, header, model, weights):
        self._runtime, self._weights, self._life = runtime, weights, _cuda().fake_cuda_generation()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._header, self._logger = header, runtime._logger
        self._io = {t[0]: t for t in (*header["inputs"], *header["outputs"])}
        graph = onnx.load_from_string(model).graph
        self._sizes = {n.input[1] for n in graph.node if n.op_type in ("Reshape", "Expand", "Tile")}

    def __del__(self):
        if self._weights and self._life == _cuda().fake_cuda_generation():
            _cuda().cuMemFree_v2(self._weights)

    @property
    def num_io_tensors(self):
        return len(self._io)

    @property
    def num_optimization_profiles(self):
        return max(1, len(self._header["profiles"]))

    @property
    def device_memory_size_v2(self):
        return 4096

    def get_tensor_name(self, index):
        return list(self._io)[index]

    def get_tensor_mode(self, name):
        if name not in self._io:
            return TensorIOMode.NONE
        return TensorIOMode.INPUT if name in [t[0] for t in self._header["inputs"]] else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return getattr(DataType, self._io[name][1])

    def get_tensor_shape(self, name):
        return tuple(self._io[name][2])

    def get_tensor_location(self, name):
        return TensorLocation.HOST if name in self._sizes else TensorLocation.DEVICE

    def get_tensor_format(self, name):
        return TensorFormat[self._header.get("formats", {}).get(name, "LINEAR")]

    def get_tensor_profile_shape(self, name, profile_index):
        for shapes in self._header["profiles"][profile_index : profile_index + 1]:
            if name in shapes:
                return [tuple(shape) for shape in shapes[name]]
        return [(), (), ()]  # of what has no open dimension nobody knows what the real one says

    def create_runtime_config(self):
        return IRuntimeConfig()

    def create_execution_context(self, strategy=ExecutionContextAllocationStrategy.STATIC):
        told = getattr(strategy, "_told", {"strategy": strategy})
        return IExecutionContext(self, told)


class IRuntimeConfig:
    def __init__(self):
        self._told = {"strategy": ExecutionContextAllocationStrategy.STATIC, "kernels": "LAZY"}

    def set_execution_context_allocation_strategy(self, strategy):
        self._told["strategy"] = strategy

    @property
    def dynamic_shapes_kernel_specialization_strategy(self):
        return self._told["kernels"]

    @dynamic_shapes_kernel_specialization_strategy.setter
    def dynamic_shapes_kernel_specialization_strategy(self, when):
        self._told["kernels"] = when.name


class IExecutionContext:
    def __init__(self, engine, told):
        self._engine, self._told = engine, told
        self._needs_memory = told["strategy"] == ExecutionContextAllocationStrategy.USER_MANAGED
        self._shapes = {n: s for n, _, s in engine._header["inputs"] if -1 not in s}
        self._addresses, self._kept = {}, {}

    def _error(self, text):
        self._engine._logger.log(_Severity.ERROR, text)
        return False

    def set_device_memory(self, memory, size):
        self._needs_memory = not (memory and size >= self._engine.device_memory_size_v2)

    def set_optimization_profile_async(self, profile_index, stream_handle):
        return 0 <= profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name, shape):
        fixed = self._engine.get_tensor_shape(name)
        low, high = fixed, fixed
        if -1 in fixed:
            low, _, high = self._engine.get_tensor_profile_shape(name, 0)
        if len(shape) != len(low) or not all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True)):
            return self._error(f"set dimensions {tuple(shape)} of {name}: allowed {low} to {high}")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, memory):
        if name not in self._engine._io:
            return self._error(f"given invalid tensor name: {name}")
        self._addresses[name] = memory
        return True

    def get_tensor_shape(self, name):
        if name in self._shapes:
            return self._shapes[name]
        known = {}
        for tensor, _, declared in self._engine._header["inputs"]:
            for declared_size, value, actual in zip(
                declared, self._dimension_names(tensor), self._shapes.get(tensor, declared), strict=True
            ):
                if declared_size == -1:
                    known[value] = actual  # noqa: PERF403
        names = self._dimension_names(name)
        return tuple(known.get(n, -1) if d == -1 else d for d, n in zip(self._engine._io[name][2], names, strict=True))

    def _dimension_names(self, name):
        nodes = (*self._engine._session.get_inputs(), *self._engine._session.get_outputs())
        return next(node.shape for node in nodes if node.name == name)

    def execute_async_v3(self, stream_handle):
        if self._needs_memory:
            return self._error("no device memory was given")
        missing = [n for n in self._engine._io if not self._addresses.get(n)]
        if missing or len(self._shapes) < len(self._engine._header["inputs"]):
            return self._error(f"neither address nor shape of {missing}")
        key = (tuple(self._addresses.items()), tuple(self._shapes.items()))
        if key not in self._kept:
            self._kept[key] = self._host_function(dict(self._addresses), dict(self._shapes))
        function = ctypes.cast(self._kept[key], ctypes.c_void_p)
        return _cuda().cuLaunchHostFunc(stream_handle, function, None) == 0

    def _host_function(self, addresses, shapes):
        # Without `self`: the real one dies with its last reference, not at a collection.
        cuda, session, header = _cuda(), self._engine._session, self._engine._header
        outputs = [t[0] for t in header["outputs"]]

        def run(_):
            feed = {}
            for name, dtype, _dims in header["inputs"]:
                count = int(np.prod(shapes[name], dtype=np.int64))
                kind = np.dtype(_NUMPY[dtype])
                memory = (ctypes.c_char * (count * kind.itemsize)).from_address(
                    cuda.fake_cuda_host_address(addresses[name])
                )
                feed[name] = np.frombuffer(memory, kind).reshape(shapes[name])
            trouble = _trouble()
            if trouble[:1] == ["slow"]:
                time.sleep(float(trouble[1]))
            for name, value in zip(outputs, session.run(outputs, feed), strict=True):
                value = np.ascontiguousarray(np.full_like(value, np.nan) if trouble == ["nan"] else value)
                ctypes.memmove(cuda.fake_cuda_host_address(addresses[name]), value.ctypes.data, value.nbytes)

        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run)


def _trouble():
    try:
        return Path(os.environ["FAKE_TENSORRT_TROUBLE"]).read_text().split()
    except (KeyError, OSError):
        return []


def init_libnvinfer_plugins(logger, namespace):
    global _plugins
    _plugins = True
    return True


def _prune():
    """Takes away what this version does not have."""
    for name, standing_in in list(globals().items()):
        ours = isinstance(standing_in, type) and standing_in.__module__ == __name__
        if ours and not name.startswith("_") and name not in _NAMES:
            del globals()[name]  # what only another version has
            continue
        known = _NAMES.get(name, {"enum": ()}) if isinstance(standing_in, type) else {"enum": ()}
        if "enum" not in known:
            real = {*known["methods"], *known["properties"]}
            for attribute in [a for a in vars(standing_in) if not a.startswith("_") and a not in real]:
                delattr(standing_in, attribute)


_prune()
