"""The app's markup: pure functions from answers and perceptions to HTML. All text is escaped, all pictures are inline.

Colours come from the page's own variables, so that light and dark need one set of rules.
"""

import base64
import html
import io
from collections.abc import Iterable

from PIL import Image

from arr_coc.balancing import TENSIONS
from arr_coc.visualizing import NOTES, magnified, relevance_overlay, token_map, what_the_model_sees

OPPONENTS = {  # what leaning to either side means
    "compress": "spread thinly",
    "particularize": "ask what matters here",
    "exploit": "go where things stand out",
    "explore": "look where nothing does",
    "focus": "stay on the strongest spots",
    "diversify": "reach far from them",
}

# Gradio's image slider knows only the mouse: this lets the arrow keys move its handle, and names its pictures.
KEYBOARD = """() => {
  const move = (handle, step) => {
    const frame = handle.parentElement.getBoundingClientRect(), grip = handle.getBoundingClientRect();
    const from = grip.left + grip.width / 2, clientY = frame.top + frame.height / 2;
    const to = Math.min(frame.right - 1, Math.max(frame.left + 1, from + step * frame.width));
    const fire = (target, type, clientX) => target.dispatchEvent(
      new MouseEvent(type, {bubbles: true, cancelable: true, view: window, clientX, clientY}));
    fire(handle, "mousedown", from); fire(window, "mousemove", to); fire(window, "mouseup", to);
    handle.setAttribute("aria-valuenow", Math.round(100 * (to - frame.left) / frame.width));
  };
  const dress = () => document.querySelectorAll("#slide [data-testid=slider]:not([tabindex])").forEach(handle => {
    const told = {tabindex: 0, role: "slider", "aria-label": "Slide between the image and what the model sees",
                  "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 50};
    for (const name in told) handle.setAttribute(name, told[name]);
    handle.addEventListener("keydown", event => {
      const step = {ArrowLeft: -0.05, ArrowRight: 0.05, Home: -1, End: 1}[event.key];
      if (step) { event.preventDefault(); move(handle, step); }
    });
    document.querySelectorAll("#slide img").forEach((img, i) => img.alt = i ? "What the model sees" : "The image");
  });
  new MutationObserver(dress).observe(document.body, {childList: true, subtree: true});
  dress();
}"""

# On a phone the answers stand below what was pressed.
SHOW_ANSWERS = """(...given) => {
  document.querySelector(".race")?.scrollIntoView({block: "nearest", behavior: "smooth"});
  return given;
}"""


def figure(picture: Image.Image, title: str, note: str = "", *, wide: int = 640) -> str:
    """A picture with its caption."""
    shown, caption = _img(picture, f"{title}: {note}", wide), f"<b>{_e(title)}</b> {_e(note)}"
    return f"<figure>{shown}<figcaption>{caption}</figcaption></figure>"


def _img(picture: Image.Image, alt: str, wide: int) -> str:
    shown = picture.copy()
    shown.thumbnail((wide, wide), Image.Resampling.LANCZOS)
    stored = io.BytesIO()
    shown.convert("RGB").save(stored, "WEBP", quality=86)
    source = base64.b64encode(stored.getvalue()).decode()
    size = f'width="{shown.width}" height="{shown.height}" style="--width:{shown.width}px"'
    return f'<img src="data:image/webp;base64,{source}" alt="{_e(alt)}" {size}>'


def race(state: dict | None, note: str = "") -> str:
    """Both answers with what they cost, under the ratios. `state` is what `answering.answers` yields."""
    ours, stock = (state or {}).get("arr_coc"), (state or {}).get("stock")
    every = state["perception"].grid[0][0] * state["perception"].grid[0][1] if state else 1
    waits = "waits for its turn" if ours else note
    return f"""<div class="race">{_headline(ours, stock)}<div class="arms">
{_arm("ARR-COC", "reads only what the question needs", ours, every, "ours", note)}
{_arm("Qwen3-VL", "reads the whole image", stock, every, "stock", waits)}
</div></div>"""


