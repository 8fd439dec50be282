"""The runner: no row lost and none twice, whatever stops it; and what the rows add up to."""

import json
import os
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
from benching import sample, small_model, tiny_processor
from safetensors.torch import save_file

from arr_coc.checkpoints.make_tiny import TINY
from benchmarks import runner, schema, tasks, whole
from benchmarks.__main__ import main
from benchmarks.methods import METHODS, named
from benchmarks.tasks import Task

SAID = {"code": "c0de", "weights": "123456789", "dtype": "float32", "model": "small", "git": "g", "device": "cpu"}
SAID |= {"machine": "m", "versions": "{}", "date": "2026-01-01"}
TASK = Task("toy", "test", lambda n: (sample(i) for i in range(n)), tasks.exact, "here")


class Counted:
    """In the place of `runner.answer`: rows without a model, and a count of how often each was asked for."""

    def __init__(self, die_at: int = -1):
        self.calls, self.asked, self.die_at = 0, [], die_at

    def __call__(self, model, processor, method, share, task, samples, batch=None):
        self.calls += 1
        if self.calls == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        right = [method.name == "oracle" or int(s["id"][1:]) % 2 == 0 for s in samples]
        self.asked += [(method.name, share, s["id"]) for s in samples]
        base = {"task": task.name, "split": task.split, "method": method.name, "budget": share, "native_tokens": 48}
        base |= {"visual_tokens": 10, "seconds": 0.5, "evidence_boxes": 1, "evidence_recall": 0.5, "box_mass": None}
        base |= {"iou": None, "pointing_hit": 1.0, "reliability": [[2, 1.0, 1], [2, 1.8, 1]]}
        return [
            base
            | {
                "sample_id": s["id"],
                "question_type": s["type"],
                "stratum": s["stratum"],
                "score": float(r),
                "correct": r,
            }
            for s, r in zip(samples, right, strict=True)
        ]


@pytest.fixture
def counted(monkeypatch):
    stub = Counted()
    monkeypatch.setattr(runner, "answer", stub)
    monkeypatch.setattr(runner, "prepare", lambda *_: None)
    return stub


class NoModel:
    device = "cpu"


def go(out, n=7, methods="stock,downscale,oracle", **more):
    return runner.run(NoModel(), None, [TASK], named(methods), [0.1, 0.2], n, out, SAID, batch_size=3, **more)


def keys(out):
    return [runner.key(row) for row in runner.rows_of(out)]


