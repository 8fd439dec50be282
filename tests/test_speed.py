"""Speed: what is measured, how it is counted, and that a stopped run goes on."""

import json

import pytest
import torch
from benching import small_model

from benchmarks import runner, schema, speed
from benchmarks.__main__ import main
from benchmarks.methods import METHODS, prepare
from benchmarks.methods.interface import Clock


@pytest.fixture(scope="module")
def small():
    return small_model()


@pytest.fixture(scope="module")
def batch(small):
    image = speed.textured_image(192)
    samples = [{"id": str(i), "image": image, "question": ""} for i in range(2)]
    return prepare(speed.RandomProcessor(small.config), samples)


def test_energy_is_all_cpu_packages_own_count(tmp_path):
    assert speed.energy_meter("cpu", tmp_path) is None
    for zone, used in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 2_000_000), ("intel-rapl:0:0", 9_000_000)):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "energy_uj").write_text(f"{used}\n")
    meter = speed.energy_meter("cpu", tmp_path)  # cores (0:0) are in their package already
    assert meter() == 7.0
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("3500000\n")
    assert meter() == 8.5


def test_joules_are_said_where_the_device_tells(small, batch):
    ticks = iter([10.0, 12.5, 7.0, 7.0, 9.0, 3.0])
    said = [
        speed.once(small, speed.RandomProcessor(small.config), batch, "floor", 9, lambda: next(ticks)) for _ in "abc"
    ]
    assert [s["joules"] for s in said] == [2.5, None, None]  # it stood still, or wrapped around
    rows = [dict(s, size=192, batch=2, budget=9, method="stock", round=i, text=24) for i, s in enumerate(said, 1)]
    table = speed.medians(rows, small.config, "small", "cpu", torch.float32, "r")
    assert {r["joules_median"] for r in table} == {2.5} and {r["rounds"] for r in table} == {3}


@pytest.mark.parametrize("name", speed.DEFAULT.split(","))
def test_every_method_is_timed_stage_by_stage(small, batch, name):
    said = speed.once(small, speed.RandomProcessor(small.config), batch, name, 9)
    stages = said["stages"]
    assert said["tokens"] == (36 if name == "stock" else 9)
    assert {"preprocess", "decode", "*"} <= stages.keys() and all(v >= 0 for v in stages.values())
    assert sum(stages.get(k, 0) for k in ("choose", "tower", "prefill")) <= stages["*"] + 1e-6
    if name == "arr_coc":
        assert {"texture", "glance", "knowing", "balancing", "attending"} <= stages.keys()


def test_the_cache_is_counted_as_it_is(small, batch):
    sizes = []

    class Watch(speed.Prefill):
        def generate(self, model, inputs, **how):
            cache = model(**inputs, **how, use_cache=True).past_key_values
            sizes.append(sum(x.numel() * x.element_size() for y in cache.layers for x in (y.keys, y.values)))
            return [""] * len(inputs["input_ids"])

    text = batch.inputs["input_ids"].shape[1] - 36
    with torch.no_grad(), Clock(small) as clock:
        for name, kept in (("stock", 36), ("floor", 9), ("arr_coc", 9)):
            method = speed.method_of(name)
            method.answer(small, batch, [9, 9], Watch(None, clock, 1))
            assert sizes[-1] == 2 * runner.kv_bytes(small.config, method.drops, 36, kept, text, 4)


def test_medians_by_hand(small):
    rows = [
        {
            "size": 192,
            "batch": 1,
            "budget": 9,
            "method": method,
            "round": turn,
            "peak_bytes": None if turn else {"stock": 5, "floor": 3}[method],
            "tokens": n,
            "text": 20,
        }
        | {"stages": {"*": seconds, "tower": 0.1}}
        for method, n, times in (("stock", 36, (99.0, 1.0, 3.0, 2.0)), ("floor", 9, (99.0, 0.5, 0.2, 9.0)))
        for turn, seconds in enumerate(times)  # the first warms up: its memory counts, its time does not
    ]
    table = speed.medians(rows, small.config, "small", "cpu", torch.float32, "r")
    at = {(r["method"], r["stage"]): r for r in table}
    assert at["stock", "*"]["seconds_median"] == 2 and at["floor", "*"]["ratio_to_stock"] == 0.25
    assert at["floor", "*"]["peak_bytes"] == 3 and at["floor", "tower"]["ratio_to_stock"] == 0.05
    assert at["stock", "model"]["ratio_to_stock"] == 1 and 0 < at["floor", "model"]["ratio_to_stock"] < 1
    assert all(set(r) == set(schema.SCHEMAS["speed"]) for r in table)


def test_a_stopped_run_goes_on(small, tmp_path, monkeypatch):
    args = speed.parser().parse_args(["--size", "192", "--budgets", "0.25", "--rounds", "2"])
    calls = []
    real = speed.once
    monkeypatch.setattr(speed, "once", lambda *a: calls.append(a[3]) or real(*a))
    processor, log = speed.RandomProcessor(small.config), tmp_path / "measured.jsonl"
    rows = speed.measure_all(small, processor, args, ["stock", "floor"], log)
    assert len(rows) == 6 and calls == ["stock", "floor"] * 3
    assert [r["peak_bytes"] is not None for r in rows] == [True] * 2 + [False] * 4
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:4]) + '\n{"size": 19')
    assert len(speed.measure_all(small, processor, args, ["stock", "floor"], log)) == 6
    assert calls == ["stock", "floor"] * 4 and len([json.loads(line) for line in log.read_text().splitlines()]) == 6


def test_times_of_two_machines_are_never_mixed(small, tmp_path, monkeypatch, capsys):
    """A run's folder refuses the second, and a file's name says the machine and the day."""
    monkeypatch.setattr(speed, "random_model", lambda *_: small)
    asked = ["speed", "--size", "192", "--budgets", "9", "--rounds", "1", "--methods", "floor", "--out", str(tmp_path)]
    chip = "AMD EPYC 25/17"
    monkeypatch.setattr(runner, "cpu_name", lambda: chip)
    assert main(asked) == 0
    said = json.loads((tmp_path / "run.json").read_text())
    (path,) = schema.files(tmp_path)["speed"]
    assert path.stem.startswith("speed-Qwen3-VL-2B-AMD-EPYC-25-17-") and path.stem.endswith(
        f"threads-bfloat16-{said['date']}-{said['code'][:8]}"
    )
    chip = "another"
    assert main(asked) == 2
    assert f"holds rows of chip {said['chip']}, this is another" in capsys.readouterr().err


def test_an_unknown_method_lists_what_exists(capsys):
    assert main(["speed", "--methods", "nonsense"]) == 2
    assert f"unknown method nonsense: there are floor, {next(iter(METHODS))}" in capsys.readouterr().err