def _headline(ours: dict | None, stock: dict | None) -> str:
    if not (ours and stock):
        return '<div class="ratios waiting" aria-hidden="true"><div><b>–</b><span>&nbsp;</span></div></div>'
    ratios = [
        (stock["tokens"] / ours["tokens"], "fewer visual tokens", "the same visual tokens", "more visual tokens"),
        (stock["kv_bytes"] / ours["kv_bytes"], "less KV memory", "the same KV memory", "more KV memory"),
        (
            stock["first"] / ours["first"],
            "sooner to its first word",
            "as soon to its first word",
            "later to its first word",
        ),
    ]
    return '<div class="ratios">' + "".join(f"<div>{_ratio(*ratio)}</div>" for ratio in ratios) + "</div>"


def _ratio(value: float, better: str, same: str, worse: str) -> str:
    if 0.95 <= value <= 1.05:
        return f"<b>1×</b><span>{same}</span>"
    shown = max(value, 1 / value)
    kind = "" if value > 1 else ' class="worse"'
    return f"<b{kind}>{shown:.{1 if shown < 10 else 0}f}×</b><span>{better if value > 1 else worse}</span>"


def _arm(name: str, motto: str, run: dict | None, every: int, kind: str, note: str) -> str:
    answer = _said(run) if run else f'<span class="idle">{_e(note) or "…"}</span>'
    writing = ' <span class="caret" aria-hidden="true"></span>' if run and not run["done"] else ""
    share = 100 * run["tokens"] / every if run else 0
    rows = [("visual tokens", f"{run['tokens']:,}" if run else "–")]
    rows += [("first word", seconds(run["first"]) if run else "–")]
    rows += [("whole answer", seconds(run["seconds"]["total"]) if run and run["done"] else "–")]
    rows += [("KV memory", size(run["kv_bytes"]) if run else "–")]
    numbers = "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in rows)
    return (
        f'<section class="arm {kind}"><h3>{name}</h3><p class="motto">{motto}</p>'
        f'<p class="answer">{answer}{writing}</p>'
        f'<div class="meter" aria-hidden="true"><i style="width:{share:.1f}%"></i></div><dl>{numbers}</dl></section>'
    )


def _said(run: dict) -> str:
    return _e(run["answer"]) or ("(says nothing)" if run["done"] else "…")


def progress(share: float, text: str) -> str:
    """What is happening, as a bar with words. Nothing at the end."""
    if share >= 1:
        return f'<div class="progress done" role="status">{_e(text)}</div>'
    return (
        f'<div class="progress" role="status"><div class="bar" role="progressbar" aria-label="{_e(text)}" '
        f'aria-valuemin="0" aria-valuemax="100" aria-valuenow="{100 * share:.0f}"><i style="width:{100 * share:.0f}%">'
        f"</i></div>{_e(text)}</div>"
    )


def looked(image: Image.Image, perception) -> str:
    """Everything under the slider: relevance, the three ways of knowing, the homunculus, tensions, numbers."""
    allocation, grid = perception.allocation[0], perception.grid[0]
    cards = [figure(relevance_overlay(image, perception.relevance[0]), "Relevance", "where this question looks")]
    cards += [figure(token_map(image, allocation, grid), "Tokens", _legend(allocation))]
    cards += [figure(magnified(image, allocation, grid), "Homunculus", "each place as large as its share of tokens")]
    ways = [
        figure(relevance_overlay(image, getattr(perception, name)[0]), name.capitalize(), NOTES[name], wide=480)
        for name in NOTES
    ]
    return (
        f'<div class="looked"><div class="figures">{"".join(cards)}</div>'
        "<h3>Relevance is made of three ways of knowing</h3>"
        f'<div class="figures ways">{"".join(ways)}</div><div class="halves">'
        f"<div><h3>What was weighed against what</h3>{tensions(perception.tensions[0].tolist())}</div>"
        f"<div><h3>In numbers</h3>{numbers(perception)}</div></div></div>"
    )


