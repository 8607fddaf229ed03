"""`taktctl selftest`: whole on the simulated GPU, honest everywhere else. What it measures there means nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from taktd.daemon.selftest import examination
from taktd.daemon.selftest.report import Step
from taktd.drivers.cuda import CudaDevice
from taktd.engines.tensorrt import TensorRtEngine
from taktd.engines.tensorrt_library import Library
from tests import models
from tests.conformance.test_engines import spec_of
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated
from tests.fakes.tensorrt import stand_in
from tests.fakes.tensorrt.stand_in import built


def selftest(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "taktd.daemon.cli", "selftest", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def gpu(tmp_path: Path) -> dict[str, str]:
    return {**simulated.environment(tmp_path, lazy_queries=0), "PYTHONPATH": str(stand_in.SITE)}


def steps(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    return {step["name"]: step for step in json.loads(done.stdout)["steps"]}


def test_without_a_device_it_is_skipped_with_exit_3(tmp_path: Path) -> None:
    nowhere = {"LD_LIBRARY_PATH": str(tmp_path)}
    if "libcuda.so.1" in subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("this machine has a CUDA driver")
    done = selftest(nowhere, "--device", "gpu0")
    assert done.returncode == 3
    assert done.stdout.startswith("skipped: no CUDA device")
    told = json.loads(selftest(nowhere, "--json").stdout)
    assert told["skipped"] is True
    assert told["passed"] is False


def test_on_the_simulated_gpu_every_step_passes_and_it_says_simulated(gpu: dict[str, str]) -> None:
    done = selftest(gpu, "--device", "gpu0", "--json", "--runs", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["simulated"] is True
    assert [s["outcome"] for s in report["steps"]] == ["passed"] * 9
    found = steps(done)
    assert found["a broken context in a process of its own"]["figures"]["trap"]["code"] == 719  # type: ignore[index]
    assert set(found["completion by flag against event"]["figures"]) == {"flag", "event"}  # type: ignore[arg-type]
    assert found["jitter over 200 runs"]["figures"]["runs"] == 200  # type: ignore[index]
    launch = found["launch overhead"]["figures"]
    assert set(launch) == {"completion", "launch to end", "the call alone", "on the device"}  # type: ignore[call-overload]
    copies = found["copies"]["figures"]
    assert len([name for name in copies if name.endswith("registered")]) == 3  # type: ignore[attr-defined]
    assert set(found["graph against plain enqueue"]["figures"]) == {"graph", "enqueue"}  # type: ignore[call-overload]
    broken = found["a broken context in a process of its own"]["figures"]
    assert {"trap", "beside it, after trap", "serve", "beside it, after serve"} == set(broken)  # type: ignore[call-overload]
    text = selftest(gpu, "--runs", "10").stdout
    assert text.startswith("A simulated driver: no figure here is a GPU's.")


def test_the_report_says_on_what_it_was_measured(gpu: dict[str, str], tmp_path: Path) -> None:
    told = tmp_path / "nvml.json"
    told.write_text(json.dumps({"throttle_reasons": 0x40}))
    site = Path(__file__).parents[1] / "fakes" / "nvml_site"
    more = {"PYTHONPATH": f"{gpu['PYTHONPATH']}:{site}", "FAKE_NVML": str(told)}
    report = json.loads(selftest({**gpu, **more}, "--json", "--runs", "10").stdout)
    assert report["card"]["after"]["throttled_by"] == ["hardware thermal slowdown"]
    assert report["card"]["before"]["clock_mhz"] == 1560
    assert report["device"]["stream_priorities"] == [0, -5]
    assert (report["device"]["ecc"], report["device"]["integrated"]) == (True, False)
    assert report["machine"]["scheduling"] in ("other", "fifo", "rr")
    assert report["taktd"]


def test_cards_that_were_not_asked_for_are_left_alone(gpu: dict[str, str], tmp_path: Path) -> None:
    """Loops may be served there."""
    done = selftest({**gpu, "FAKE_CUDA_DEVICES": "2"}, "--device", "1", "--json", "--runs", "10")
    assert json.loads(done.stdout)["device"]["pci"] == "0000:02:00.0"
    for page in tmp_path.glob("observed.*"):
        seen = Simulated(tmp_path).observed(int(page.suffix[1:]))
        assert seen.first_device_used == 0, "a context was made on the first card"


def test_a_check_that_a_device_does_not_pass_is_named_and_the_others_go_on(gpu: dict[str, str], tmp_path: Path) -> None:
    selftest(gpu, "--json", "--runs", "10")  # makes the control page
    Simulated(tmp_path).inject("cuMemHostRegister", 801)
    done = selftest(gpu, "--json", "--runs", "10")
    step = steps(done)["driver conformance"]
    assert step["outcome"] == "failed"
    assert step["figures"]["broken"] == 3  # type: ignore[index]
    assert "shared_file_memory_can_be_registered: cuMemHostRegister" in str(step["text"])
    assert done.returncode == 1


def test_without_tensorrt_the_engine_steps_are_skipped_with_the_reason(gpu: dict[str, str]) -> None:
    done = selftest({**gpu, "PYTHONPATH": ""}, "--json", "--runs", "10")
    assert done.returncode == 0, done.stderr
    step = steps(done)["build and load the bundled model"]
    assert step["outcome"] == "skipped"
    assert "apt install python3-libnvinfer" in str(step["text"])
    outcomes = [s["outcome"] for s in json.loads(done.stdout)["steps"]]
    assert outcomes == ["passed"] * 3 + ["skipped"] * 5 + ["passed"], "what was not tried is there, and says so"


def test_a_device_without_flags_says_so(gpu: dict[str, str]) -> None:
    found = steps(selftest({**gpu, "FAKE_CUDA_MEM_OPS": "0"}, "--json", "--runs", "10"))
    assert "completion is by event" in str(found["completion by flag against event"]["text"])


def test_where_nothing_can_be_captured_no_figure_is_called_a_graphs(gpu: dict[str, str]) -> None:
    found = steps(selftest({**gpu, "FAKE_CUDA_CAPTURE": "0"}, "--json", "--runs", "10"))
    step = found["graph against plain enqueue"]
    assert set(step["figures"]) == {"enqueue"}  # type: ignore[call-overload]
    assert "not captured" in str(step["text"])
    step = found["completion by flag against event"]
    assert step["figures"] == {}
    assert "not captured" in str(step["text"])


def test_a_note_about_something_else_takes_no_figure_away(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    engine.note("the plan was built on another day")
    step = Step("graph against plain enqueue")
    examination._plain(step, engine, 3)
    assert set(step.figures) == {"graph", "enqueue"}
    assert "another day" in step.text
    engine.close()


def test_a_device_that_fails_its_probe_fails_the_test(gpu: dict[str, str], tmp_path: Path) -> None:
    selftest(gpu, "--json", "--runs", "10")  # makes the control page
    Simulated(tmp_path).inject("execute", simulated.ECC)
    done = selftest(gpu, "--json")
    assert done.returncode == 1
    assert "ECC" in json.loads(done.stdout)["text"]


def test_an_unknown_device_is_answered_with_those_that_are_there(gpu: dict[str, str]) -> None:
    done = selftest(gpu, "--device", "GPU-12345678")
    assert done.returncode == 3
    assert "GPU-f0f1f2f3" in done.stdout
