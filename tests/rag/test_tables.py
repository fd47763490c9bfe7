"""Tables in text: whatever has a value is read, with the name of its column if there is one."""

from __future__ import annotations

import pytest

from cached_rag.rag.readers import load_document

COMMAS = "Row 1:\n  Name, Vorname: Meier, Max\n  Ort: Bonn\n\nRow 2:"


@pytest.mark.parametrize(
    ("name", "source", "wanted"),
    [
        ("plain.csv", "a,b\n1,2\n3,4\n", "Row 1:\n  a: 1\n  b: 2\n\nRow 2:\n  a: 3\n  b: 4"),
        ("index.csv", ",price\nvalve,10\npump,20", "Row 1:\n  valve\n  price: 10\n\nRow 2:"),
        (
            "titled.csv",
            "Prices 2026,,\n\nname,price,\nvalve,10,",
            "Prices 2026\n\nRow 1:\n  name: val",
        ),
        ("ragged.csv", 'a,b\n1,2,"with, lever"', "Row 1:\n  a: 1\n  b: 2\n  with, lever"),
        ("semicolons.csv", "a;b\n1,5;2,5\n3,5;4,5\n", "Row 1:\n  a: 1,5\n  b: 2,5\n\nRow 2:"),
        ("commas.csv", "Name, Vorname;Ort\nMeier, Max;Bonn\nKurz, Ida;Kiel\n", COMMAS),
        ("notes.csv", "a;b;c\n1;2,5;x\n2;3,5\n3;4,5\n", "Row 1:\n  a: 1\n  b: 2,5\n  c: x\n\n"),
        ("foot.csv", "a;b;c\n1;2,5;3\nOf us, 2026\nNet, in EUR\n", "Row 1:\n  a: 1\n  b: 2,5"),
        ("bare.csv", "Ventil;1,50\nPumpe;2,50\nFilter;3,50\n", "Row 1:\n  Ventil: Pumpe\n  1,50: "),
        ("bars.csv", "id|a,b|c\n1|2,5|3\n4|5,5|6\n", "Row 1:\n  id: 1\n  a,b: 2,5\n  c: 3"),
        ("quoted.csv", 'a,b\n1,"say ""x"""\n', 'Row 1:\n  a: 1\n  b: say "x"'),
        ("lines.csv", 'a,b\r\n1,"two\r\nlines"\r\n', "Row 1:\n  a: 1\n  b: two\nlines"),
        ("one.csv", "metal\ncopper\ntin\n", "Row 1:\n  metal: copper\n\nRow 2:\n  metal: tin"),
        ("blanks.csv", 'a, b, c\n1, "2, 3", 4\n', "Row 1:\n  a: 1\n  b: 2, 3\n  c: 4"),
        ("nul.csv", "a,b\n1\0,2\n", "Row 1:\n  a: 1\n  b: 2"),
        ("names.csv", "metal,colour\n", "metal\ncolour"),
        ("tabs.tsv", "a\tb\n1, 2\t3\n", "Row 1:\n  a: 1, 2\n  b: 3"),
        ("large.csv", f"a,b\n1,{'x' * 200_000}\n", "Row 1:\n  a: 1\n  b: xxx"),
    ],
)
def test_nothing_that_has_a_value_is_left_out(tmp_path, name, source, wanted):
    (tmp_path / name).write_text(source, newline="")
    found = load_document(tmp_path / name)
    assert found.text.startswith(wanted)
    assert found.title == name