def tensions(values: Iterable[float]) -> str:
    """Three balances, each a beam that tilts to the stronger of its two opponents."""
    out = []
    for name, value in zip(TENSIONS, values, strict=True):
        left, right = name.split("↔")
        tilt, stronger = 16 * (value - 0.5), left if value < 0.5 else right
        said = "in balance" if abs(value - 0.5) < 0.01 else f"leans to {stronger}"
        sides = "".join(
            f'<span class="{"strong" if who == stronger and said != "in balance" else ""}"><b>{who}</b>'
            f"<small>{OPPONENTS[who]}</small></span>"
            for who in (left, right)
        )
        out.append(
            f'<div class="balance" role="img" aria-label="{left} against {right}: {value:.2f}, {said}">'
            f'<svg viewBox="0 0 200 44" aria-hidden="true"><path class="post" d="M100 20l10 20h-20z"/>'
            f'<g transform="rotate({tilt:.2f} 100 20)"><path class="beam" d="M14 20h172"/>'
            f'<circle class="weight" cx="{14 + 172 * value:.1f}" cy="13" r="7"/></g></svg>'
            f'<div class="sides">{sides}</div></div>'
        )
    return f'<div class="balances">{"".join(out)}</div>'


def numbers(perception) -> str:
    """The allocation's figures as a table."""
    allocation, (h, w) = perception.allocation[0], perception.grid[0]
    rows = [("grid of the image", f"{h} × {w} = {h * w:,} cells"), ("budget", f"{perception.budget[0]:,} tokens")]
    for scale in (1, 2, 4):
        count = int((allocation[:, 0] == scale).sum())
        rows.append((f"tokens that show {scale} × {scale} cell{'s' * (scale > 1)}", f"{count:,}"))
    weights = ", ".join(f"{x:.2f}" for x in perception.weights[0].tolist())
    rows.append(("weights of the three balances", weights))
    rows += [(f"time for {stage}", seconds(taken)) for stage, taken in perception.seconds.items()]
    body = "".join(f'<tr><th scope="row">{_e(k)}</th><td>{v}</td></tr>' for k, v in rows)
    return f'<table class="numbers"><tbody>{body}</tbody></table>'


def grid_of_questions(image: Image.Image, done: list[tuple[str, dict, object]]) -> str:
    """The same image under several questions: `(question, run, perception)` each."""
    cards = [
        f"<li>{figure(relevance_overlay(image, seen.relevance[0]), question, wide=420)}"
        f'<p class="answer">{_said(run)}</p><p class="cost">{run["tokens"]:,} tokens</p></li>'
        for question, run, seen in done
    ]
    return f'<ul class="cards">{"".join(cards)}</ul>'


def strip_of_budgets(image: Image.Image, done: list[tuple[str, dict, object]]) -> str:
    """The same question at several budgets: `(budget, run, perception)` each, what the model sees and says."""
    cards = []
    for budget, run, seen in done:
        shown = what_the_model_sees(image, seen.allocation[0], seen.grid[0])
        cost = f"{run['tokens']:,} tokens · first word {seconds(run['first'])}"
        cards.append(
            f'<li>{figure(shown, budget, "of the tokens", wide=420)}<p class="answer">{_said(run)}</p>'
            f'<p class="cost">{cost}</p></li>'
        )
    return f'<ol class="cards">{"".join(cards)}</ol>'


def header(model: str, revision: str | None, kind: str) -> str:
    """What this page shows, in one look, and which model it is."""
    at = f" at <code>{_e(revision[:7])}</code>" if revision else ""
    small = " It is small and knows rendered scenes: shapes, colours, signs." if kind == "scenes" else ""
    return (
        '<header class="top"><h1>Look where the question points</h1><p class="lead">One model, twice. '
        "<b>Qwen3-VL</b> reads every part of your image. <b>ARR-COC</b> first asks which parts matter for this "
        f"question, and reads those.</p><p class='model'>Model: <code>{_e(model)}</code>{at}.{small}</p></header>"
    )


def section(title: str, line: str) -> str:
    return f"<h2>{_e(title)}</h2><p>{_e(line)}</p>"


