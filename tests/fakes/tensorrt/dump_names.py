"""Writes `names/VERSION.json`: what the real TensorRT bindings of a version have, by name (1.7: TensorRT-RTX).

    python tests/fakes/tensorrt/dump_names.py [11.4.0.106 10.16.1.11 10.3.0 1.7.1.116]

The bindings are wheels on the package index; they import without TensorRT once three stub libraries export the nine
symbols that they link against. Nothing of TensorRT runs. Needs pip, a C compiler and x86-64.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRATCH = HERE.parents[2] / "build" / "tensorrt-names"
WHEELS = {
    "11.4.0.106": "tensorrt-cu13-bindings",
    "10.16.1.11": "tensorrt-cu13-bindings",
    "10.3.0": "tensorrt-cu12-bindings",
    "1.7.1.116": "tensorrt-rtx-cu13-bindings",
}
SYMBOLS = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getBuilderPluginRegistry"),
    *("getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins"),
)
# Not ours to imitate: what every pybind11 object has.
SKIPPED = re.compile(r"__(?!init__|call__|getitem__|len__)|_pybind11|^name$|^value$")
SIGNATURE = re.compile(r"^(?:\d+\. )?(\w+)\((.*?)\) -> ", re.MULTILINE)


def arguments(doc: str | None) -> list[list[str]]:
    """The argument names of each overload, as pybind11 wrote them into the docstring."""
    found = []
    for _, inside in SIGNATURE.findall(doc or ""):
        names = re.findall(r"(?:^|, )(\*{0,2}\w+)(?=:| =|,|$)", re.sub(r"\[[^\[\]]*\]", "", inside))
        if names not in found:
            found.append(names)
    return found


def describe(kind: type) -> dict[str, object]:
    members = getattr(kind, "__members__", None)
    if members:
        return {"enum": sorted(members)}
    methods, properties = {}, []
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            if SKIPPED.match(name) or base is object:
                continue
            if isinstance(value, property):
                properties.append(name)
            elif callable(value) or isinstance(value, staticmethod):
                methods[name] = arguments(getattr(getattr(value, "__func__", value), "__doc__", None))
    return {"methods": dict(sorted(methods.items())), "properties": sorted(set(properties))}


def dump() -> dict[str, object]:
    """Runs where the bindings can be imported."""
    try:
        import tensorrt_bindings as trt
    except ModuleNotFoundError:
        import tensorrt_rtx_bindings as trt

    classes: dict[str, object] = {}
    functions: dict[str, object] = {}
    for name in sorted(vars(trt)):
        value = getattr(trt, name)
        if name.startswith("_") or getattr(value, "__module__", "").split(".")[0] != trt.__name__:
            continue
        if isinstance(value, type):
            classes[name] = describe(value)
            for inner, nested in vars(value).items():
                if isinstance(nested, type) and not inner.startswith("_"):
                    classes[f"{name}.{inner}"] = describe(nested)
        elif callable(value):
            functions[name] = arguments(value.__doc__)
    return {"version": trt.__version__, "classes": classes, "functions": functions}


def run(*command: str, **environment: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment or None).stdout


def regenerate(version: str) -> None:
    folder = SCRATCH / version
    folder.mkdir(parents=True, exist_ok=True)
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(folder),
        f"{WHEELS[version]}=={version}",
    )
    stub = folder / "stub.c"
    stub.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in SYMBOLS))
    major = version.split(".")[0]
    rtx = ("libtensorrt_rtx", "libtensorrt_onnxparser_rtx")
    for library in rtx if "rtx" in WHEELS[version] else ("libnvinfer", "libnvonnxparser", "libnvinfer_plugin"):
        name = f"{library}.so.{major}"
        run("cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(stub))
    text = run(
        *(sys.executable, str(Path(__file__)), "--here"),
        PYTHONPATH=str(folder),
        LD_LIBRARY_PATH=str(folder),
        PATH="/usr/bin:/bin",
    )
    target = HERE / "names" / f"{version}.json"
    target.write_text(json.dumps(json.loads(text), indent=None, separators=(",", ":"), sort_keys=True) + "\n")
    print(target)


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        print(json.dumps(dump()))
    else:
        for wanted in sys.argv[1:] or WHEELS:
            regenerate(wanted)
