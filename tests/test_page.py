"""The app as visitors meet it, with the model and the rows that `make demo` shows. All of it is slow.

The page in headless Chromium at three widths in both modes; twenty visitors for two minutes; a fresh clone, from `make
demo` to the first answer. Screenshots are kept in `out/app`: look at them.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
from gradio_client import Client, handle_file

from arr_coc import app
from arr_coc.space import uploads

pytestmark = pytest.mark.slow
ROOT = app.HERE
OUT = ROOT / "out" / "app"
PHOTO = ROOT / "examples" / "astronaut.jpg"
SCENES = [row for row in json.loads((ROOT / "examples" / "examples.json").read_text()) if row["of"] == "scenes"]
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
DONE = ".progress.done:has-text('for both')"
AXE = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
everywhere = pytest.mark.parametrize(("width", "mode"), list(itertools.product((390, 820, 1440), ("light", "dark"))))


@pytest.fixture(scope="module")
def address():
    """The app as `make demo` starts it, in this process."""
    app.start()
    demo = app.build()
    app.launch(demo, prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield demo.local_url
    demo.close()
    app.MODEL.clear()


@pytest.fixture(scope="module")
def chromium():
    sync = pytest.importorskip("playwright.sync_api")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("there is no /usr/bin/chromium: install Debian's package chromium")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe():
    """axe-core's script, from npm."""
    script = OUT.parent / "axe" / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        script.parents[2].mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", script.parents[2], "axe-core@4.11.0"], check=True)
    return script.read_text()


@pytest.fixture
def visit(chromium, address):
    """Opens the page: `visit(width, mode)` -> the page and what its console complained of."""
    contexts = []

    def open_page(width=1280, mode="light"):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=mode)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page, complaints = context.new_page(), []
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda r: None if "ABORTED" in r.failure else complaints.append(r.url))
        page.goto(address)
        page.wait_for_selector("#go")
        page.wait_for_selector("#slide img", state="attached")
        return page, complaints

    yield open_page
    for context in contexts:
        context.close()


def check(page, complaints, width, axe, name):
    """A screenshot; no complaint, nothing wider than the screen, nothing that axe finds."""
    OUT.mkdir(parents=True, exist_ok=True)
    page.mouse.wheel(0, 20_000)  # pictures are loaded when they come near
    page.wait_for_timeout(600)
    page.mouse.wheel(0, -20_000)
    page.wait_for_timeout(600)
    page.screenshot(path=OUT / f"{name}.png", full_page=True)
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate(axe)
    page_but = "{include: [['html']], exclude: [['.toast-header']]}"  # Gradio's toasts are buttons within buttons
    found = page.evaluate(f"how => axe.run({page_but}, how)", AXE)
    assert [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found["violations"]] == []


@everywhere
def test_every_part_of_the_page(width, mode, visit, axe):
    page, complaints = visit(width, mode)
    name = f"{width}-{mode}"
    check(page, complaints, width, axe, f"{name}-opening")
    page.get_by_role("button", name=SCENES[-1]["why"]).click()
    wanted = json.dumps(SCENES[-1]["question"])
    page.wait_for_function(f"[...document.querySelectorAll('textarea')].some(e => e.value == {wanted})")
    page.get_by_text("Advanced").click()
    page.get_by_role("radio", name="the best cells only").click()
    page.get_by_role("radio", name="after it").click()
    page.click("#go")
    page.wait_for_selector(DONE)
    page.get_by_role("button", name="Ask all of them").click()
    page.wait_for_selector("ul.cards li:nth-child(4)")
    page.get_by_role("button", name="Draw the strip").click()
    page.wait_for_selector(f"ol.cards li:nth-child({len(app.STRIP)})")
    check(page, complaints, width, axe, f"{name}-answered")
    page.get_by_role("tab", name="Results").click()
    for i, query in enumerate(("by type", "SELECT method, count(*) AS n FROM samples GROUP BY method ORDER BY n DESC")):
        if i:
            page.get_by_label("SQL", exact=True).fill(query)
        else:
            page.get_by_label("Named queries").click()
            page.get_by_role("option", name=query, exact=True).click()
        page.get_by_role("button", name="Run", exact=True).click()
        page.wait_for_function(f"document.querySelectorAll('.rows th').length {'==' if i else '>'} 2")
        check(page, complaints, width, axe, f"{name}-results-{('named', 'free')[i]}")
    page.get_by_role("tab", name="API").click()
    check(page, complaints, width, axe, f"{name}-api")


