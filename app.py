"""The comparison app: stock Qwen3-VL beside ARR-COC on one's own image and question.

    python -m arr_coc.app                                            # the small model that comes with the package
    python -m arr_coc.app --model ORG/arr-coc-vis --revision COMMIT

On a Space, the model and its commit are what the card's `preload_from_hub` names first: one place for both. One copy
of the weights serves both arms in one GPU call, and nothing but the weights is shared between requests.
"""

import spaces  # isort: skip  (before torch)

import argparse
import functools
import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gradio as gr
import yaml
from PIL import Image

from arr_coc.answering import TINY, Refused, answers, load, variant
from arr_coc.balancing import TENSIONS
from arr_coc.space import panels, results
from arr_coc.space.uploads import (
    MAX_ANSWER,
    MAX_ASKED,
    MAX_QUESTION,
    read_budget,
    read_choices,
    read_image,
    read_length,
    read_question,
    read_several,
    upload,
)
from arr_coc.visualizing import CELL, homunculus, relevance_overlay, what_the_model_sees

HERE = Path(__file__).resolve().parent
TINY_NAME = "checkpoints/tiny"
BUDGETS = ("auto", "5%", "10%", "20%", "50%")
STRIP = ("2.5%", "5%", "10%", "20%", "40%", "all")
QUESTIONS = {
    "scenes": ("which background is it?", "how crowded is it: few, some or many?", "is there a sign?", "any heart?"),
    "photos": ("What is in the foreground?", "What is in the background?", "Is there any text?", "What colours?"),
}
MODEL = {}  # filled once by `start`; a decorated function cannot be handed the weights


# ------------------------------------------------------------------------------------------------- the GPU call


def _duration(image: Image.Image, asked: list, choices: dict, max_new_tokens: int, stock: bool) -> int:
    """Seconds of GPU that a request may need; visitors have few a day."""
    each = 2 + 0.05 * max_new_tokens + image.width * image.height / 4e6
    return min(120, round(10 + each * len(asked) * (1 + stock)))


@spaces.GPU(duration=_duration)
def run(image: Image.Image, asked: list, choices: dict, max_new_tokens: int, stock: bool) -> Iterator[tuple[int, dict]]:
    """Answers each `(question, budget)` of `asked` in turn: its number and what `answers` yields."""
    model, processor = variant(MODEL["model"], **choices), MODEL["processor"]
    if model.device.type == "cuda":  # a fresh GPU process: neither arm shall pay for its first kernels
        for _ in answers(model, processor, image, *asked[0], max_new_tokens=2, stock=stock):
            pass
    known = None
    for i, (question, budget) in enumerate(asked):
        for state in answers(model, processor, image, question, budget, max_new_tokens, stock=stock, known=known):
            yield i, state | {"perception": _drawn(state["perception"])}
        known = state["perception"]


def _drawn(perception):
    """A perception without its largest arrays, which no picture needs: on a Space all that is yielded is copied."""
    large = {"texture", "detail", "thumbnail", "gain"}
    return type(perception)(**{k: v for k, v in perception.items() if k not in large})


def refusing(handler: Callable) -> Callable:
    """The generator `handler`, its refusals shown as they are and its failures without a trace."""

    @functools.wraps(handler)
    def guarded(*args):
        try:
            yield from handler(*args)
        except Refused as error:
            raise gr.Error(str(error), title="That cannot be used", print_exception=False) from None
        except gr.Error:
            raise
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            raise gr.Error("Something went wrong here, not with what you gave. Please try again.") from error

    return guarded


def _once(function: Callable) -> Callable:
    """A function as a generator of one value."""

    def generator(*args):
        yield function(*args)

    return generator


# ------------------------------------------------------------------------------------------------- the page


def page_compare(path, question, choice, exact, allocator, realize, longest):
    """Both answers as they come, then where ARR-COC looked: status, race, slider, pictures."""
    budget = read_budget(exact if (exact or "").strip() else choice)
    choices, longest = read_choices(allocator, realize), read_length(longest)
    question, image = read_question(question), read_image(path, MODEL["side"])
    yield panels.progress(0.08, "ARR-COC looks for the places that matter"), panels.race(None), gr.skip(), gr.skip()
    begun = time.perf_counter()
    for _, state in run(image, [(question, budget)], choices, longest, True):
        ours, stock = state["arr_coc"], state["stock"]
        pictures = (gr.skip(), gr.skip())
        if ours["done"] and not stock:  # stock has not begun: drawing costs neither arm any time
            yield panels.progress(0.4, "Drawing where it looked"), panels.race(state), *pictures
            pictures = (slider(image, state["perception"]), panels.looked(image, state["perception"]))
        share = 0.15 if not stock and not ours["done"] else 0.5 if not stock else 0.8
        said = "ARR-COC answers" if share < 0.2 else "Qwen3-VL reads the whole image"
        if stock and stock["done"]:
            share, said = 1, f"{_verdict(state)} · {panels.seconds(time.perf_counter() - begun)} for both"
        yield panels.progress(share, said), panels.race(state), *pictures


