"""The app's Results tab: the benchmark's plots, and a box for SQL over its rows that strangers may use.

A statement reads and nothing else: one SELECT, on a database in memory that reaches no file and no network, within a
time and a number of rows.
"""

import tempfile
import threading
from pathlib import Path

import duckdb

from arr_coc.answering import Refused
from benchmarks import schema, sql

SECONDS, ROWS, CHARACTERS = 5.0, 200, 4000
ABSENT = (
    "There are no benchmark results here yet. python -m benchmarks run, then collect, write them to "
    "benchmarks/dataset; start the app again and they appear."
)


def open_results(data: str | Path, revision: str | None = None):
    """The locked database, or None where there are no rows to show."""
    try:
        con = sql.connect(data, revision, allow_empty=True, memory="512MB")
    except schema.Unreadable as error:
        print(f"results: {error}")
        return None
    return con if any(con.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in schema.SCHEMAS) else None


def measured(con) -> str:
    """What the rows tell of, in a sentence."""
    if con is None:
        return ABSENT
    answers, models = con.execute(
        "SELECT (SELECT count(*) FROM samples), (SELECT string_agg(DISTINCT model, ', ') FROM summary)"
    ).fetchone()
    return f"{answers:,} answers of {models or 'no model'}, every method asked the same questions."


def queries() -> dict[str, str]:
    """The named queries, by what they show."""
    return {path.stem.replace("_", " "): path.read_text() for path in sorted(sql.QUERIES.glob("*.sql"))}


def plots(con) -> list[Path]:
    """The report's plots of these rows, as PNG files."""
    from benchmarks.plots import draw

    folder = Path(tempfile.mkdtemp(prefix="arr_coc_plots_"))
    draw(con, folder)
    return sorted(folder.glob("*.png"))


def select(con, text: str) -> tuple[list[str], list[tuple], str]:
    """One SELECT's columns, at most `ROWS` rows, and a remark.

    Raises:
        Refused: in plain words for anything but one SELECT that ends in time.
    """
    if con is None:
        raise Refused(ABSENT)
    text = (text or "").strip()
    if not text:
        raise Refused("There is no SQL yet: write a SELECT, or take a named query.")
    if len(text) > CHARACTERS:
        raise Refused(f"The SQL has {len(text):,} characters, more than {CHARACTERS:,}: make it shorter.")
    cursor = con.cursor()
    late = threading.Event()

    def stop():
        late.set()
        cursor.interrupt()

    timer = threading.Timer(SECONDS, stop)
    timer.start()
    try:
        statements = cursor.extract_statements(text)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise Refused("Only one SELECT at a time: nothing can be changed here, and no setting or file be reached.")
        result = cursor.execute(statements[0])
        names = [column[0] for column in result.description]
        rows = result.fetchmany(ROWS + 1)
    except duckdb.Error as error:
        if late.is_set():
            raise Refused(f"The query took longer than {SECONDS:.0f} seconds and was stopped: ask for less.") from None
        raise Refused(_plainly(error)) from None
    finally:
        timer.cancel()
        cursor.close()
    more = len(rows) > ROWS
    return names, rows[:ROWS], f"the first {ROWS} rows" if more else f"{len(rows)} row{'s' * (len(rows) != 1)}"


def _plainly(error: duckdb.Error) -> str:
    if isinstance(error, duckdb.PermissionException):
        return "This box reads only the four tables: no files, no network, no settings."
    if isinstance(error, duckdb.OutOfMemoryException):
        return "The query needs more memory than it may have: ask for less."
    return f"This SQL does not run: {str(error).splitlines()[0]}"
