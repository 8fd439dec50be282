"""The cards' tables and plots, written from the rows between markers: no figure in a card is typed by hand.

`<!-- begin results:NAME -->` ... `<!-- end results:NAME -->` (with `#` in YAML) in `model_card.md` and in the dataset's
card are filled with what `BLOCKS[NAME]` says. Nothing is written where nothing changed.
"""

import os
import re
from pathlib import Path

from . import whole
from .sql import connect, render, select

ROOT = Path(__file__).resolve().parents[1]
CARDS = (ROOT / "model_card.md", ROOT / "benchmarks" / "dataset" / "README.md")
ASSETS = ROOT / "benchmarks" / "dataset" / "assets"
EMPTY = "*No rows yet: `python -m benchmarks run`, `collect` and `report` fill this in.*\n"
AT = 0.2  # the budget that tables of one budget are of

_RIVAL = """NOT starts_with(method, 'oracle') AND NOT starts_with(method, 'arr_coc') AND NOT starts_with(method, 'no_')
    AND NOT ends_with(method, '_latency') AND method NOT IN ('stock', 'untrained')"""

# At equal tokens; the questions are `*` or a stratum. Who answered fewer questions is compared on those alone.
HEADLINE = f"""
WITH against AS (
    SELECT task, budget, method, avg(score) - avg(ours) AS ahead FROM versus
    WHERE '$$' = '*' OR 'stratum:' || stratum = '$$' GROUP BY task, budget, method),
rival AS (
    SELECT task, budget, arg_max(method, (ahead, method)) AS method, max(ahead) AS ahead
    FROM against WHERE {_RIVAL} GROUP BY task, budget),
arm AS (
    SELECT task, budget, max(ahead) AS ahead FROM against WHERE ends_with(method, '_latency') GROUP BY task, budget),
of AS (SELECT task, budget, method, n, accuracy, accuracy_low, accuracy_high FROM score WHERE question_type = '$$')
SELECT o.task, printf('%.0f %%', 100 * o.budget) AS tokens, o.n,
    printf('%.3f', s.accuracy) AS stock,
    printf('%.3f [%.3f, %.3f]', o.accuracy, o.accuracy_low, o.accuracy_high) AS "ARR-COC",
    printf('%.3f', d.accuracy) AS downscale, printf('%.3f', b.accuracy) AS blind,
    printf('%s %+.3f', rival.method, rival.ahead) AS "best of the others, against ARR-COC",
    printf('%.3f', x.accuracy) AS oracle,
    CASE WHEN rival.ahead < 0 THEN 'yes' ELSE '**no**' END AS "above all",
    CASE WHEN arm.ahead < 0 THEN 'yes' WHEN arm.ahead >= 0 THEN '**no**' ELSE '' END AS "at equal latency, too"
FROM of o JOIN rival USING (task, budget) LEFT JOIN arm USING (task, budget)
LEFT JOIN of s ON s.task = o.task AND s.method = 'stock'
LEFT JOIN of d ON d.task = o.task AND d.budget = o.budget AND d.method = 'downscale'
LEFT JOIN of b ON b.task = o.task AND b.budget = o.budget AND b.method = 'blind'
LEFT JOIN of x ON x.task = o.task AND x.budget = o.budget AND x.method = 'oracle'
WHERE o.method = 'arr_coc' ORDER BY o.task, o.budget
"""
LATENCY = """
WITH arm AS (
    SELECT task, budget, method, count(*) AS n, avg(score) AS accuracy, avg(ours) AS ours FROM versus
    WHERE ends_with(method, '_latency') GROUP BY ALL)
SELECT o.task, printf('%.0f %%', 100 * o.budget) AS "ARR-COC's tokens", min(d.n) AS n,
    printf('%.3f', avg(d.ours)) AS "ARR-COC",
    printf('%.3f', max(d.accuracy) FILTER (d.method = 'downscale_latency')) AS downscale,
    printf('%.3f', max(d.accuracy) FILTER (d.method = 'blind_latency')) AS blind,
    printf('%.3f', max(d.accuracy) FILTER (d.method = 'uniform_latency')) AS uniform,
    printf('%.1f', max(o.seconds_mean) * 1e3) AS "ARR-COC, ms",
    printf('%.1f', max(t.seconds_mean) FILTER (d.method = 'downscale_latency') * 1e3) AS "downscale, ms",
    printf('%.1f', max(s.seconds_mean) * 1e3) AS "stock, ms",
    CASE WHEN max(d.accuracy - d.ours) < 0 THEN 'yes' ELSE '**no**' END AS "above all"
FROM told o JOIN arm d USING (task, budget) JOIN told t ON (t.task, t.budget, t.method) = (d.task, d.budget, d.method)
LEFT JOIN told s ON s.task = o.task AND s.method = 'stock'
WHERE o.method = 'arr_coc' GROUP BY o.task, o.budget ORDER BY o.task, o.budget
"""
BEHAVIOUR = """
SELECT task, printf('%.0f %%', 100 * budget) AS tokens, printf('%.3f', distinctiveness) AS "distance between questions",
    printf('%.3f', pointing_game) AS "pointing game", printf('%.3f', calibration_error) AS "calibration error"
FROM told WHERE method = 'arr_coc' ORDER BY task, budget
"""
FAILS = """
SELECT task, printf('%.0f %%', 100 * budget) AS tokens, max(n_downscale_wrong) AS "downscale wrong",
    printf('%.3f', max(accuracy_downscale_wrong) FILTER (method = 'arr_coc')) AS "ARR-COC",
    printf('%.3f', max(accuracy_downscale_wrong) FILTER (method = 'blind')) AS blind,
    printf('%.3f', max(accuracy_downscale_wrong) FILTER (method = 'random')) AS random,
    printf('%.3f', max(accuracy_downscale_wrong) FILTER (method = 'oracle')) AS oracle,
    printf('%.2g', max(p_against_downscale) FILTER (method = 'arr_coc')) AS "p, ARR-COC against downscale"
FROM told WHERE budget < 1 GROUP BY task, budget ORDER BY task, told.budget
"""
EVIDENCE = f"""
SELECT task, method, count(*) AS n, printf('%.3f', avg(evidence_recall)) AS "evidence kept at scale 1",
    printf('%.3f', avg(box_mass)) AS "tokens in the box",
    printf('%.3f', avg(box_mass / least(1, evidence_cells / visual_tokens))) AS "of the most possible",
    printf('%.3f', avg(iou)) AS "IoU",
    printf('%.3f', avg(pointing_hit)) AS "pointing game"
FROM one WHERE evidence_boxes = 1 AND budget = {AT} AND NOT starts_with(method, 'downscale')
GROUP BY ALL ORDER BY task, avg(evidence_recall) DESC, method
"""
TYPES = f"""
SELECT o.question_type AS questions, o.task, o.n, printf('%.3f', s.accuracy) AS stock,
    printf('%.3f [%.3f, %.3f]', o.accuracy, o.accuracy_low, o.accuracy_high) AS "ARR-COC",
    printf('%.3f', d.accuracy) AS downscale, printf('%+.3f', o.accuracy - d.accuracy) AS ahead
FROM score o JOIN score d USING (task, question_type, budget)
LEFT JOIN score s ON s.task = o.task AND s.question_type = o.question_type AND s.method = 'stock'
WHERE o.method = 'arr_coc' AND d.method = 'downscale' AND budget = {AT} ORDER BY o.task, o.question_type
"""
ABLATIONS = f"""
SELECT task, method, count(*) AS n, printf('%.3f', avg(score)) AS accuracy,
    printf('%+.3f', avg(score) - avg(ours)) AS "against the whole",
    printf('%.3f', avg(evidence_recall)) AS "evidence kept at scale 1"
FROM versus
WHERE budget = {AT} AND (starts_with(method, 'no_') OR starts_with(method, 'arr_coc') OR method = 'untrained')
GROUP BY ALL ORDER BY task, avg(score) - avg(ours) DESC, method
"""
LEADS = f"""
SELECT method, count(*), avg(score) - avg(ours) AS ahead FROM versus WHERE our_budget = {AT}
GROUP BY ALL ORDER BY ahead DESC, method
"""
SPEED = """
SELECT shape, device, batch, native_tokens || ' → ' || budget_tokens AS tokens, method,
    printf('%.3f', max(ratio_to_stock) FILTER (stage = '*')) AS "of stock's prefill",
    printf('%.4f', max(ratio_to_stock) FILTER (stage = 'choose')) AS "of that, choosing",
    printf('%.3f', max(ratio_to_stock) FILTER (stage = 'model')) AS "by FLOPs",
    printf('%.0f', max(peak_bytes) FILTER (stage = '*') / 1e6) AS "peak MB",
    printf('%.1f', max(kv_bytes) FILTER (stage = '*') / 1e6) AS "KV MB", max(rounds) AS rounds
FROM timed GROUP BY shape, device, batch, native_tokens, budget_tokens, method
ORDER BY shape, device, batch, native_tokens, budget_tokens, max(ratio_to_stock) FILTER (stage = '*'), method
"""
ROWS = """
SELECT model, task, split, count(DISTINCT sample_id) AS questions, count(DISTINCT method) AS methods,
    array_to_string(list_transform(list_sort(list(DISTINCT budget)), lambda b: printf('%.0f %%', 100 * b)), ', ')
        AS budgets,
    count(*) AS answers, max(run_id) AS run
FROM samples GROUP BY ALL ORDER BY task, model
"""
METRICS = f"""
SELECT task, max(n) AS n, max(accuracy) AS accuracy FROM score
WHERE method = 'arr_coc' AND question_type = '*' AND budget = {AT} GROUP BY task ORDER BY task
"""