@everywhere
def test_upload_type_enter_slide(width, mode, visit):
    page, complaints = visit(width, mode)
    page.locator(".ask input[type=file]").set_input_files(PHOTO)
    page.wait_for_timeout(1000)
    page.get_by_label("Question", exact=True).fill("where is the <b>heart</b>?")
    page.get_by_label("Question", exact=True).press("Enter")
    page.wait_for_selector(DONE)
    handle = page.locator("#slide [role=slider]")
    handle.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    start = handle.bounding_box()
    page.mouse.move(start["x"] + start["width"] / 2, start["y"] + start["height"] / 2)
    page.mouse.down()
    page.mouse.move(start["x"] - 150, start["y"] + start["height"] / 2, steps=5)
    page.mouse.up()
    page.wait_for_timeout(300)
    dragged = handle.bounding_box()["x"]
    assert dragged < start["x"] - 100
    handle.press("ArrowRight")
    page.wait_for_timeout(300)
    assert handle.bounding_box()["x"] > dragged + 10
    assert complaints == []


@everywhere
def test_errors_are_shown_in_words(width, mode, visit, axe, tmp_path):
    page, complaints = visit(width, mode)
    (tmp_path / "cut.jpg").write_bytes(PHOTO.read_bytes()[:4000])
    page.locator(".ask input[type=file]").set_input_files(tmp_path / "cut.jpg")
    page.wait_for_timeout(1000)
    page.click("#go")
    page.wait_for_selector("text=it is damaged")
    page.get_by_label("Question", exact=True).fill("  ")
    page.click("#go")
    page.wait_for_selector("text=There is no question yet")
    check(page, complaints, width, axe, f"{width}-{mode}-error")
    page.get_by_label("Question", exact=True).fill("?" * 10_000)
    page.click("#go")
    page.wait_for_selector("text=10,000 characters, more than 500")
    page.get_by_role("tab", name="Results").click()
    page.wait_for_timeout(1000)
    page.get_by_label("SQL", exact=True).fill("SELECT * FROM read_text('/etc/passwd')")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector("text=no files, no network")


def test_a_second_click_does_not_queue_twice(visit):
    page, _ = visit()
    joined = []
    page.on("request", lambda r: joined.append(r.url) if "/queue/join" in r.url else None)
    for _ in range(3):
        page.locator("#go").dispatch_event("click")
    page.wait_for_selector(DONE)
    assert len(joined) == 1


