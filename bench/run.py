"""`make bench`: how much a lane adds to ONNX Runtime on this machine, with everything interleaved in one run.

Writes bench/results.json and the table in docs/performance.md. Each case is measured in short blocks, round after
round; a figure is the median over the rounds, a maximum the largest of all. As root the executor has core 1 and the
client core 0, both SCHED_FIFO; otherwise it says so. The policy is Go1's, from $TAKTD_ROBOTS or ../shared/robots, else
a network of the same sizes that is made here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnx
import onnxruntime
import psutil
from onnx import TensorProto, helper, numpy_helper

from taktd.daemon.benchmark import (
    Load,
    Pace,
    bench_lane,
    quantiles,
    read_rights,
    take_core_and_priority,
    time_direct,
    without_gc,
)
from taktd.daemon.direct import fill_with_noise, open_direct
from taktd.daemon.foreground import Foreground
from taktd.ipc import connect

ROOT: Final = Path(__file__).resolve().parent.parent
BUILD: Final = ROOT / "build" / "bench"
RESULTS: Final = ROOT / "bench" / "results.json"
PAGE: Final = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"
ROBOTS: Final = Path(os.environ.get("TAKTD_ROBOTS") or ROOT.parent / "shared" / "robots")

CLIENT_PRIORITY: Final = 70
PERIOD_NS: Final = 1_000_000
WAITS: Final = ("spin", "block", "hybrid")
PAUSE_S: Final = 0.1
"""Between blocks: spinning without a break would meet the kernel's real-time throttle."""
STARTS: Final = 3
FIGURES: Final = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")

Figures = dict[str, float | None]
Case = Callable[[float], Figures]
"""Measures one block of so many seconds."""


# Models ------------------------------------------------------------------------------------------------------------


def save_identity(path: Path, shape: list[int]) -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("in", "out")]
    graph = helper.make_graph([helper.make_node("Identity", ["in"], ["out"])], "identity", info[:1], info[1:])
    save(graph, path)


def save_policy(path: Path) -> None:
    """Go1's sizes with random weights: 48 → 512 → 256 → 128 → 12."""
    rng, nodes, constants, value = np.random.default_rng(0), [], [], "obs"
    sizes = (48, 512, 256, 128, 12)
    for i, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        weight = (rng.normal(size=(inner, outer)) / np.sqrt(inner)).astype(np.float32)
        constants += [numpy_helper.from_array(weight, f"w{i}")]
        constants += [numpy_helper.from_array(np.zeros(outer, np.float32), f"b{i}")]
        last = i == len(sizes) - 2
        nodes.append(helper.make_node("Gemm", [value, f"w{i}", f"b{i}"], ["actions" if last else f"sum{i}"]))
        if not last:
            nodes.append(helper.make_node("Elu", [f"sum{i}"], [f"layer{i}"]))
        value = f"layer{i}"
    inputs = [helper.make_tensor_value_info("obs", TensorProto.FLOAT, [1, 48])]
    outputs = [helper.make_tensor_value_info("actions", TensorProto.FLOAT, [1, 12])]
    save(helper.make_graph(nodes, "policy", inputs, outputs, constants), path)


def save(graph: onnx.GraphProto, path: Path) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def make_models(folder: Path) -> tuple[dict[str, Path], str]:
    """Paths by name, and a sentence about the policy."""
    models = {"policy": ROBOTS / "go1" / "policy.onnx"}
    models |= {name: folder / f"{name}.onnx" for name in ("identity_602kb", "identity_4b")}
    save_identity(models["identity_602kb"], [1, 3, 224, 224])
    save_identity(models["identity_4b"], [1])
    if models["policy"].is_file():
        return models, "policy: Unitree Go1, velocity tracking"
    models["policy"] = folder / "a.onnx"
    save_policy(models["policy"])
    return models, f"policy: random weights in Go1's sizes ({ROBOTS} is not there)"


# Cases -------------------------------------------------------------------------------------------------------------


def build_c() -> None:
    """bench/pingpong.c and bench/client.c, the latter with the static libtakt."""
    BUILD.mkdir(parents=True, exist_ok=True)
    core = ROOT / "ipc" / "core"
    subprocess.run(["make", "-s", "-C", str(core)], check=True)
    cc = [os.environ.get("CC", "cc"), "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*cc, "-o", BUILD / "pingpong", ROOT / "bench/pingpong.c"], check=True)
    library = core / "build" / "libtakt.a"
    subprocess.run([*cc, f"-I{core}", "-o", BUILD / "client", ROOT / "bench/client.c", library, "-pthread"], check=True)


def run_c(program: str, words: list[str], environment: dict[str, str]) -> Figures:
    """One block of a C program that prints: count p50 p90 p99 p99.9 max (ns)."""
    command = [str(BUILD / program), *words]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60)
    nanoseconds = [int(word) for word in done.stdout.split()[1:6]]
    return dict(zip(FIGURES, (n / 1000 for n in nanoseconds), strict=True))