def table(sql: str):
    def block(con, card: Path) -> str:
        names, rows = select(con, sql)
        return render(names, rows, "markdown") if rows else EMPTY

    return block


def by_method(con, card: Path) -> str:
    """Every method at the budget `AT`: accuracy on each task; best first, by its lead on the questions it answered."""
    _, rows = select(con, f"SELECT method, drops, task, accuracy FROM told WHERE budget IN ({AT}, 1)")
    _, leads = select(con, LEADS)
    if not rows:
        return EMPTY
    tasks = sorted({task for *_, task, _ in rows})
    cells = {(method, task): accuracy for method, _, task, accuracy in rows}
    drops = {method: place for method, place, *_ in rows}
    lines = [
        (m, drops[m], *(f"{cells[m, t]:.3f}" if (m, t) in cells else "" for t in tasks), n, f"{ahead:+.3f}")
        for m, n, ahead in leads
    ]
    return render(["method", "tokens drop", *tasks, "n", "against ARR-COC"], lines, "markdown")


def plots(con, card: Path) -> str:
    """Links to the plots that there are, from where the card lies."""
    titles = {
        "accuracy_tokens": "Accuracy against visual tokens, every method",
        "accuracy_latency": "Accuracy against the time of an answer, selection included",
        "speed_resolution": "Prefill against stock's, by resolution",
        "evidence_tokens": "Evidence kept, by tokens",
    }
    there = {name: text for name, text in titles.items() if (ASSETS / f"{name}.png").exists()}
    lines = [f"![{text}]({os.path.relpath(ASSETS / name, card.parent)}.png)\n" for name, text in there.items()]
    return "\n".join(lines) or EMPTY


