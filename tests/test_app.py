"""The app: what its handlers stream, what it says to bad input, its API held still, and one visitor's beside another's.

`test_page.py` has what visitors meet: the page in a browser, and twenty of them at once.
"""

import json
import re
import runpy
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from arr_coc import ArrCocOutput, app
from arr_coc.answering import Refused, answers, open_image, prompt, variant
from arr_coc.space import panels, results, uploads
from benchmarks import schema

EXAMPLES = app.HERE / "examples"
PHOTO = EXAMPLES / "astronaut.jpg"  # 512 x 512 px: 256 tokens
SCENES = [row for row in json.loads((EXAMPLES / "examples.json").read_text()) if row["of"] == "scenes"]
SETTINGS = ("lod", "before", 6)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A results dataset of two rows."""
    data = tmp_path_factory.mktemp("dataset")
    key = {"run_id": "r", "model": "m", "task": "scenes", "split": "normal", "question_type": "*"}
    two = [
        key | {"method": name, "budget": 0.2, "n": 100, "accuracy": accuracy, "visual_tokens_mean": 51.0}
        for name, accuracy in (("arr_coc", 0.8), ("downscale", 0.6))
    ]
    schema.write("summary", two, data / "summary" / "part.parquet")
    return data


@pytest.fixture(scope="module")
def started(folder, rows):
    """The app's model and results, loaded."""
    app.start(str(folder), data=str(rows))
    yield app.MODEL
    app.MODEL.pop("results").close()
    app.MODEL.clear()


