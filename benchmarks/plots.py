"""The report's plots: accuracy against tokens and latency, speed against resolution, evidence kept."""

import io
from collections import defaultdict
from functools import partial
from pathlib import Path

from . import whole
from .sql import select

INK, GREY = "#1c202c", "#9aa1ad"
COLOURS = {"arr_coc": "#e8590c", "downscale": "#0c8599", "stock": INK, "oracle": "#4c51bf", "blind": "#b35c9e"}
COLOURS |= {"downscale_latency": "#66b2bf", "random": "#8a9a5b", "arr_coc_texture": "#f2a36b"}
COLOURS |= {"fastv": "#d6336c", "visionzip": "#7048e8", "divprune": "#2f9e44", "cdpruner": "#1971c2"}
COLOURS |= {"prumerge_plus": "#a07855", "pixelprune": "#e0a800"}


def draw(con, folder: Path) -> list[str]:
    """Every plot that has rows, as PNG; the names of those that changed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GREY}
    changed = []
    with matplotlib.rc_context(style | {"svg.hashsalt": "arr-coc", "figure.dpi": 150}):
        for name, plot in PLOTS.items():
            figure = plot(con, plt)
            if figure is None:
                continue
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", metadata={"Software": None}, bbox_inches="tight")
            plt.close(figure)
            path = folder / f"{name}.png"
            if not path.exists() or path.read_bytes() != buffer.getvalue():
                whole.write(path, partial(Path.write_bytes, data=buffer.getvalue()))
                changed.append(path.name)
    return changed


def _panels(plt, titles, width=3.6):
    figure, axes = plt.subplots(1, len(titles), figsize=(width * len(titles), 3.2), squeeze=False, layout="constrained")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9, loc="left")
        axis.grid(alpha=0.25)
    return figure, axes[0]


def _lines(axis, series: dict, marker="o"):
    """Methods' lines `{method: [(x, y), ...]}`, ours on top; named ones coloured, the others grey where they have more
    than a point."""
    for method in sorted(series, key=lambda m: (m.startswith("arr_coc"), m in COLOURS, m)):
        points = sorted(series[method])
        colour = COLOURS.get(method, GREY)
        strong = method in COLOURS
        if len(points) == 1 and not strong:
            continue
        axis.plot(*zip(*points, strict=True), marker=marker, ms=3 if strong else 2, lw=2 if method == "arr_coc" else 1,
                  color=colour, alpha=1 if strong else 0.5, label=method if strong else None)  # fmt: skip


def _legend(figure, axes):
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=7, frameon=False, fontsize=8)


def accuracy_tokens(con, plt):
    """Accuracy (`level`) against tokens: a panel a task, other methods grey, stock a dashed line."""
    _, rows = select(con, "SELECT task, method, budget, accuracy FROM level ORDER BY ALL")
    rows = [r for r in rows if not r[1].startswith(("no_", "oracle_", "arr_coc_", "untrained"))]
    tasks = sorted({r[0] for r in rows})
    if not tasks:
        return None
    figure, axes = _panels(plt, tasks)
    for axis, task in zip(axes, tasks, strict=True):
        series = defaultdict(list)
        for _, method, budget, accuracy in (r for r in rows if r[0] == task):
            series[method].append((100 * budget, accuracy))
        for _, accuracy in series.pop("stock", []):
            axis.axhline(accuracy, color=INK, ls="--", lw=1, label="stock")
        _lines(axis, series)
        axis.set(xlabel="visual tokens, % of native", xscale="log", xticks=[5, 10, 20, 50], xticklabels=[5, 10, 20, 50])
        axis.minorticks_off()
    axes[0].set_ylabel("accuracy")
    _legend(figure, axes)
    return figure


def accuracy_latency(con, plt):
    """Accuracy (`level`) against mean seconds of an answer, selection included."""
    from matplotlib.ticker import LogLocator, NullFormatter

    _, rows = select(
        con,
        "SELECT task, method, seconds_mean, level.accuracy FROM told JOIN level USING (task, method, budget) "
        "ORDER BY ALL",
    )
    rows = [r for r in rows if not r[1].startswith(("no_", "oracle", "untrained"))]
    tasks = sorted({r[0] for r in rows})
    if not tasks:
        return None
    figure, axes = _panels(plt, tasks)
    for axis, task in zip(axes, tasks, strict=True):
        series = defaultdict(list)
        for _, method, seconds, accuracy in (r for r in rows if r[0] == task):
            series[method].append((1e3 * seconds, accuracy))
        _lines(axis, series)
        axis.set(xlabel="milliseconds an answer", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("accuracy")
    _legend(figure, axes)
    return figure


def speed_resolution(con, plt):
    """A prefill's time over stock's, against the image's tokens; of one resolution alone, as bars."""
    _, rows = select(
        con,
        "SELECT shape, device, batch, round(budget_tokens / native_tokens, 2), method, native_tokens, ratio_to_stock "
        "FROM timed WHERE stage = '*' ORDER BY ALL",
    )
    groups = sorted({r[:4] for r in rows if abs(r[3] - 0.2) < 0.03})
    if not groups:
        return None
    figure, axes = _panels(plt, [f"{s}, batch {b}, {share:.0%}\n{d}" for s, d, b, share in groups])
    for axis, group in zip(axes, groups, strict=True):
        series = defaultdict(list)
        for *_, method, native, ratio in (r for r in rows if r[:4] == group):
            series[method].append((native, ratio))
        if len({native for points in series.values() for native, _ in points}) == 1:
            ordered = sorted(series, key=lambda m: (-series[m][0][1], m))
            ratios = [series[m][0][1] for m in ordered]
            bars = axis.barh(ordered, ratios, color=[COLOURS.get(m, GREY) for m in ordered])
            axis.bar_label(bars, [f"{ratio:.3f}" for ratio in ratios], fontsize=7, padding=2)
            axis.set(xlabel=f"prefill of {series['stock'][0][0]} tokens, share of stock's", xlim=(0, 1.15))
            axis.tick_params(axis="y", labelsize=7)
            continue
        _lines(axis, series)
        sizes = sorted({native for points in series.values() for native, _ in points})
        shares = [0.05, 0.1, 0.2, 0.5, 1]
        axis.set(xlabel="native visual tokens", xscale="log", xticks=sizes, xticklabels=sizes)
        axis.set(ylabel="prefill, share of stock's", yscale="log", yticks=shares, yticklabels=shares)
        axis.minorticks_off()
    _legend(figure, axes)
    return figure


