"""DuckDB over the results: local Parquet or a revision of the dataset on the Hub.

The rows are copied into memory and then the database is locked: a statement can reach no file, no network, no extension
and no setting, so `connect` may be exposed to strangers.
"""

import sys
from pathlib import Path

import duckdb

from . import schema

# What the cards speak of: of each task the run with most answers, so that every comparison is within one run.
VIEWS = """
CREATE VIEW speaks AS SELECT task, arg_max(run_id, (n, run_id)) AS run_id
    FROM (SELECT task, run_id, count(*) AS n FROM samples GROUP BY ALL) GROUP BY task;
CREATE VIEW score AS SELECT summary.* FROM summary JOIN speaks USING (task, run_id);
CREATE VIEW told AS SELECT runs.* FROM runs JOIN speaks USING (task, run_id);
CREATE VIEW one AS SELECT samples.* FROM samples JOIN speaks USING (task, run_id);
CREATE VIEW versus AS  -- beside each answer ARR-COC's to the same question; beside stock's, that at each budget
    SELECT one.*, ours.score AS ours, ours.budget AS our_budget FROM one JOIN one AS ours USING (task, sample_id)
    WHERE ours.method = 'arr_coc' AND (ours.budget = one.budget OR one.method = 'stock');
CREATE VIEW level AS  -- accuracies that compare: ARR-COC's on all its questions, and the difference where both answered
    SELECT versus.task, versus.method, versus.budget, avg(ours.accuracy + versus.score - versus.ours) AS accuracy
    FROM versus JOIN score AS ours ON ours.task = versus.task AND ours.budget = versus.our_budget
    WHERE ours.method = 'arr_coc' AND ours.question_type = '*' GROUP BY ALL;
CREATE VIEW timed AS SELECT * FROM speed
    QUALIFY run_id = max(run_id) OVER (PARTITION BY shape, device, batch, native_tokens, budget_tokens);
"""

QUERIES = Path(__file__).resolve().parent / "dataset" / "queries"


def connect(
    data: str | Path, revision: str | None = None, allow_empty: bool = False, memory: str = "2GB"
) -> duckdb.DuckDBPyConnection:
    """A locked in-memory database with the tables `runs`, `samples`, `summary` and `speed`, and `VIEWS`.

    Raises:
        schema.Unreadable: for a truncated or foreign file, named; none is skipped.
    """
    folder = Path(data)
    if not folder.is_dir():
        folder = _snapshot(str(data), revision)
    con = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
    for config, paths in schema.files(folder, allow_empty).items():
        columns = ", ".join(f'"{name}" {_TYPES[str(f.dtype)]}' for name, f in schema.SCHEMAS[config].items())
        con.execute(f"CREATE TABLE {config} ({columns})")
        for path in paths:
            try:
                con.execute(f"INSERT INTO {config} BY NAME SELECT * FROM read_parquet(?)", [str(path)])
            except duckdb.Error as error:
                raise schema.Unreadable(f"{path} cannot be read ({error}): restore or remove it.") from error
    con.execute(VIEWS)
    con.execute(f"SET memory_limit='{memory}'")
    con.execute("SET temp_directory=''")  # a query too large for memory fails, it does not fill the disk
    con.execute("SET enable_external_access=false")
    con.execute("SET lock_configuration=true")
    return con


_TYPES = {"string": "VARCHAR", "int64": "BIGINT", "float64": "DOUBLE", "bool": "BOOLEAN"}


def _snapshot(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [f"{config}/*.parquet" for config in schema.SCHEMAS]
    try:
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except Exception as error:  # the Hub's own errors and the network's have no common ancestor
        raise schema.Unreadable(f"--data {repo} is no folder, and no dataset that can be fetched ({error}).") from error


def named_query(name: str) -> str:
    """The text of `queries/<name>.sql`.

    Raises:
        ValueError: for an unknown name, listing those that exist.
    """
    known = {path.stem: path for path in sorted(QUERIES.glob("*.sql"))}
    if name not in known:
        raise ValueError(f"unknown query {name}: there are {', '.join(known)}.")
    return known[name].read_text()


def select(con, sql: str) -> tuple[list[str], list[tuple]]:
    """Column names and rows of one statement.

    Raises:
        ValueError: with DuckDB's own words where it does not run.
    """
    try:
        result = con.execute(sql)
        return [d[0] for d in result.description or ()], result.fetchall() if result.description else []
    except duckdb.Error as error:
        raise ValueError(f"this SQL does not run: {error}") from error


def text(value) -> str:
    """As it is shown: three decimals at most, nothing for NULL."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def render(names: list[str], rows: list[tuple], form: str) -> str:
    """Rows as an aligned table, CSV (RFC 4180, full precision) or a Markdown table."""
    if form == "csv":
        import csv
        import io

        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([names, *rows])
        return out.getvalue()
    cells = [names, *[[text(v) for v in row] for row in rows]]
    if form == "markdown":
        cells = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in cells]
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        return "\n".join([lines[0], "|" + " --- |" * len(names), *lines[1:]]) + "\n"
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    right = [
        bool(rows) and all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(names))
    ]
    return "".join(
        "  ".join(c.rjust(n) if r else c.ljust(n) for c, n, r in zip(row, widths, right, strict=True)).rstrip() + "\n"
        for row in cells
    )


def main(args) -> int:
    if bool(args.sql) == bool(args.query):
        raise ValueError("give a SELECT or --query NAME, one of them.")
    sql = named_query(args.query) if args.query else args.sql
    sys.stdout.write(render(*select(connect(args.data, args.revision), sql), args.format))
    return 0