CALLS = """\
from gradio_client import Client, handle_file

client = Client("the address of this page")
photo = handle_file("photo.jpg")
report, *pictures = client.predict(photo, "What does the sign say?", "20%", api_name="/compare")
print(report["arr_coc"]["answer"], report["ratio"])

client.predict(photo, ["What is this?", "Where is it?"], "20%", api_name="/questions")
client.predict(photo, "What is this?", ["5%", "20%", "all"], api_name="/budgets")
client.predict("SELECT * FROM summary", api_name="/sql")
client.predict(api_name="/about")"""


def api(mcp: bool) -> str:
    """How to call this app from a program."""
    tools = (
        "The same functions are tools over MCP, at <code>/gradio_api/mcp/</code> of this address, images as base64."
        if mcp
        else "MCP is off: this installation lacks the extra <code>gradio[mcp]</code>, and "
        "<code>pip install 'gradio[mcp]'</code> turns it on."
    )
    return (
        f'{section("From a program", "Everything that the page does, as functions.")}<pre class="calls" tabindex="0" '
        f'role="region" aria-label="Python"><code>{_e(CALLS)}</code></pre><p><code>/compare</code> gives both answers '
        f"with tokens, seconds and bytes, then three pictures as files: what the model sees, relevance, homunculus. "
        f"<i>Use via API</i>, at the foot of the page, lists every argument.</p><p>{tools}</p>"
    )


PLOTS = {  # in this order: what each shows, and how to read it
    "accuracy_tokens": (
        "Right answers, by tokens spent",
        "Higher is better; the dashed line is Qwen3-VL with all its tokens.",
    ),
    "accuracy_latency": ("Right answers, by time", "Further left is faster; the time to choose is counted."),
    "evidence_tokens": (
        "What it keeps",
        "Left: how much of what answers the question is kept in full detail. Right: how well the kept places cover it.",
    ),
    "speed_resolution": (
        "Time to the first word",
        "As a share of Qwen3-VL's, at its real size with random weights; lower is faster.",
    ),
}
METHODS = """Our method is <b>arr_coc</b>. Its rivals: <b>downscale</b> shrinks the whole image, <b>blind</b> keeps the
most detailed places whatever is asked, <b>random</b> keeps any; <b>oracle</b> is told where the answer is; grey lines
are further rivals. In <b>heldout</b> scenes stand things and phrasings that training never showed."""


def plots(paths: Iterable) -> str:
    """The benchmark's plots with how to read them. Wide ones scroll within themselves on a phone."""
    found = {path.stem: path for path in paths}
    cards = []
    for name in [*(name for name in PLOTS if name in found), *sorted(found.keys() - PLOTS.keys())]:
        title, note = PLOTS.get(name, (name.replace("_", " ").capitalize(), ""))
        shown = _img(Image.open(found[name]), f"{title}: {note}", 1400)
        cards.append(
            f'<section><h3>{_e(title)}</h3><p>{_e(note)}</p><div class="plot" tabindex="0" role="region" '
            f'aria-label="{_e(title)}">{shown}</div></section>'
        )
    return f'<p class="methods">{METHODS}</p><div class="plots">{"".join(cards)}</div>'


def rows(names: list[str], values: list[tuple], remark: str) -> str:
    """A query's rows as a table that scrolls within itself."""
    head = "".join(f'<th scope="col">{_e(name)}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{_cell(v)}</td>" for v in row) + "</tr>" for row in values)
    return (
        f'<p role="status">{_e(remark)}</p><div class="rows" tabindex="0" role="region" aria-label="rows"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return _e(text if len(text) <= 200 else text[:199] + "…")


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def size(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.{0 if value >= 100 or unit == 'B' else 1}f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _legend(allocation) -> str:
    counts = [(scale, int((allocation[:, 0] == scale).sum())) for scale in (1, 2, 4)]
    names = {1: "fine (orange)", 2: "coarse (green)", 4: "coarser (blue)"}
    return ", ".join(f"{count:,} {names[scale]}" for scale, count in counts if count)


def _e(text: str) -> str:
    return html.escape(str(text))
