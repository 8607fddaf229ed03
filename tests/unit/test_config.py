"""The configuration: what is accepted, and that every refusal names file, line, key, found, allowed and what to do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from taktd.daemon.config.configuration import ConfigError, Configuration, ConfigurationRefused, load, settings
from taktd.daemon.config.yamltree import FILE_BYTES_MAX

GOOD = """\
node: {name: cell-07}
devices:
  cpu0: {driver: cpu, cores: [1], priority: 80}
models:
  go1: {path: models/go1.onnx}                # relative to this file
loops:
  go1_walk: {model: go1, device: cpu0, period: 20ms, deadline: 5ms, criticality: hard,
             allow: {users: [robot], groups: [taktd]}}
"""
BASE = "devices: {cpu0: {driver: cpu}}\nmodels: {m: {path: m.onnx}}\n"


def parse(tmp_path: Path, text: str | bytes) -> Configuration:
    file = tmp_path / "taktd.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(file)


def errors(tmp_path: Path, text: str | bytes) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigurationRefused) as refused:
        parse(tmp_path, text)
    for error in refused.value.errors:
        assert error.file.endswith(".yaml")
        assert error.what
        assert error.found or error.allowed or error.hint
    return refused.value.errors


def error(tmp_path: Path, text: str | bytes, key: str) -> ConfigError:
    found = [e for e in errors(tmp_path, text) if e.key == key]
    assert len(found) == 1, [str(e) for e in errors(tmp_path, text)]
    return found[0]


# ---- accepted ----


def test_the_example_is_accepted(tmp_path: Path) -> None:
    c = parse(tmp_path, GOOD)
    loop = c.loops["go1_walk"]
    assert (loop.name, loop.model, loop.device) == ("go1_walk", "go1", "cpu0")
    assert (loop.period_ns, loop.deadline_ns, loop.jitter_ns) == (20_000_000, 5_000_000, 0)
    assert (loop.criticality, loop.on_late, loop.budget_ns) == ("hard", "skip", None)
    assert loop.allow.users == ("robot",)
    assert c.devices["cpu0"].cores == (1,)
    assert c.node.name == "cell-07"
    assert c.models["go1"].path == str(tmp_path / "models/go1.onnx")


def test_defaults(tmp_path: Path) -> None:
    c = parse(tmp_path, BASE + "loops: {l: {model: m, period: 1ms}}\n")
    loop = c.loops["l"]
    assert loop.deadline_ns == loop.period_ns == 1_000_000
    assert (loop.criticality, loop.device) == ("firm", "cpu0")
    assert loop.allow.groups == ("taktd",)
    assert c.models["m"].device == "cpu0"
    assert c.admission.margin_ppm == 1_300_000
    assert c.admission.on_refusal is None
    assert c.node.name


@pytest.mark.parametrize("off", ["off", "false", "no", '"off"'])
def test_best_effort_off_and_false_are_the_same(tmp_path: Path, off: str) -> None:
    c = parse(tmp_path, f"devices: {{cpu0: {{driver: cpu, best_effort: {off}}}}}\n")
    assert c.devices["cpu0"].best_effort.mode == "off"


def test_best_effort_with_bounds_is_exact(tmp_path: Path) -> None:
    c = parse(tmp_path, "devices: {cpu0: {driver: cpu, best_effort: {max_dispatch: 2ms, share: 0.0}}}\n")
    rule = c.devices["cpu0"].best_effort
    assert (rule.mode, rule.max_dispatch_ns, rule.share_ppm) == ("limits", 2_000_000, 0)


def test_loops_keep_the_order_of_the_file(tmp_path: Path) -> None:
    names = [f"l{n}" for n in random.Random(1).sample(range(100), 30)]
    text = BASE + "loops:\n" + "".join(f"  {n}: {{model: m, period: 1ms}}\n" for n in names)
    assert list(parse(tmp_path, text).loops) == names


def test_conf_d_adds_sections_and_names(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/10-more.yaml").write_text("models: {n: {path: n.onnx}}\nloops: {k: {model: n, period: 2ms}}\n")
    (tmp_path / "conf.d/20-empty.yaml").write_text("# nothing yet\n")
    (tmp_path / "conf.d/notes.txt").write_text("not: [read")
    c = parse(tmp_path, BASE + "loops: {l: {model: m, period: 1ms}}\n")
    assert list(c.loops) == ["l", "k"]
    assert c.models["n"].path == str(tmp_path / "conf.d/n.onnx")


def test_the_result_is_frozen_and_comparable(tmp_path: Path) -> None:
    c = parse(tmp_path, GOOD)
    assert c == parse(tmp_path, GOOD)
    with pytest.raises(ValueError, match="frozen"):
        c.loops["go1_walk"].period_ns = 1  # type: ignore[misc]


def test_every_setting_has_a_description() -> None:
    keys = [setting.key for setting in settings()]
    assert len(keys) == len(set(keys))
    assert "loops.NAME.deadline" in keys
    assert all(setting.description for setting in settings())


# ---- one by one: what is refused, and how ----

LOOP = BASE + "loops:\n  l: {model: m, period: 10ms, EXTRA}\n"


@pytest.mark.parametrize(
    ("extra", "key", "what", "found", "allowed"),
    [
        ("deadline: 30ms", "loops.l.deadline", "longer than the period", "30ms", "10ms"),
        ("deadline: 0ms", "loops.l.deadline", "too small", "0ms", "more than zero"),
        ("deadline: -5ms", "loops.l.deadline", "negative", "-5ms", "unit"),
        ("deadline: 5", "loops.l.deadline", "not a duration", "5", "unit"),
        ("deadline: [5ms]", "loops.l.deadline", "not a duration", "list", "unit"),
        ("deadline: {a: 1}", "loops.l.deadline", "not a duration", "mapping", "unit"),
        ("deadline: ", "loops.l.deadline", "not a duration", "nothing", "unit"),
        ("deadline: 100000h", "loops.l.deadline", "too large", "100000h", "24h"),
        ("jitter: 10ms", "loops.l.jitter", "leaves no time", "10ms", "less than the deadline"),
        ("budget: .nan", "loops.l.budget", "not a plain number", ".nan", "decimal number"),
        ("budget: .inf", "loops.l.budget", "not a plain number", ".inf", "decimal number"),
        ("criticality: hrad", "loops.l.criticality", "choices", "hrad", "hard, firm, soft"),
        ("criticality: 1", "loops.l.criticality", "choices", "1", "hard, firm, soft"),
        ("mk: [3, 2]", "loops.l.mk", "no promise", "[3, 2]", "1 ≤ m ≤ k"),
        ("mk: [1]", "loops.l.mk", "number of entries", "list of 1", "at least 2"),
        ("mk: 5", "loops.l.mk", "not a list", "5", "list"),
        ("slots: 2", "loops.l.slots", "not allowed", "2", "3"),
        ("slots: 3.5", "loops.l.slots", "not a whole number", "3.5", "whole"),
        ("slots: yes", "loops.l.slots", "not a whole number", "true", "whole"),
        ("slots: 017", "loops.l.slots", "not a plain number", "017", "decimal"),
        ("phase: 1ms", "loops.l.phase", "no meaning", "", "trigger: clock"),
        ("trigger: clock, phase: 10ms", "loops.l.phase", "within a period", "10ms", "less than 10ms"),
        ("deadlin: 5ms", "loops.l.deadlin", "known key", "deadlin", "deadline"),
        ("name: x", "loops.l.name", "known key", "name", "model"),
        ("allow: {users: [a, a]}", "loops.l.allow.users", "twice", "list", "once"),
        ("allow: {users: [7]}", "loops.l.allow.users[0]", "not text", "7", "text"),
        ("allow: all", "loops.l.allow", "not a mapping", "all", "mapping"),
        ("model: {x: 1}, device: cpu0", "loops.l.model", "set twice", "second", "once"),
    ],
)
def test_a_wrong_value_in_a_loop(tmp_path: Path, extra: str, key: str, what: str, found: str, allowed: str) -> None:
    e = error(tmp_path, LOOP.replace("EXTRA", extra), key)
    assert e.line == 4
    assert what in e.what
    assert found in e.found
    assert allowed in e.allowed


@pytest.mark.parametrize(
    ("text", "key", "what", "hint"),
    [
        (BASE + "loops: {l: {model: n, period: 1ms}}", "loops.l.model", "does not exist", ""),
        (BASE + "loops: {l: {model: m, device: cpu1, period: 1ms}}", "loops.l.device", "not exist", "mean cpu0"),
        (BASE + "loops: {l: {model: m}}", "loops.l.period", "missing", ""),
        (BASE + "loops: {l: {model: m, period: 5us}}", "loops.l.period", "too small", ""),
        (BASE + "loops: {'a b': {model: m, period: 1ms}}", "loops.a b", "usable name", ""),
        (BASE + f"loops: {{{'x' * 64}: {{model: m, period: 1ms}}}}", f"loops.{'x' * 64}", "usable name", ""),
        (BASE + "loops: [1]", "loops", "not a mapping", ""),
        (BASE + "loop: {}", "loop", "known key", "mean loops"),
        ("devices: {}\n", "devices", "number of entries", ""),
        ("models: {}\n", "devices", "missing", ""),
        ("devices: {c: {driver: gpu}}\n", "devices.c.driver", "choices", ""),
        ("devices: {c: {driver: cpu, cores: [1, 1]}}\n", "devices.c.cores", "twice", ""),
        ("devices: {c: {driver: cpu, cores: [-1]}}\n", "devices.c.cores[0]", "not allowed", ""),
        ("devices: {c: {driver: cpu, priority: 99}}\n", "devices.c.priority", "not allowed", ""),
        ("devices: {c: {driver: cpu, spin: -1us}}\n", "devices.c.spin", "negative", ""),
        ("devices: {c: {driver: cpu, best_effort: 5ms}}\n", "devices.c.best_effort", "not understood", ""),
        ("devices: {c: {driver: cpu, best_effort: {share: 1.5}}}\n", "devices.c.best_effort.share", "too large", ""),
        ("devices: {c: {driver: cpu, best_effort: {share: 0.1}}}\n",
         "devices.c.best_effort.max_dispatch", "missing", ""),
        ("devices: {c: {driver: cpu, best_effort: {share: 1.0e-7, max_dispatch: 1ms}}}\n",
         "devices.c.best_effort.share", "not exact", ""),
        (BASE + "admission: {margin: 0.9}\n", "admission.margin", "too small", ""),
        (BASE + "admission: {margin: \"1,3\"}\n", "admission.margin", "not a number", ""),
        (BASE + "admission: {on_refusal: crash}\n", "admission.on_refusal", "choices", ""),
        (BASE + "limits: {lanes: 0}\n", "limits.lanes", "not allowed", ""),
        (BASE + "limits: {lane_memory: 5}\n", "limits.lane_memory", "not a size", "unit"),
        ("models: {m: {path: m, batching: {max_batch: 4, preferred: [8]}}}\ndevices: {c: {driver: cpu}}\n",
         "models.m.batching.preferred", "above max_batch", ""),
        ("models: {m: {path: m, shapes: {x: [0]}}}\ndevices: {c: {driver: cpu}}\n",
         "models.m.shapes.x[0]", "allowed", ""),
        (BASE + "a: !!python/object/apply:os.system [id]\n", "a", "has a tag", ""),
        (BASE + "<<: {loops: {}}\n", "<<", "known key", ""),
        (BASE + "? [a, b]\n: 1\n", "", "no plain text", ""),
        (BASE + '"a\\0b": 1\n', "", "no plain text", ""),
        ("- a\n- b\n", "", "not a mapping", ""),
        ("", "", "empty", ""),
        ("# only a comment\n", "", "empty", ""),
        ("just text\n", "", "not a mapping", ""),
    ],
)  # fmt: skip
def test_a_wrong_file(tmp_path: Path, text: str, key: str, what: str, hint: str) -> None:
    e = error(tmp_path, text, key)
    assert what in e.what
    assert hint in e.hint


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('devices: {sim0: {driver: sim, outputs: {"\\0kind": onnx}}}\n', "devices.sim0.outputs"),
        ('devices: {sim0: {driver: sim, outputs: {"\\0kind": 5, constant: 1}}}\n', "devices.sim0.outputs"),
        (BASE + 'loops: {l: {model: m, period: 9ms, fallback: [{"\\0kind": hold}]}}\n', "loops.l.fallback[0]"),
    ],
)
def test_names_that_no_file_can_have_are_refused_in_one(tmp_path: Path, text: str, key: str) -> None:
    """Sections whose form tells what they are keep that under a key that begins with a NUL."""
    e = error(tmp_path, text, key)
    assert (e.what, e.found, e.allowed) == ("has a key that is no plain text", '"\\x00kind"', "a name as key")


def test_what_was_found_is_shown_without_control_characters(tmp_path: Path) -> None:
    refused = error(tmp_path, BASE + 'loops: {l: {model: m, period: "\\e[2Jü\\0"}}\n', "loops.l.period")
    assert refused.found == '"\\x1b[2Jü\\x00"'


def test_all_errors_are_collected_with_their_lines(tmp_path: Path) -> None:
    text = (
        BASE
        + "loops:\n  a: {model: x, period: 1ms}\n  b: {model: m, period: 0ms}\n  c: {model: m, perod: 1ms}\nnod: 1\n"
    )
    assert {(e.line, e.key) for e in errors(tmp_path, text)} == {
        (4, "loops.a.model"), (5, "loops.b.period"), (6, "loops.c.period"), (6, "loops.c.perod"), (7, "nod"),
    }  # fmt: skip


def test_with_several_devices_a_loop_says_which(tmp_path: Path) -> None:
    text = (
        "devices: {a: {driver: cpu}, b: {driver: sim}}\nmodels: {m: {path: m}}\nloops: {l: {model: m, period: 1ms}}\n"
    )
    assert "a, b" in error(tmp_path, text, "loops.l.device").allowed


def test_too_many_loops_on_one_device(tmp_path: Path) -> None:
    text = BASE + "loops:\n" + "".join(f"  l{n}: {{model: m, period: 1ms}}\n" for n in range(65))
    assert "64" in error(tmp_path, text, "loops.l64").allowed


def test_the_same_key_in_two_files_names_both(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d/a.yaml").write_text("\nnode: {name: other}\nloops: {go1_walk: {model: go1, period: 1ms}}\n")
    found = errors(tmp_path, GOOD)
    assert {e.key for e in found} == {"node.name", "loops.go1_walk"}
    for e in found:
        assert e.file.endswith("conf.d/a.yaml")
        assert f"{tmp_path / 'taktd.yaml'}:" in e.found


# ---- files that are no configuration (FAULTS row 7) ----


@pytest.mark.parametrize("share", range(1, 20))
def test_truncated_anywhere_it_is_refused_or_a_whole_prefix(tmp_path: Path, share: int) -> None:
    """Cut inside the last loop there is no smaller valid configuration left that means something else."""
    cut = GOOD.index("loops:") + 7 + (len(GOOD) - GOOD.index("loops:") - 7) * share // 20
    found = errors(tmp_path, GOOD[:cut])
    assert found[0].line > 0


def test_twice_its_size_every_key_is_there_twice(tmp_path: Path) -> None:
    found = errors(tmp_path, GOOD + GOOD)
    assert {e.key for e in found} == {"node", "devices", "models", "loops"}
    assert [e.line for e in found] == [9, 10, 12, 14]


def test_ten_megabytes_are_refused_unread(tmp_path: Path) -> None:
    e = error(tmp_path, b"#" * 10_000_000, "")
    assert "too large" in e.what
    assert "10000000 bytes" in e.found
    assert str(FILE_BYTES_MAX) in e.allowed


@pytest.mark.parametrize("seed", range(5))
def test_binary(tmp_path: Path, seed: int) -> None:
    e = errors(tmp_path, b"devices:\n" + random.Random(seed).randbytes(4096))[0]
    assert e.line >= 1
    assert "is this the right file?" in e.hint or "YAML" in e.allowed


def test_an_elf_file(tmp_path: Path) -> None:
    assert "not text" in errors(tmp_path, Path(sys.executable).resolve().read_bytes()[:4096])[0].what


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 5_000, "- " * 5_000 + "x", "a: &a [*a]\n"])
def test_endless_nesting(tmp_path: Path, text: str) -> None:
    assert errors(tmp_path, text)


def test_aliases_that_unfold_without_end(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert any("too large a tree" in e.what for e in errors(tmp_path, "\n".join(lines)))


def test_missing_folder_and_pipe(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigurationRefused) as refused:
            load(path)
        assert refused.value.errors[0].file == str(path)
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationRefused, match="not a regular file"):
        load(pipe)


@pytest.mark.parametrize(
    "text",
    [GOOD[:-40].encode(), (GOOD + GOOD).encode(), b"#" * 10_000_000, b"\0\1\2\3", b"devices: {c: {driver: .nan}}\n",
     GOOD.replace("period", "perod").encode(), GOOD.replace("20ms", "[1]").encode()],
    ids=["truncated", "twice", "10MB", "binary", "nan", "unknown key", "wrong type"],
)  # fmt: skip
def test_at_start_it_is_exit_code_78_and_the_same_message(tmp_path: Path, text: bytes) -> None:
    expected = errors(tmp_path, text)
    run = subprocess.run(
        [sys.executable, "-m", "taktd.daemon", "--config", str(tmp_path / "taktd.yaml")],
        capture_output=True, text=True, timeout=30, env=os.environ | {"TAKTD_RUNTIME_DIR": str(tmp_path / "run")},
    )  # fmt: skip
    assert run.returncode == 78
    for e in expected:
        for line in str(e).splitlines():
            assert line.strip() in run.stderr
    assert not (tmp_path / "run").exists()


def test_without_a_configuration_it_says_how_to_get_one() -> None:
    run = subprocess.run([sys.executable, "-m", "taktd.daemon"], capture_output=True, text=True, timeout=30)
    assert run.returncode == 78
    assert "taktd --config" in run.stderr
    assert "taktctl demo" in run.stderr