def _verdict(state: dict) -> str:
    same = state["arr_coc"]["answer"].lower() == state["stock"]["answer"].lower()
    return "Both say the same" if same else "The two answers differ"


def slider(image: Image.Image, perception) -> tuple[Image.Image, Image.Image]:
    """The image and what the model sees of it, in one size."""
    h, w = perception.grid[0]
    seen = what_the_model_sees(image, perception.allocation[0], (h, w))
    return image.resize((w * CELL, h * CELL), Image.Resampling.LANCZOS), seen


def page_questions(path, questions, choice, exact, allocator, realize, longest):
    """One image, several questions: where each looks and what it gets."""
    budget = read_budget(exact if (exact or "").strip() else choice)
    asked = [(q, budget) for q in read_several(questions, read_question, "questions")]
    yield from _several(path, asked, allocator, realize, longest, panels.grid_of_questions, [q for q, _ in asked])


def page_budgets(path, question, allocator, realize, longest):
    """One question at several budgets: what the model sees and says."""
    question = read_question(question)
    asked = [(question, read_budget(budget)) for budget in STRIP]
    yield from _several(path, asked, allocator, realize, longest, panels.strip_of_budgets, STRIP)


def _several(path, asked, allocator, realize, longest, show, names):
    choices, longest, image = read_choices(allocator, realize), read_length(longest), read_image(path, MODEL["side"])
    yield panels.progress(0.05, f"1 of {len(asked)}: {names[0]}"), ""
    last, done = {}, 0
    for i, state in run(image, asked, choices, longest, False):
        last[i] = (names[i], state["arr_coc"], state["perception"])
        if state["arr_coc"]["done"]:
            done = i + 1
            said = f"{done + 1} of {len(asked)}: {names[done]}" if done < len(asked) else "Done"
            yield panels.progress(done / len(asked), said), show(image, [last[j] for j in range(done)])


# -------------------------------------------------------------------------------------------------- the API


def api_compare(
    image: str, question: str, budget: str = "20%", allocator: str = "lod", realize: str = "before", longest: int = 64
):
    """Answers one question about one image with stock Qwen3-VL and with ARR-COC.

    Args:
        image: an image file.
        question: what to ask about it, at most 500 characters.
        budget: visual tokens ("200"), a share of them ("20%"), "auto" or "all".
        allocator: "lod" (tokens at three scales) or "topk" (the most relevant cells).
        realize: drop tokens "before" or "after" the vision tower.
        longest: the longest answer, in tokens.

    Returns:
        report: both answers with visual tokens, seconds by stage, seconds to the first token and bytes of KV cache;
        their ratios; ARR-COC's allocation and tensions. Then three pictures: what the model sees, the relevance, and
        the homunculus.
    """
    question, image, budget = read_question(question), read_image(image, MODEL["side"]), read_budget(budget)
    choices, longest = read_choices(allocator, realize), read_length(longest)
    *_, (_, state) = run(image, [(question, budget)], choices, longest, True)
    seen, ours, stock = state["perception"], state["arr_coc"], state["stock"]
    allocation, grid = seen.allocation[0], seen.grid[0]
    yield (
        {
            "model": MODEL["name"],
            "revision": MODEL["revision"],
            "stock": stock,
            "arr_coc": ours,
            "ratio": {
                "tokens": stock["tokens"] / ours["tokens"],
                "first": stock["first"] / ours["first"],
                "total": stock["seconds"]["total"] / ours["seconds"]["total"],
                "kv_bytes": stock["kv_bytes"] / ours["kv_bytes"],
            },
            "grid": list(grid),
            "budget": seen.budget[0],
            "allocation": allocation.tolist(),
            "tensions": dict(zip(TENSIONS, seen.tensions[0].tolist(), strict=True)),
        },
        what_the_model_sees(image, allocation, grid),
        relevance_overlay(image, seen.relevance[0]),
        homunculus(image, allocation, grid),
    )