class TestResuming:
    def test_every_pair_is_answered_once_and_stock_at_one_budget(self, counted, tmp_path):
        go(tmp_path)
        assert len(keys(tmp_path)) == len(set(keys(tmp_path))) == 7 * (1 + 2 + 2)
        assert {b for _, m, b, _ in keys(tmp_path) if m == "stock"} == {1.0}

    def test_a_finished_run_repeats_nothing_and_a_larger_one_adds_what_is_missing(self, counted, tmp_path):
        go(tmp_path, n=4)
        before = len(counted.asked)
        go(tmp_path, n=4)
        assert len(counted.asked) == before
        go(tmp_path, n=7, methods="stock,downscale,oracle,random")
        assert len(keys(tmp_path)) == len(set(keys(tmp_path))) == 7 * (1 + 2 * 3) == len(counted.asked)

    @pytest.mark.parametrize("call", [1, 4, 8])
    def test_a_kill_loses_at_most_one_batch(self, monkeypatch, tmp_path, call):
        monkeypatch.setattr(runner, "prepare", lambda *_: None)
        pid = os.fork()
        if pid == 0:
            runner.answer = Counted(die_at=call)
            go(tmp_path)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        rows = keys(tmp_path)
        assert len(rows) == sum(min(3, 7 - (c // 5) * 3) for c in range(call - 1))
        rest = Counted()
        monkeypatch.setattr(runner, "answer", rest)
        go(tmp_path)
        assert len(keys(tmp_path)) == len(set(keys(tmp_path))) == 35 and len(rest.asked) == 35 - len(rows)

    def test_a_torn_line_is_cut_off_and_answered_again(self, counted, tmp_path):
        go(tmp_path)
        path = tmp_path / "rows-0.jsonl"
        path.write_bytes(path.read_bytes()[:-40])
        go(tmp_path)
        assert len(keys(tmp_path)) == len(set(keys(tmp_path))) == 35 and len(counted.asked) == 36

    def test_a_damaged_line_is_named(self, counted, tmp_path):
        go(tmp_path)
        path = tmp_path / "rows-0.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], lines[1][:50], *lines[2:]]) + "\n")
        with pytest.raises(runner.Refused, match="rows-0.jsonl, line 2 is damaged"):
            runner.rows_of(tmp_path)

    def test_processes_share_the_batches_and_a_different_number_may_go_on(self, counted, tmp_path):
        for process in range(2):
            go(tmp_path, process=process, processes=2)
        assert len(keys(tmp_path)) == len(set(keys(tmp_path))) == 35
        assert len(list(tmp_path.glob("rows-*.jsonl"))) == 2
        go(tmp_path)
        assert len(counted.asked) == 35

    @pytest.mark.slow
    def test_two_launched_processes_find_each_other(self, tmp_path):
        """Without being told that there is no accelerator; else each would answer all questions."""
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        asked = "-m benchmarks run --tasks scenes_valid_256 --methods stock --n 4 --batch 2".split()
        command = [*launch, *asked, "--model", str(TINY), "--out", str(tmp_path)]
        subprocess.run(command, check=True, cwd=TINY.parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert len(keys(tmp_path)) == len(set(keys(tmp_path))) == 4
        assert len(list(tmp_path.glob("rows-*.jsonl"))) == 2

    @pytest.mark.parametrize("name", ["code", "weights", "dtype"])
    def test_rows_that_do_not_compare_are_never_mixed(self, counted, tmp_path, name):
        go(tmp_path)
        with pytest.raises(runner.Refused, match=f"holds rows of {name} .* another --out"):
            runner.open_run(tmp_path, SAID | {name: "other"})
        assert runner.open_run(tmp_path, SAID | {"git": "other", "date": "later"})["git"] == "g"


class TestParquet:
    def test_files_have_the_schemas_columns_and_types(self, counted, tmp_path):
        go(tmp_path)
        paths = runner.finish(tmp_path)
        for config, path in paths.items():
            table = pq.read_table(path)
            assert table.column_names == list(schema.SCHEMAS[config])
            assert table.schema.equals(schema.SCHEMAS[config].arrow_schema, check_metadata=False)
        assert pq.read_metadata(paths["samples"]).num_rows == 35
        assert schema.files(tmp_path)["samples"] == [paths["samples"]]

    def test_the_summary_by_hand(self, counted, tmp_path):
        go(tmp_path)
        rows = pq.read_table(runner.finish(tmp_path)["summary"]).to_pylist()
        at = {(r["method"], r["budget"], r["question_type"]): r for r in rows}
        whole = at["downscale", 0.1, "*"]
        assert whole["n"] == 7 and whole["accuracy"] == pytest.approx(4 / 7)
        assert whole["accuracy_low"] < 4 / 7 < whole["accuracy_high"] and whole["visual_tokens_p95"] == 10
        assert whole["evidence_recall"] == 0.5 and whole["iou"] is None
        assert at["downscale", 0.1, "stratum:calm"]["accuracy"] == 1
        assert at["downscale", 0.1, "attribute"]["n"] == 3
        assert set(whole) == set(schema.SCHEMAS["summary"])

    def test_runs_hold_paired_tests_and_what_downscaling_gets_wrong(self, counted, tmp_path):
        go(tmp_path)
        rows = pq.read_table(runner.finish(tmp_path)["runs"]).to_pylist()
        oracle = next(r for r in rows if r["method"] == "oracle" and r["budget"] == 0.1)
        assert oracle["n_downscale_wrong"] == 3 and oracle["accuracy_downscale_wrong"] == 1
        assert oracle["p_against_downscale"] == pytest.approx(2 / 2**3)  # three to none
        assert oracle["p_against_stock"] == pytest.approx(0.25)
        assert oracle["calibration_error"] == pytest.approx((0 * 2 + 0.4 * 2) / 4)
        assert oracle["distinctiveness"] is None
        assert oracle["code"] == "c0de" and oracle["drops"] == METHODS["oracle"].drops
        downscale = next(r for r in rows if r["method"] == "downscale")
        assert downscale["p_against_downscale"] is None and downscale["accuracy_downscale_wrong"] == 0

    def test_nothing_answered_is_said(self, tmp_path):
        runner.open_run(tmp_path, SAID)
        with pytest.raises(runner.Refused, match="holds no rows"):
            runner.finish(tmp_path)


class TestRows:
    @pytest.fixture(scope="class")
    def rows(self):
        model, processor = small_model(), tiny_processor()
        pairs = [("stock", 1.0), ("arr_coc", 0.25), ("fastv", 0.25), ("downscale", 0.25)]
        samples = [sample(0), sample(1)]
        return {name: runner.answer(model, processor, METHODS[name], b, TASK, samples) for name, b in pairs}

    def test_a_row_has_all_that_the_schema_asks(self, rows):
        wanted = set(schema.SCHEMAS["samples"]) - {"run_id", "model"}
        for name, (row, _) in rows.items():
            assert wanted <= set(row) and row["visual_tokens"] == {"stock": 48}.get(name, 12)
            assert (
                row["seconds"] == pytest.approx(sum(row[f"seconds_{s}"] for s in schema.STAGES)) and row["seconds"] > 0
            )
            json.dumps(row)

    def test_measures_by_hand(self, rows):
        stock = rows["stock"][0]
        assert stock["evidence_cells"] == 6 and stock["evidence_recall"] == 1  # rows 1 to 3 (4 of 32 px), columns 1, 2
        assert stock["box_mass"] == pytest.approx(stock["evidence_cells"] / 48)

    def test_the_cache_is_smaller_where_fewer_tokens_enter_it(self, rows):
        size = {name: row[0]["kv_bytes"] for name, row in rows.items()}
        assert size["arr_coc"] == size["downscale"] < size["fastv"] < size["stock"]
        text = size["stock"] / (2 * 4 * 2 * 32 * 4) - 48
        assert text == int(text) and 10 < text < 40

    def test_the_heat_map_is_scored_where_there_is_one(self, rows):
        assert sum(line[0] for line in rows["arr_coc"][0]["reliability"]) == 48
        assert "reliability" not in rows["stock"][0]


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--tasks", "nonsense"], "unknown task nonsense: there are scenes_valid"),
            (["--methods", "nonsense"], "unknown method nonsense: there are stock"),
            (["--model", "nowhere/at-all"], "--model nowhere/at-all cannot be loaded"),
        ],
    )
    def test_what_cannot_be_run_is_said(self, capsys, tmp_path, arguments, says):
        assert main(["run", "--device", "cpu", "--out", str(tmp_path), *arguments]) == 2
        assert says in capsys.readouterr().err

    def test_budgets_are_shares(self, capsys):
        with pytest.raises(SystemExit):
            main(["run", "--out", "x", "--budgets", "0.1,20"])
        assert "shares of an image's tokens" in capsys.readouterr().err

    def test_the_list_names_everything(self, capsys):
        assert main(["list"]) == 0
        said = capsys.readouterr().out
        assert all(f" {name} " in said for name in (*METHODS, *tasks.TASKS))


def test_a_cpu_is_named_by_family_and_model(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n" * 2)
    assert runner.cpu_name(info) == "AMD EPYC 25/17"
    assert runner.cpu_name(tmp_path / "none")


class TestWhole:
    def test_a_stopped_write_leaves_the_old_file_alone(self, tmp_path):
        path = tmp_path / "new" / "rows.json"
        whole.write_text(path, "old")

        def half(part):
            part.write_text("half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            whole.write(path, half)
        assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]

    def test_what_safetensors_wrote_is_for_all_to_read(self, tmp_path):
        path = tmp_path / "model.safetensors"
        whole.write(path, lambda part: save_file({"x": torch.ones(1)}, part))
        assert path.stat().st_mode & 0o777 == 0o644


def test_the_probe_counts_how_far_questions_stand_apart(tmp_path, counted):
    from benchmarks.probe import probe

    said = probe(small_model(), tiny_processor(), "normal", 3, 0.2)
    assert said["images"] == 3 and 0 <= said["distance"] <= 1
    go(tmp_path)
    rows = runner.describe(runner.rows_of(tmp_path), SAID, [said | {"split": "test", "budget": 0.1}])
    assert all(r["distinctiveness"] is None for r in rows)  # none of them is ours, on scenes
    ours = [r | {"method": "arr_coc", "task": "scenes_x"} for r in runner.rows_of(tmp_path) if r["budget"] == 0.1]
    assert (
        runner.describe(ours, SAID, [said | {"split": "test", "budget": 0.1}])[0]["distinctiveness"] == said["distance"]
    )


def test_the_probe_makes_the_runs_folder(tmp_path, monkeypatch, capsys):
    from benchmarks import probe

    monkeypatch.setattr(probe, "load", lambda *_: (small_model(), tiny_processor()))
    out = tmp_path / "new" / "run"
    assert main(["probe", "--splits", "normal", "--images", "2", "--budgets", "0.2", "--out", str(out)]) == 0
    (said,) = json.loads((out / "probe.json").read_text())
    assert said["images"] == 2 and f"{said['distance']:.3f}" in capsys.readouterr().out