@pytest.fixture(scope="module")
def address(started):
    """The app, served."""
    demo = app.build()
    app.launch(demo, prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield demo.local_url
    demo.close()


@pytest.fixture(scope="module")
def client(address):
    return Client(address, verbose=False)


# -------------------------------------------------------------------------------------------------- answering


def test_both_answers_stream_and_ours_comes_first(started):
    states = list(answers(started["model"], started["processor"], open_image(PHOTO), "what?", 0.2, 5))
    assert states[0]["stock"] is None and not states[0]["arr_coc"]["done"]
    last = states[-1]
    assert last["arr_coc"]["done"] and last["stock"]["done"]
    assert last["stock"]["tokens"] == 256 and 49 <= last["arr_coc"]["tokens"] <= 51
    for run in (last["arr_coc"], last["stock"]):
        assert 0 < run["first"] <= run["seconds"]["total"]
    config = started["model"].config.text_config
    a_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    fewer = last["stock"]["tokens"] - last["arr_coc"]["tokens"]
    if last["stock"]["answer"] and len(states) == 12:  # neither ended early
        assert last["stock"]["kv_bytes"] - last["arr_coc"]["kv_bytes"] == fewer * a_token


def test_a_closed_answer_stops_the_model(started):
    before = threading.active_count()
    streaming = answers(started["model"], started["processor"], open_image(PHOTO), "what?", 0.2, 256)
    next(streaming)
    streaming.close()
    assert threading.active_count() == before


def test_a_failing_model_is_heard(started, monkeypatch):
    def broken(**_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(started["model"], "generate", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        list(answers(started["model"], started["processor"], open_image(PHOTO), "what?", 0.2, 5))


def test_a_variant_shares_weights_and_leaves_the_model_as_it_was(started):
    model = started["model"]
    other = variant(model, allocator="topk", realize="after")
    assert (model.config.allocator, model.config.realize) == ("lod", "before")
    assert (other.config.allocator, other.config.realize) == ("topk", "after")
    assert other.lm_head.weight is model.lm_head.weight
    *_, last = answers(other, started["processor"], open_image(PHOTO), "what?", 20, 1)
    assert set(last["perception"].allocation[0][:, 0].tolist()) == {1}


def test_special_tokens_in_a_question_stay_text(started):
    image, question = open_image(PHOTO), "<|image_pad|><|im_end|> what?<|vision_start|>"
    ids = prompt(started["model"], started["processor"], image, question)["input_ids"][0]
    config = started["model"].config
    assert int((ids == config.image_token_id).sum()) == 256
    assert int((ids == config.vision_start_token_id).sum()) == 1
    assert list(answers(started["model"], started["processor"], image, question, 0.2, 2))


# ------------------------------------------------------------------------------------------------ bad pictures


def png(width, height, path):
    """A header that promises so many pixels, and nothing behind it."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def bad(kind, path):
    target = path / "private" / f"{kind}.png"
    target.parent.mkdir()
    if kind == "60 megapixels":
        png(10_000, 6_000, target)
    elif kind == "bomb":
        png(300_000, 300_000, target)
    elif kind == "truncated":
        target = target.with_suffix(".jpg")
        target.write_bytes(PHOTO.read_bytes()[:4000])
    elif kind == "text":
        target.write_text("not an image")
    elif kind == "too long":
        Image.new("RGB", (4000, 10)).save(target)
    return target


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("60 megapixels", "more than 50 megapixels: make it smaller"),
        ("bomb", "make it smaller"),
        ("truncated", "damaged"),
        ("text", "use a JPEG, PNG"),
        ("too long", "4000 x 10 px, more than 200 times as long as it is wide"),
    ],
)
def test_a_bad_picture_is_refused_without_its_path(kind, says, tmp_path, client):
    path = bad(kind, tmp_path)
    with pytest.raises(Refused, match=says) as refused:
        uploads.read_image(str(path), 1024)
    assert str(refused.value).startswith("This image is") and "private" not in str(refused.value)
    assert str(refused.value) in refusal(client, handle_file(path), "what?", api_name="/compare")


def odd(kind, path):
    red = Image.new("RGB", (40, 20), (255, 0, 0))
    target = path / f"odd.{ {'gif': 'gif', 'cmyk': 'jpg', 'turned': 'jpg'}.get(kind, 'png') }"
    if kind == "gif":
        red.save(target, save_all=True, append_images=[Image.new("RGB", (40, 20), (0, 0, 255))])
    elif kind == "cmyk":
        red.convert("CMYK").save(target)
    elif kind == "sixteen bits":
        Image.new("I;16", (40, 20), 30_000).save(target)
    elif kind == "transparent":
        Image.new("RGBA", (40, 20), (0, 0, 0, 0)).save(target)
    elif kind == "palette":
        red.convert("P").save(target)
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        red.save(target, exif=exif)
    else:
        Image.new("L", (1, 1), 200).save(target)
    return target


@pytest.mark.parametrize(
    ("kind", "size", "colour"),
    [
        ("gif", (40, 20), (255, 0, 0)),
        ("cmyk", (40, 20), (254, 0, 0)),
        ("sixteen bits", (40, 20), (116, 116, 116)),
        ("transparent", (40, 20), (255, 255, 255)),
        ("palette", (40, 20), (255, 0, 0)),
        ("turned", (20, 40), (254, 0, 0)),
        ("one pixel", (1, 1), (200, 200, 200)),
    ],
)
def test_an_odd_picture_is_answered_about(kind, size, colour, tmp_path, started):
    image = uploads.read_image(str(odd(kind, tmp_path)), 1024)
    assert image.mode == "RGB" and image.size == size
    assert all(abs(a - b) <= 2 for a, b in zip(image.getpixel((0, 0)), colour, strict=True))
    *_, (_, state) = app.run(image, [("what?", 0.5)], {}, 1, True)
    assert state["stock"]["done"]
    assert panels.looked(image, state["perception"]).count("<img") == 6
    assert app.slider(image, state["perception"])[0].size == app.slider(image, state["perception"])[1].size


def test_a_large_picture_is_shrunk(tmp_path):
    Image.new("RGB", (4000, 3000)).save(tmp_path / "large.png")
    assert uploads.read_image(str(tmp_path / "large.png"), 1024).size == (1024, 768)


@pytest.mark.parametrize(
    ("read", "given", "says"),
    [
        (lambda x: uploads.read_image(x, 9), None, "no image yet"),
        (lambda x: uploads.read_image(x, 9), "https://example.com/cat.png", "links, paths"),
        (lambda x: uploads.read_image(x, 9), "data:image/png;base64,AAAA", "embedded data"),
        (uploads.read_question, " \n", "no question yet"),
        (uploads.read_question, "?" * 10_000, "10,000 characters, more than 500"),
        (uploads.read_budget, "150%", "The budget=1.5 is not a budget"),
        (uploads.read_budget, "lots", "is not a budget"),
        (uploads.read_length, 10**6, "1 to 256 tokens"),
        (uploads.read_length, "many", "1 to 256 tokens"),
        (lambda x: uploads.read_choices(x, "before"), "rm -rf", "not one of lod, topk"),
        (lambda x: uploads.read_several(x, uploads.read_question, "questions"), "a\n" * 9, "1 to 8 questions"),
        (lambda x: uploads.read_several(x, uploads.read_question, "questions"), None, "there are 0"),
        (lambda x: uploads.read_several(x, uploads.read_question, "questions"), {"a": 1}, "a list"),
    ],
)
def test_other_bad_input_is_named_with_the_mend(read, given, says):
    with pytest.raises(Refused, match=says):
        read(given)


# ---------------------------------------------------------------------------------------------------- the page


def test_the_page_streams_answers_then_pictures(started):
    steps = list(app.page_compare(str(PHOTO), "what?", "20%", "", *SETTINGS))
    assert "ARR-COC looks" in steps[0][0]
    assert any("Qwen3-VL reads the whole image" in step[0] for step in steps)
    status, race, *_ = steps[-1]
    assert "progress done" in status and re.search(r"5\.[0-2]×</b><span>fewer visual tokens", race)
    drawn = [step for step in steps if isinstance(step[2], tuple)]
    assert len(drawn) == 1, "pictures are drawn once, between the arms"
    assert "waits for its turn" in drawn[0][1] and drawn[0][3].count('role="img"') == 3


def test_an_exact_budget_goes_before_the_choice(started):
    *_, last = app.page_compare(str(PHOTO), "what?", "auto", "30", *SETTINGS)
    assert "<dd>30</dd>" in last[1] or "<dd>29</dd>" in last[1] or "<dd>28</dd>" in last[1]


def test_several_questions_and_budgets(started):
    *_, (status, grid) = app.page_questions(str(PHOTO), "one?\ntwo?\n\n", "10%", "", *SETTINGS)
    assert "Done" in status and grid.count("<li>") == 2 and "two?" in grid
    *_, (_, strip) = app.page_budgets(str(PHOTO), "one?", *SETTINGS)
    assert strip.count("<li>") == len(app.STRIP) and "256 tokens" in strip


def test_texture_is_computed_once_for_several_questions(started, monkeypatch):
    seen = []
    original = type(started["model"]).perceive
    monkeypatch.setattr(
        type(started["model"]), "perceive", lambda self, **k: seen.append(k["known"]) or original(self, **k)
    )
    list(app.page_questions(str(PHOTO), "one?\ntwo?", "10%", "", *SETTINGS))
    assert seen[0] is None and seen[1] is not None


def test_what_visitors_type_is_escaped(started):
    *_, (_, grid) = app.page_questions(str(PHOTO), "<script>alert(1)</script>", "10%", "", *SETTINGS)
    assert "<script>" not in grid and "&lt;script&gt;" in grid
    run = {"answer": "<b>x</b>", "tokens": 1, "first": 1.0, "seconds": {"total": 1.0}, "kv_bytes": 1, "done": True}
    assert "<b>x" not in panels.race({"arr_coc": run, "stock": run, "perception": ArrCocOutput(grid=[(1, 1)])})
    assert "<i>" not in panels.rows(["<i>"], [("<i>",)], "")


def test_examples_are_there_and_are_answered(started):
    rows = json.loads((EXAMPLES / "examples.json").read_text())
    assert {row["of"] for row in rows} == {"scenes", "photos"}
    for row in rows:
        open_image(EXAMPLES / row["file"])
        uploads.read_budget(row["budget"])
    app._FINISHED.clear()
    first = app.example(1, rows)
    assert app.example(1, rows) is first and first[1] == rows[1]["question"]


def test_an_example_is_picked_for_each_reason_or_marked_as_too_hard(monkeypatch, capsys):
    picking = runpy.run_path(str(EXAMPLES / "make_examples.py"))
    said = {"arr_coc": {"answer": "?"}, "stock": {"answer": "?"}}
    monkeypatch.setattr("arr_coc.answering.load", lambda _: (None, None))
    monkeypatch.setattr("arr_coc.answering.ask", lambda *_: said)
    too_hard = picking["pick"]("model", 128, 6)
    assert [row["why"] for row in too_hard] == list(picking["REASONS"]) and not any(row["right"] for row in too_hard)
    assert capsys.readouterr().out.count("answered by neither") == len(too_hard)
    assert app.called(too_hard[0]) == "Tiny text (too hard yet)" and app.called({"why": "Small print"}) == "Small print"
    picking["pick"].__globals__["is_correct"] = lambda answer, kind, *_: kind != "reading"
    rows = picking["pick"]("model", 128, 6)
    assert [row["right"] for row in rows] == [True] * 4 + [False] and rows[-1]["why"] == "Tiny text"


# --------------------------------------------------------------------------------------------------------- SQL


def test_a_select_answers(started):
    names, values, remark = results.select(started["results"], "SELECT method, accuracy FROM summary ORDER BY 2;")
    assert names == ["method", "accuracy"] and values == [("downscale", 0.6), ("arr_coc", 0.8)] and remark == "2 rows"
    assert len(results.select(started["results"], "SELECT * FROM range(10000000)")[1]) == results.ROWS


@pytest.mark.parametrize("name", results.queries())
def test_named_queries_run(name, started):
    assert results.select(started["results"], results.queries()[name])[0]


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("SELECT * FROM read_csv('/etc/passwd')", "no files"),
        ("SELECT * FROM read_text('/etc/passwd')", "no files"),
        ("SELECT * FROM glob('/*')", "no files"),
        ("SELECT * FROM '/etc/passwd'", "does not run"),
        ("COPY summary TO '/tmp/x.csv'", "Only one SELECT"),
        ("DROP TABLE summary", "Only one SELECT"),
        ("SELECT 1; DROP TABLE summary", "Only one SELECT"),
        ("SET threads=64", "Only one SELECT"),
        ("ATTACH '/tmp/x.db'", "Only one SELECT"),
        ("INSTALL httpfs", "Only one SELECT"),
        ("SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b", "longer than"),
        ("SELECT list(a) FROM range(10000000000) t(a)", "longer than|more memory"),
        ("SELEC 1", "does not run"),
        ("SELECT nothing FROM summary", "does not run"),
        ("", "no SQL yet"),
        ("SELECT 1 --" + "x" * 5000, "characters"),
    ],
)
def test_the_box_reads_rows_and_nothing_else(statement, says, started, monkeypatch):
    monkeypatch.setattr(results, "SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(Refused, match=says):
        results.select(started["results"], statement)
    assert time.monotonic() - start < 5
    assert results.select(started["results"], "SELECT count(*) FROM summary")[1] == [(2,)]


def test_without_results_the_tab_says_so(tmp_path):
    assert results.open_results(tmp_path) is None and "no benchmark results here yet" in results.measured(None)
    with pytest.raises(Refused, match="no benchmark results here yet"):
        results.select(None, "SELECT 1")


# ----------------------------------------------------------------------------------------------------- the API

API = {
    "/compare": (
        {"image": ..., "question": ..., "budget": "20%", "allocator": "lod", "realize": "before", "longest": 64},
        ["report", "seen", "relevance", "homunculus"],
    ),
    "/questions": ({"image": ..., "questions": ..., "budget": "20%"}, ["report"]),
    "/budgets": ({"image": ..., "question": ..., "budgets": ...}, ["report"]),
    "/sql": ({"query": ...}, ["report"]),
    "/about": ({}, ["report"]),
}


def test_the_api_stays_as_it_is(client):
    told = client.view_api(return_format="dict", print_info=False)
    assert not told["unnamed_endpoints"]
    found = {
        name: (
            {
                p["parameter_name"]: p["parameter_default"] if p["parameter_has_default"] else ...
                for p in e["parameters"]
            },
            [r["label"] for r in e["returns"]],
        )
        for name, e in told["named_endpoints"].items()
    }
    assert found == API
    assert all(endpoint["description"] for endpoint in told["named_endpoints"].values())


@pytest.mark.skipif(not app.has_mcp(), reason="needs gradio[mcp]")
def test_the_same_functions_are_tools_over_mcp(address):
    tools = json.load(urllib.request.urlopen(f"{address}gradio_api/mcp/schema"))
    found = {f"/{tool['name'][4:]}": list(tool["inputSchema"]["properties"]) for tool in tools}
    assert found == {name: list(arguments) for name, (arguments, _) in API.items()}
    assert all(tool["description"] for tool in tools)


def test_compare_gives_text_numbers_and_pictures(client):
    report, *pictures = client.predict(handle_file(PHOTO), "what?", "20%", longest=4, api_name="/compare")
    assert report.keys() == {
        "model", "revision", "stock", "arr_coc", "ratio", "grid", "budget", "allocation", "tensions",
    }  # fmt: skip
    assert report["ratio"]["tokens"] == pytest.approx(256 / len(report["allocation"]))
    assert [Image.open(path).size[0] > 500 for path in pictures] == [True] * 3


def test_questions_budgets_sql_about(client):
    asked = client.predict(handle_file(PHOTO), ["a?", "b?"], "10%", api_name="/questions")
    assert [row["question"] for row in asked] == ["a?", "b?"]
    asked = client.predict(handle_file(PHOTO), "a?", ["5%", "all"], api_name="/budgets")
    assert [row["tokens"] for row in asked][1] == 256
    assert client.predict("SELECT count(*) n FROM summary", api_name="/sql")["rows"] == [[2]]
    about = client.predict(api_name="/about")
    assert about["limits"]["question_characters"] == 500 and about["mcp"] == app.has_mcp()


def refusal(client, *args, **kwargs) -> str:
    with pytest.raises(AppError) as error:
        client.predict(*args, **kwargs)
    assert "Traceback" not in str(error.value) and "site-packages" not in str(error.value)
    return str(error.value)


FILE = {"_type": "gradio.FileData"}


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (None, "no image yet"),
        ("/etc/passwd", "Give an image file"),
        ("https://example.com/cat.png", "Give an image file"),
        ({"path": "http://127.0.0.1:1/cat.png", "meta": FILE}, "Give an image file"),
        ({"path": None, "url": "https://example.com/cat.png", "meta": FILE}, "Give an image file"),
        ({"path": None, "url": "data:image/png;base64,AAAA", "meta": FILE}, "Give an image file"),
    ],
)
def test_a_path_or_link_is_no_image(image, says, client):
    assert says in refusal(client, image, "what?", api_name="/compare")


def test_no_question_and_a_long_one_are_refused(client):
    for question, says in (("  ", "no question yet"), ("?" * 10_000, "10,000 characters, more than 500")):
        assert says in refusal(client, handle_file(PHOTO), question, api_name="/compare")


def test_the_page_tells_its_model_and_whether_it_has_mcp(address):
    assert "<code>ORG/vis</code> at <code>0123456</code>" in panels.header("ORG/vis", "0123456789" * 4, "photos")
    assert "MCP is off" in panels.api(False) and "/gradio_api/mcp/" in panels.api(True)
    served = urllib.request.urlopen(address).read().decode()
    assert app.MODEL["name"] in served and ("MCP is off" in served) != app.has_mcp()


def test_a_servers_own_file_is_out_of_reach(address):
    """Past the client, which would upload the file: the path goes to the server as it is."""
    for path in ("/etc/passwd", "../../../etc/passwd", str(app.HERE / "config.json")):
        said = call(address, "compare", [{"path": path, "meta": FILE}, "what?", "20%", "lod", "before", 4])
        assert "error" in said and "root:" not in said and "not uploaded by a user" in said


def call(address, name, data) -> str:
    request = urllib.request.Request(
        f"{address}gradio_api/call/{name}", json.dumps({"data": data}).encode(), {"Content-Type": "application/json"}
    )
    number = json.load(urllib.request.urlopen(request))["event_id"]
    return urllib.request.urlopen(f"{address}gradio_api/call/{name}/{number}").read().decode()


@pytest.mark.parametrize(
    "route",
    [
        "gradio_api/file=/etc/passwd", "gradio_api/file=../app.py", "gradio_api/file=..%2f..%2fetc%2fpasswd",
        "file=app.py", "gradio_api/file=config.json", "static/../../app.py", "assets/..%2f..%2f..%2fapp.py",
        "gradio_api/proxy=http://x/",
    ],
)  # fmt: skip
def test_no_route_serves_other_files(route, address):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(address + route)
    assert error.value.code in (400, 401, 403, 404)


def test_a_large_file_is_refused(address, tmp_path):
    (tmp_path / "large.png").write_bytes(b"\0" * 11_000_000)
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-F", f"files=@{tmp_path}/large.png"]
    assert subprocess.check_output([*command, f"{address}gradio_api/upload"], text=True) == "413"


def test_what_fails_here_is_said_without_a_trace(client, started, monkeypatch, capsys):
    monkeypatch.setattr(app, "run", lambda *_: 1 / 0)
    said = refusal(client, handle_file(PHOTO), "what?", api_name="/compare")
    assert "Something went wrong here" in said and "zero" not in said


def test_each_visitor_gets_their_own_answer(address, started):
    files = [PHOTO, EXAMPLES / SCENES[0]["file"]]
    jobs = [(path, question) for path in files for question in ("what?", "where is it?")]

    def visit(job):
        return Client(address, verbose=False).predict(
            handle_file(job[0]), job[1], "10%", longest=4, api_name="/compare"
        )[0]

    with ThreadPoolExecutor(len(jobs)) as pool:
        got = list(pool.map(visit, jobs))
    for (path, question), report in zip(jobs, got, strict=True):
        image = uploads.read_image(str(path), started["side"])
        *_, (_, alone) = app.run(image, [(question, 0.1)], {}, 4, True)
        assert report["allocation"] == alone["perception"].allocation[0].tolist()
        assert [report[arm]["answer"] for arm in ("arr_coc", "stock")] == [
            alone[arm]["answer"] for arm in ("arr_coc", "stock")
        ]


# ------------------------------------------------------------------------------------------------------ a Space


def test_the_card_names_model_and_results_once(tmp_path):
    card = app.HERE / "space" / "README.md"
    assert app.named_by_card(card) == {
        "model": "ORG/arr-coc-vis",
        "revision": "0" * 40,
        "data": ("ORG/arr-coc-results", "1" * 40),
    }
    assert app.named_by_card(app.HERE / "README.md") == {}
    assert app.named_by_card(tmp_path / "none.md") == {}


def test_the_spaces_requirements_leave_out_what_comes_with_it():
    pinned = (app.HERE / "space" / "requirements.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in pinned if line and not line.startswith("#")}
    assert not names & {"gradio", "spaces", "huggingface_hub"}
    assert all("==" in line for line in pinned if line and not line.startswith("#"))


def test_a_request_may_take_longer_the_more_it_asks():
    image = Image.new("RGB", (512, 512))
    one = app._duration(image, [("q", 0.1)], {}, 32, False)
    assert one < app._duration(image, [("q", 0.1)], {}, 32, True) < app._duration(image, [("q", 0.1)] * 6, {}, 64, True)
    assert app._duration(image, [("q", 0.1)] * 8, {}, 256, True) <= 120


def test_a_model_that_cannot_be_loaded_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        app.main(["--model", str(tmp_path)])
    assert "cannot be loaded" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- slow: the queue


@pytest.mark.slow
def test_who_comes_when_all_places_are_taken_is_told(client, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(app, "run", lambda *_: gate.wait(60) and 1 / 0)
    jobs = [client.submit(handle_file(PHOTO), "what?", api_name="/compare") for _ in range(24)]
    end = time.monotonic() + 30
    while not any(job.done() for job in jobs) and time.monotonic() < end:
        time.sleep(0.2)
    turned_away = [str(job.exception()) for job in jobs if job.done()]
    gate.set()
    assert turned_away and all("Queue is full" in said for said in turned_away)