def api_questions(image: str, questions: list, budget: str = "20%"):
    """Answers up to eight questions about one image with ARR-COC.

    Args:
        image: an image file.
        questions: what to ask about it.
        budget: visual tokens ("200"), a share of them ("20%"), "auto" or "all".

    Returns:
        a list with, for each question: question, answer, tokens, seconds, and allocation.
    """
    asked, budget = read_several(questions, read_question, "questions"), read_budget(budget)
    yield _reports(image, [(question, budget) for question in asked])


def api_budgets(image: str, question: str, budgets: list):
    """Answers one question about one image with ARR-COC at up to eight budgets.

    Args:
        image: an image file.
        question: what to ask about it.
        budgets: each as visual tokens ("200"), a share of them ("20%"), "auto" or "all".

    Returns:
        a list with, for each budget: question, answer, tokens, seconds, and allocation.
    """
    question = read_question(question)
    yield _reports(image, [(question, b) for b in read_several(budgets, read_budget, "budgets")])


def _reports(path: str, asked: list) -> list[dict]:
    last = {}
    for i, state in run(read_image(path, MODEL["side"]), asked, {}, 64, False):
        last[i] = state
    return [
        {"question": question, "budget": budget, "allocation": last[i]["perception"].allocation[0].tolist()}
        | last[i]["arr_coc"]
        for i, (question, budget) in enumerate(asked)
    ]


def api_about():
    """Which model answers here, at which commit, and what this app accepts.

    Returns:
        model, revision, and the limits on what is handed in.
    """
    limits = {"question_characters": MAX_QUESTION, "answer_tokens": MAX_ANSWER, "asked_at_once": MAX_ASKED}
    yield {"model": MODEL["name"], "revision": MODEL["revision"], "limits": limits, "mcp": has_mcp()}


def has_mcp() -> bool:
    """Whether the tools are also offered over MCP: only with the extra `gradio[mcp]`."""
    return importlib.util.find_spec("mcp") is not None


# ---------------------------------------------------------------------------------------------------- results


def show_rows(text: str):
    """A SELECT's rows as a table."""
    names, rows, remark = results.select(MODEL["results"], text)
    return panels.rows(names, rows, remark)


def api_sql(query: str):
    """Runs one SELECT over the benchmark's rows: tables runs, samples, summary and speed.

    Args:
        query: one SELECT, at most 4,000 characters; stopped after 5 seconds, 200 rows at most.

    Returns:
        columns, rows, and a remark on how many there are.
    """
    names, rows, remark = results.select(MODEL["results"], query)
    yield {"columns": names, "rows": json.loads(json.dumps(rows, default=str)), "remark": remark}


# ----------------------------------------------------------------------------------------------------- layout