def direct_case(path: Path, period_ns: int = 0) -> Case:
    direct = open_direct(str(path))
    for value in direct.inputs.values():
        fill_with_noise(value, np.random.default_rng(0))

    def block(seconds: float) -> Figures:
        taken, pace = array("q"), Pace(period_ns)
        time_direct(direct, pace, pace.now() + int(seconds * 1e9), taken)
        return quantiles(taken)

    return block


def lane_case(socket: str, loop: str, wait: str, period_ns: int) -> Case:
    """Attaches for each block, so that one loop can have several kinds of client in turn."""

    def block(seconds: float) -> Figures:
        with connect(socket) as node, node.attach(loop, wait=wait) as lane:
            outcome = bench_lane(lane, Load(seconds, period_ns))
        if not outcome.lane_ns:
            raise SystemExit(f"no job of {loop} was answered: {outcome.as_json()}")
        return quantiles(outcome.lane_ns)

    return block


def all_cases(
    daemon: Foreground, models: dict[str, Path], client_core: int, server_core: int, fifo: int
) -> dict[str, Case]:
    """In the order of the table. `fifo` is the C programs' priority; this process has its own already."""

    def c_case(program: str, *words: str) -> Case:
        cores = [str(client_core)] if program == "client" else [str(client_core), str(server_core)]
        environment = dict(daemon.environment)
        return lambda seconds: run_c(program, [*words, str(seconds), *cores, str(fifo)], environment)

    cases: dict[str, Case] = {"bare futex ping-pong, C": c_case("pingpong", "futex")}
    if client_core != server_core:
        cases["bare spin ping-pong, C"] = c_case("pingpong", "spin")
    for model, path in models.items():
        cases[f"{model}: ONNX Runtime direct"] = direct_case(path)
        for wait in WAITS:
            cases[f"{model}: lane, {wait}, Python"] = lane_case(daemon.lanes_socket, model, wait, 0)
            cases[f"{model}: lane, {wait}, C"] = c_case("client", model, wait)
    cases["policy: ONNX Runtime direct, paced 1 kHz"] = direct_case(models["policy"], PERIOD_NS)
    for wait in WAITS:
        cases[f"policy: lane, {wait}, Python, paced 1 kHz"] = lane_case(daemon.lanes_socket, "policy", wait, PERIOD_NS)
    return cases


def measure(cases: dict[str, Case], rounds: int, seconds: float) -> dict[str, Figures]:
    found: dict[str, list[Figures]] = {name: [] for name in cases}
    for turn in range(rounds):
        for number, (name, case) in enumerate(cases.items(), 1):
            say(f"round {turn + 1}/{rounds}, {number}/{len(cases)}: {name}")
            found[name].append(case(seconds))
            time.sleep(PAUSE_S)
    return {name: summarise(blocks) for name, blocks in found.items()}


def summarise(blocks: list[Figures]) -> Figures:
    """Median over the rounds; of the maxima the largest."""
    values = {figure: [v for block in blocks if (v := block[figure]) is not None] for figure in FIGURES}
    return {
        figure: round(max(found) if figure == "max_us" else statistics.median(found), 2) if found else None
        for figure, found in values.items()
    }