def evidence_tokens(con, plt):
    """Share of the evidence cells kept at scale 1, and IoU, against tokens: of questions that all of them answered."""
    _, rows = select(
        con,
        "WITH drawn AS (SELECT * FROM one WHERE evidence_boxes > 0 AND budget < 1 "
        "AND NOT starts_with(method, 'downscale') AND NOT starts_with(method, 'no_')), "
        "methods AS (SELECT task, count(DISTINCT method) AS n FROM drawn GROUP BY task), "
        "shared AS (SELECT task, sample_id FROM drawn JOIN methods USING (task) GROUP BY task, sample_id, n "
        "HAVING count(DISTINCT method) = n) "
        "SELECT method, budget, avg(evidence_recall), avg(iou) FROM drawn JOIN shared USING (task, sample_id) "
        "GROUP BY ALL ORDER BY ALL",
    )
    if not rows:
        return None
    figure, axes = _panels(plt, ["evidence cells kept at scale 1", "overlap (IoU) with the evidence"])
    for axis, column in zip(axes, (2, 3), strict=True):
        series = defaultdict(list)
        for row in rows:
            series[row[0]].append((100 * row[1], row[column]))
        _lines(axis, series)
        axis.set(xlabel="visual tokens, % of native", ylim=(0, 1.02))
    _legend(figure, axes)
    return figure


PLOTS = {
    "accuracy_tokens": accuracy_tokens,
    "accuracy_latency": accuracy_latency,
    "speed_resolution": speed_resolution,
    "evidence_tokens": evidence_tokens,
}