def build(opening: bool = True) -> gr.Blocks:
    """The page, for the model that `start` loaded."""
    kind = "scenes" if MODEL["model"].config.text_config.vocab_size < 10_000 else "photos"  # what it was trained on
    rows = json.loads((HERE / "examples" / "examples.json").read_text())
    examples = [row for row in rows if row["of"] == kind]
    first = examples[0]
    shown = (
        example(0, examples) if opening else (gr.skip(), gr.skip(), gr.skip(), panels.progress(1, ""), None, None, "")
    )
    heavy = {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "full"}  # the place in the queue
    page = {"api_visibility": "private", "trigger_mode": "once"}
    with gr.Blocks(title="ARR-COC: look where it matters", delete_cache=(3600, 3600)) as demo:
        gr.HTML(panels.header(MODEL["name"], MODEL["revision"], kind))
        with gr.Tabs():
            with gr.Tab("Compare"):
                with gr.Row(elem_classes="stage"):
                    with gr.Column(scale=2, min_width=300, elem_classes="ask"):
                        image = upload(value=str(HERE / "examples" / first["file"]), label="Image", height=300)
                        question = gr.Textbox(  # a longer one is refused in words, not cut
                            first["question"], label="Question", max_length=20 * MAX_QUESTION, lines=1, max_lines=4
                        )
                        budget = gr.Radio(
                            BUDGETS,
                            value=first["budget"],
                            label="Visual tokens that ARR-COC may spend",
                            info="A token is a tile of the image. Qwen3-VL spends all of them.",
                        )
                        go = gr.Button("Ask both", variant="primary", elem_id="go")
                        with gr.Accordion("Advanced", open=False):
                            exact = gr.Textbox(
                                label="Exact budget",
                                info="tokens (200) or a share (15%); goes before the choice above",
                                max_length=20,
                            )
                            longest = gr.Slider(1, MAX_ANSWER, 48, step=1, label="Longest answer, in tokens")
                    with gr.Column(scale=3, min_width=300):
                        status, race = (
                            gr.HTML(shown[3], elem_classes="status"),
                            gr.HTML(shown[4] or panels.race(None, "not asked yet")),
                        )
                        gr.HTML('<p class="hint">Try one that makes another point:</p>')
                        with gr.Row(elem_classes="examples"):
                            chosen = [gr.Button(called(row), size="sm", min_width=90) for row in examples]
                        gr.HTML('<p class="hint">Or let it spend its tokens in another way, and ask again:</p>')
                        with gr.Row(elem_classes="ways"):
                            allocator = gr.Radio(
                                [("coarse to fine", "lod"), ("the best cells only", "topk")],
                                value="lod",
                                label="Allocator",
                                info="Tokens of three sizes, or all of the finest.",
                            )
                            realize = gr.Radio(
                                [("before the vision tower", "before"), ("after it", "after")],
                                value="before",
                                label="Drop tokens",
                                info="Before, the tower has less to do as well.",
                            )
                gr.HTML(
                    panels.section("What it looked at", "Drag the line. Blurred: read coarsely. Hatched: not read.")
                )
                slide = gr.ImageSlider(
                    shown[5],
                    label="The image | what the model sees",
                    max_height=620,
                    interactive=False,
                    buttons=["fullscreen"],
                    elem_id="slide",
                )
                looked = gr.HTML(shown[6])
                gr.HTML(panels.section("Same image, other questions", "It looks elsewhere for each."))
                questions = gr.Textbox(
                    "\n".join(QUESTIONS[kind]), label="Questions, one a line", lines=4, max_lines=8, max_length=4000
                )
                ask_all = gr.Button("Ask all of them")
                grid_status, grid = gr.HTML(elem_classes="status"), gr.HTML()
                gr.HTML(panels.section("Same question, other budgets", "From a glimpse to everything."))
                spend = gr.Button("Draw the strip")
                strip_status, strip = gr.HTML(elem_classes="status"), gr.HTML()
            with gr.Tab("Results"):
                results_tab(page)
            with gr.Tab("API"):
                gr.HTML(panels.api(has_mcp()))

        settings = [allocator, realize, longest]
        gr.on([go.click, question.submit], refusing(page_compare), [image, question, budget, exact, *settings],
              [status, race, slide, looked], show_progress_on=status, js=panels.SHOW_ANSWERS,
              **heavy, **page)  # fmt: skip
        gr.on(ask_all.click, refusing(page_questions), [image, questions, budget, exact, *settings],
              [grid_status, grid], show_progress_on=grid_status, **heavy, **page)  # fmt: skip
        gr.on(spend.click, refusing(page_budgets), [image, question, *settings],
              [strip_status, strip], show_progress_on=strip_status, **heavy, **page)  # fmt: skip
        for i, button in enumerate(chosen):
            button.click(
                partial(example, i, examples),
                None,
                [image, question, budget, status, race, slide, looked],
                show_progress_on=status,
                **heavy,
                **page,
            )
        endpoints(heavy)
    return demo.queue(max_size=20)


def called(row: dict) -> str:
    """An example's name. `right` is set by make_examples.py, which knows what the small model cannot answer yet."""
    return row["why"] if row.get("right", True) else f"{row['why']} (too hard yet)"


def example(number: int, examples: list[dict]):
    """An example with its finished answers, computed for the first who asks and kept."""
    if number not in _FINISHED:
        row = examples[number]
        path = str(HERE / "examples" / row["file"])
        image = read_image(path, MODEL["side"])
        *_, (_, state) = run(image, [(row["question"], read_budget(row["budget"]))], {}, 48, True)
        _FINISHED[number] = (
            path,
            row["question"],
            row["budget"],
            panels.progress(1, _verdict(state)),
            panels.race(state),
            slider(image, state["perception"]),
            panels.looked(image, state["perception"]),
        )
    return _FINISHED[number]


_FINISHED: dict[int, tuple] = {}  # what anybody would be shown; no visitor's own