def say(text: str) -> None:
    """Progress: one line that is overwritten on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


# Costs -------------------------------------------------------------------------------------------------------------


def cpu_share(process: psutil.Process, busy: Callable[[], object]) -> float:
    """CPU of a process while `busy` runs, as a share of one core."""
    before, begun = sum(process.cpu_times()[:2]), time.monotonic()
    busy()
    return float(sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)


def costs(daemon: Foreground, seconds: float) -> dict[str, float]:
    """Idle and busy CPU of the executor, resident memory of supervisor and executor."""
    executor = psutil.Process(daemon.executor_pids()[0])
    supervisor = psutil.Process(daemon.pid)
    paced = lane_case(daemon.lanes_socket, "policy", "hybrid", PERIOD_NS)
    time.sleep(1.0)
    idle = cpu_share(executor, lambda: time.sleep(seconds))
    busy = cpu_share(executor, lambda: paced(seconds))
    return {
        "executor_cpu_idle": round(idle, 4),
        "executor_cpu_1khz_hybrid": round(busy, 4),
        "rss_supervisor_mb": round(supervisor.memory_info().rss / 1e6, 1),
        "rss_executor_mb": round(executor.memory_info().rss / 1e6, 1),
    }


# Report ------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return {
        "cpu": name or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    }


def table(results: dict[str, Any]) -> str:
    """The Markdown between the markers in docs/performance.md."""
    where = results["machine"]
    client = results["client_rt"]
    rights = f"client {client['policy']} on core {client['affinity']}, executor "
    rights += f"{results['executor_rt']['policy']} on core {results['executor_rt']['affinity']}"
    lines = [
        f"Measured {results['date']} with `{results['command']}` on {where['cpu']}, {where['cores']} cores, "
        f"Linux {where['kernel']}, Python {where['python']}, ONNX Runtime {where['onnxruntime']}; {rights}; "
        f"{results['policy']}. {results['rounds']} rounds of {results['block_s']:g} s per line; load average "
        f"{results['load_average']:g} (1 or 2 on a machine that does nothing else).",
        "",
        "| case | p50 µs | p99 µs | p99.9 µs | max µs |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, figures in results["cases"].items():
        shown = (figures[key] for key in ("p50_us", "p99_us", "p999_us", "max_us"))
        lines.append(f"| {name} | " + " | ".join("" if v is None else f"{v:.1f}" for v in shown) + " |")
    spent = results["costs"]
    lines += [
        "",
        "| cost | value |",
        "| --- | ---: |",
        f"| executor's CPU, idle | {spent['executor_cpu_idle']:.1%} of a core |",
        f"| executor's CPU at 1 kHz, hybrid, inference included | {spent['executor_cpu_1khz_hybrid']:.1%} of a core |",
        f"| resident memory, supervisor | {spent['rss_supervisor_mb']:.0f} MB |",
        f"| resident memory, executor | {spent['rss_executor_mb']:.0f} MB |",
        f"| start to ready | {spent['start_to_ready_s']:.2f} s |",
        "",
    ]
    return "\n".join(lines)


def write_page(text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(head + BEGIN + text + END + tail, encoding="utf-8")


def configuration(models: dict[str, Path], core: int) -> str:
    lines = ["node: {name: bench}", f"devices: {{cpu0: {{driver: cpu, cores: [{core}], priority: 80}}}}", "models:"]
    lines += [f"  {name}: {{path: {json.dumps(str(path))}}}" for name, path in models.items()]
    lines += ["loops:"]
    lines += [f"  {name}: {{model: {name}, device: cpu0, period: 1ms, jitter: 200us}}" for name in models]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each block")
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md as it is")
    arguments = parser.parse_args()
    usable = sorted(os.sched_getaffinity(0))
    client_core, server_core = usable[0], usable[1 % len(usable)]
    build_c()
    with tempfile.TemporaryDirectory() as folder:
        models, policy = make_models(Path(folder))
        text = configuration(models, server_core)
        starts = []
        for _ in range(STARTS - 1):
            with Foreground(text) as daemon:
                starts.append(daemon.ready_s)
        with Foreground(text) as daemon:
            starts.append(daemon.ready_s)
            refused = take_core_and_priority(client_core, CLIENT_PRIORITY)
            for sentence in refused:
                print(f"refused: {sentence}", file=sys.stderr)
            fifo = 0 if refused else CLIENT_PRIORITY
            with without_gc():
                found = measure(
                    all_cases(daemon, models, client_core, server_core, fifo), arguments.rounds, arguments.seconds
                )
                spent = costs(daemon, 5.0)
            executor_rt = read_rights(daemon.executor_pids()[0])
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["make bench", *([f"ARGS='{' '.join(sys.argv[1:])}'"] if sys.argv[1:] else [])]),
        "machine": machine(),
        "policy": policy,
        "rounds": arguments.rounds,
        "block_s": arguments.seconds,
        "load_average": round(os.getloadavg()[0], 1),
        "client_rt": read_rights(),
        "executor_rt": executor_rt,
        "cases": found,
        "costs": spent | {"start_to_ready_s": round(statistics.median(starts), 2)},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    say("")
    print(table(results))
    if not arguments.no_page:
        write_page(table(results))


if __name__ == "__main__":
    main()
