"""The command line: what it prints and draws, and what it says to input that it cannot use."""

import json
import struct
import zlib

import pytest
from PIL import Image

from arr_coc.__main__ import Refused, main, open_image, parse_budget


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo with spaces é.png"
    image = Image.effect_noise((200, 136), 60).convert("RGB")
    image.save(path)
    return path


def test_prints_both_answers_and_writes_the_picture(folder, photo, tmp_path, capsys):
    out = tmp_path / "where.png"
    arguments = [
        str(photo),
        "What is this?",
        "--model",
        str(folder),
        "--budget",
        "0.5",
        "--out",
        str(out),
        "--no-warm-up",
    ]
    assert main([*arguments, "--max-new-tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert "stock" in said and "ARR-COC" in said and "glance" in said
    assert Image.open(out).size[0] > 500
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_json_counts_tokens_and_stages(folder, photo, tmp_path, capsys):
    out = tmp_path / "where.jpg"
    arguments = [
        str(photo),
        "What is this?",
        "--model",
        str(folder),
        "--budget",
        "6",
        "--out",
        str(out),
        "--no-warm-up",
    ]
    assert main([*arguments, "--max-new-tokens", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stock"]["tokens"] == 24  # 200 x 136 px is resized to 6 x 4 cells
    assert 4 <= report["arr_coc"]["tokens"] <= 6
    seconds = report["arr_coc"]["seconds"]
    assert {"texture", "glance", "knowing", "balancing", "attending", "language", "total"} <= seconds.keys()
    assert sum(v for k, v in seconds.items() if k != "total") == pytest.approx(seconds["total"])


@pytest.mark.parametrize(
    ("typed", "budget"), [("200", 200), ("0.2", 0.2), ("1.0", 1.0), ("1", 1), ("auto", "auto"), ("all", "all")]
)
def test_budgets_as_typed(typed, budget):
    parsed = parse_budget(typed)
    assert parsed == budget and type(parsed) is type(budget)


@pytest.mark.parametrize("typed", ["0", "-3", "1.5", "many", "nan", "", "1e9x"])
def test_a_wrong_budget_is_named(typed):
    with pytest.raises(Refused, match="--budget.*is not a budget"):
        parse_budget(typed)


def damaged(path, kind):
    if kind == "missing":
        return path / "nothing.png"
    if kind == "folder":
        return path
    target = path / f"{kind}.png"
    if kind == "text":
        target.write_text("not an image")
    elif kind == "truncated":
        Image.effect_noise((300, 300), 80).save(target)
        target.write_bytes(target.read_bytes()[:2000])
    else:  # a header that promises 100 gigapixels, and nothing behind it
        header = struct.pack(">IIBBBBB", 316_000, 316_000, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
        parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
        target.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return target


@pytest.mark.parametrize(
    ("kind", "mend"),
    [
        ("missing", "give the path of an image"),
        ("folder", "give the path of an image"),
        ("text", "not an image"),
        ("truncated", "damaged"),
        ("gigantic", "make it smaller"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_with_the_mend(kind, mend, tmp_path, capsys):
    path = damaged(tmp_path, kind)
    assert main([str(path), "What is this?", "--out", str(tmp_path / "x.png")]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and mend in said and len(said.splitlines()) == 1
    assert not (tmp_path / "x.png").exists()


def test_an_image_stands_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned a quarter
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (20, 40)


def test_other_wrong_arguments(photo, tmp_path, capsys):
    assert main([str(photo), "  "]) == 2
    assert "question is empty" in capsys.readouterr().err
    assert main([str(photo), "What?", "--out", str(tmp_path / "no" / "x.png")]) == 2
    assert "folder that exists" in capsys.readouterr().err
    assert main([str(photo), "What?", "--model", str(tmp_path), "--out", str(tmp_path / "x.png")]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