UNREACHED = """() => [...document.querySelectorAll('button, a[href], input, textarea, select, [role=slider]')]
  .filter(e => e.checkVisibility({visibilityProperty: true}) && !e.closest("[aria-hidden=true]"))
  .filter(e => !e.disabled && !e.dataset.reached)
  .filter(e => e.type != 'radio' || !document.querySelector(`[name="${e.name}"][data-reached]`))
  .map(e => e.getAttribute('aria-label') || e.innerText || e.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("tab", ["Compare", "Results", "API"])
def test_all_controls_are_reached_by_keyboard(tab, visit):
    page, _ = visit()
    page.get_by_role("tab", name=tab).click()
    page.get_by_text("Advanced").click() if tab == "Compare" else None
    page.wait_for_timeout(500)
    for _ in range(70):
        page.keyboard.press("Tab")
        page.evaluate("document.activeElement.dataset.reached = 1")
    assert page.evaluate(UNREACHED) == []


def test_a_visitor_who_leaves_frees_the_place(visit, monkeypatch):
    page, _ = visit()
    first = next(app.run(uploads.read_image(str(PHOTO), 1024), [("what?", 0.2)], {}, 4, True))
    began, left = threading.Event(), threading.Event()

    def endless(*_):
        try:
            began.set()
            while True:
                yield first
                time.sleep(0.1)
        finally:
            left.set()

    with monkeypatch.context() as instead:
        instead.setattr(app, "run", endless)
        page.click("#go")
        assert began.wait(20)
        page.wait_for_timeout(1000)
        page.close()
        assert left.wait(20)
    page, _ = visit()
    page.click("#go")
    page.wait_for_selector(DONE)


# ------------------------------------------------------------------------------------ in a process of its own


@contextmanager
def serving(command, folder, limit):
    """A command that starts the app, once it has printed the address: the address, and the process's number."""
    alone = {"cwd": folder, "env": os.environ | {"PYTHONUNBUFFERED": "1"}, "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **alone)
    late = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    try:
        said = ""
        while not (address := re.search(r"http://127\.0\.0\.1:\d+", said)):
            line = process.stdout.readline()
            assert line, f"no address:\n{said}"
            said += line
        late.cancel()
        threading.Thread(target=process.stdout.read, daemon=True).start()  # what it says later must not block it
        yield address[0] + "/", process.pid
    finally:
        late.cancel()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_twenty_visitors_for_two_minutes(address):
    """Each request gets its own right answer or a polite refusal; memory does not grow."""
    files = [ROOT / "examples" / row["file"] for row in SCENES[:4]] + [PHOTO]
    asked = dict.fromkeys(itertools.product(files, app.QUESTIONS["scenes"]))
    for file, question in asked:
        *_, (_, state) = app.run(uploads.read_image(str(file), app.MODEL["side"]), [(question, 0.1)], {}, 4, True)
        asked[file, question] = told(state | {"allocation": state["perception"].allocation[0].tolist()})
    right, busy, wrong, memory = [], [], [], []

    def stay(file, question):
        client = Client(address, verbose=False)
        while time.monotonic() < end:
            try:
                report = client.predict(handle_file(file), question, "10%", longest=4, api_name="/compare")[0]
            except Exception as error:
                busy.append(str(error))
                time.sleep(1)
                continue
            (right if told(report) == asked[file, question] else wrong).append((file, question))

    with serving([sys.executable, "-m", "arr_coc.app"], ROOT, 120) as (address, number):
        end = time.monotonic() + 120
        visitors = [threading.Thread(target=stay, args=each) for each in asked]
        for visitor in visitors:
            visitor.start()
        while any(visitor.is_alive() for visitor in visitors):
            time.sleep(2)
            memory.append(int(Path(f"/proc/{number}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
    print(f"right {len(right)}, busy {len(busy)}, wrong {len(wrong)}, MB {memory}")
    assert len(asked) == 20 and set(right) == asked.keys() and not wrong
    assert all("Queue is full" in said for said in busy), set(busy)
    quarter = len(memory) // 4  # the first half fills caches and the allocator's arenas; what one answer takes passes
    assert median(memory[-quarter:]) < median(memory[-2 * quarter : -quarter]) * 1.03


def told(report) -> tuple:
    """What must be the same however many ask."""
    return report["allocation"], report["arr_coc"]["answer"], report["stock"]["answer"]


def test_from_a_fresh_clone_to_the_first_answer(chromium, tmp_path):
    """`make demo` sets up, starts and prints the address; its answer stands within a minute of the page's opening.

    The packages are lent by this environment: pip finds them there, and installs only the clone itself.
    """
    clone, began = tmp_path / "clone", time.monotonic()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run([sys.executable, "-m", "venv", clone / ".venv"], check=True)
    (packages,) = (clone / ".venv" / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    with serving(["make", "demo"], clone, 300) as (address, _):
        up = time.monotonic() - began
        page = chromium.new_page()
        page.set_default_timeout(60_000)
        opened = time.monotonic()
        page.goto(address)
        page.wait_for_selector(".arm.ours .answer:not(:has(.idle))")
        shown = time.monotonic() - opened
        page.click("#go")
        page.wait_for_selector(DONE)
        answered = time.monotonic() - opened
        page.close()
    print(f"address after {up:.0f} s; from the page's opening: example {shown:.1f} s, own answer {answered:.1f} s")
    assert answered < 60