def results_tab(page: dict):
    """Plots and the SQL box."""
    con = MODEL["results"]
    gr.HTML(panels.section("What was measured", results.measured(con)))
    if con is not None:
        gr.HTML(panels.plots(results.plots(con)))
    gr.HTML(panels.section("Ask the rows", "Tables runs, samples, summary, speed: one SELECT, 5 seconds, 200 rows."))
    named = results.queries()
    first = "accuracy by tokens" if "accuracy by tokens" in named else None
    names = gr.Dropdown(list(named), value=first, label="Named queries")
    box = gr.Textbox(
        named.get(first, ""), label="SQL", lines=8, max_lines=16, max_length=results.CHARACTERS, elem_id="sql"
    )
    button, table = gr.Button("Run"), gr.HTML()
    names.input(named.get, names, box, api_visibility="private", show_progress="hidden")
    button.click(refusing(_once(show_rows)), box, table, concurrency_limit=2, show_progress="hidden", **page)


def endpoints(heavy: dict):
    """What `gradio_client` sees, and nothing else; tests/test_app.py holds it still."""
    with gr.Row(visible=False):
        photo = upload(label="image")
        text, budget = gr.Textbox(label="question"), gr.Textbox("20%", label="budget")
        allocator, realize = gr.Textbox("lod", label="allocator"), gr.Textbox("before", label="realize")
        longest, several, trigger = gr.Number(64, label="longest"), gr.JSON(label="several"), gr.Button()
        report = gr.JSON(label="report")
        pictures = [gr.Image(label=name, format="png") for name in ("seen", "relevance", "homunculus")]
    for handler, inputs, outputs in (
        (api_compare, [photo, text, budget, allocator, realize, longest], [report, *pictures]),
        (api_questions, [photo, several, budget], report),
        (api_budgets, [photo, text, several], report),
    ):
        trigger.click(refusing(handler), inputs, outputs, api_name=handler.__name__[4:], **heavy)
    trigger.click(refusing(api_sql), text, report, api_name="sql", concurrency_limit=2)
    trigger.click(refusing(api_about), None, report, api_name="about")


# ------------------------------------------------------------------------------------------------------ start


def named_by_card(path: Path = HERE / "README.md") -> dict:
    """What a Space's card names: the model that it preloads first, the results that it links, each at a commit.

    The only place of both. Empty where the card is no Space's.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    front = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    preloaded = (yaml.safe_load(front[1]) or {}).get("preload_from_hub") if front else None
    if not preloaded:
        return {}
    first = preloaded[0].split()
    linked = re.search(r"/datasets/([\w./-]+)/tree/([0-9a-f]{40})", text)
    return {"model": first[0], "revision": first[-1]} | ({"data": linked.groups()} if linked else {})


def start(model: str | None = None, revision: str | None = None, data: str | None = None):
    """Loads what the page needs, once."""
    card, zero = named_by_card(), spaces.config.Config.zero_gpu
    name, commit = (model, revision) if model else (card.get("model", str(TINY)), card.get("revision"))
    loaded, processor = load(name, commit, "cuda" if zero else None)
    if not zero:  # neither arm of the first answer shall pay for what is cold
        for _ in answers(loaded, processor, Image.new("RGB", (64, 64)), "?", 0.5, 2):
            pass
    MODEL.update(model=loaded, processor=processor, name=TINY_NAME if name == str(TINY) else name, revision=commit)
    MODEL["zero"], MODEL["side"] = zero, 1024 if loaded.device.type == "cpu" else 2048  # px: what is answered in time
    MODEL["results"] = results.open_results(
        *((data,) if data else card.get("data", (HERE / "benchmarks" / "dataset",)))
    )


def theme() -> gr.themes.Base:
    """Orange on paper, in fonts that every machine has."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return gr.themes.Base(primary_hue="orange", neutral_hue="slate", **fonts)


def launch(demo: gr.Blocks, **kwargs):
    """Serves the page with what a public page needs: a limit on files, no traces, no other paths."""
    return demo.launch(
        theme=theme(),
        css_paths=HERE / "space" / "app.css",
        js=panels.KEYBOARD,
        max_file_size="10mb",
        show_error=True,  # words, never a trace: what fails in a handler has been put into words before
        mcp_server=has_mcp(),
        footer_links=["api", "settings"],
        ssr_mode=False,
        **kwargs,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a Hub id (default: the card's, else the small model shipped here)")
    parser.add_argument("--revision", help="the Hub model's tag or commit; pin it")
    parser.add_argument("--data", help="the results dataset: a folder or a Hub id (default: benchmarks/dataset)")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    args = parser.parse_args(argv)
    try:
        start(args.model, args.revision, args.data)
    except Refused as error:
        parser.exit(2, f"error: {error}\n")
    launch(build(opening=not MODEL["zero"]), server_port=args.port)


if __name__ == "__main__":
    main()