def queries(con, card: Path) -> str:
    """The named queries and what each asks."""
    lines = []
    for path in sorted((ROOT / "benchmarks" / "dataset" / "queries").glob("*.sql")):
        lines.append(f"- `{path.stem}`: {path.read_text().splitlines()[0].removeprefix('-- ')}")
    return "\n".join(lines) + "\n"


def index(con, card: Path) -> str:
    """The card's `model-index`: ARR-COC at the budget `AT`."""
    _, rows = select(con, METRICS)
    if not rows:
        return ""
    lines = ["model-index:", "- name: arr-coc-vis", "  results:"]
    for task, n, accuracy in rows:
        lines += [
            "  - task: {type: image-text-to-text}",
            f"    dataset: {{type: {task}, name: '{task} (n = {n}), {AT:.0%} of the visual tokens'}}",
            f"    metrics: [{{type: accuracy, value: {accuracy:.4f}}}]",
        ]
    return "\n".join(lines) + "\n"


BLOCKS = {
    "headline": table(HEADLINE.replace("$$", "*")),
    "dense": table(HEADLINE.replace("$$", "stratum:dense")),
    "behaviour": table(BEHAVIOUR),
    "latency": table(LATENCY),
    "fails": table(FAILS),
    "methods": by_method,
    "evidence": table(EVIDENCE),
    "types": table(TYPES),
    "ablations": table(ABLATIONS),
    "speed": table(SPEED),
    "rows": table(ROWS),
    "queries": queries,
    "index": index,
    "plots": plots,
}
_MARKED = re.compile(r"(?P<open>^(?:<!--|#) begin results:(?P<name>\w+)[^\n]*\n)(?P<body>.*?)(?P<close>^(?:<!--|#) end results:(?P=name))", re.M | re.S)  # fmt: skip  # noqa: E501


def filled(card: str, con, path: Path) -> str:
    """The text of the card at `path` with every marked block written anew.

    Raises:
        ValueError: for a marker of an unknown name, or one that is never closed.
    """
    opened = re.findall(r"^(?:<!--|#) begin results:(\w+)", card, re.M)
    closed = [m["name"] for m in _MARKED.finditer(card)]
    if opened != closed or set(opened) - BLOCKS.keys():
        raise ValueError(f"{path.name}: markers {opened} must be of {sorted(BLOCKS)}, each with its end.")
    return _MARKED.sub(lambda m: m["open"] + BLOCKS[m["name"]](con, path) + m["close"], card)


def main(args) -> int:
    con = connect(args.data, allow_empty=True)
    stale = []
    if not args.check:
        from .plots import draw

        stale += draw(con, ASSETS)
    for path in CARDS:
        old = path.read_text()
        new = filled(old, con, path)
        if new != old:
            stale.append(path.name)
            if not args.check:
                whole.write_text(path, new)
    if args.check:
        if stale:
            raise ValueError(f"{', '.join(stale)} say what the rows do not: run `python -m benchmarks report`.")
        return 0
    print("\n".join(f"wrote {name}" for name in stale) or "nothing changed")
    return 0
