"""Tests of what the first rows of a CSV file tell: its delimiter, and whether it has a header."""

from __future__ import annotations

import pytest

from trainer.sources.csv_files import has_header, split_rows

#: The first rows of files -> whether the first one is a header.
HEADERS = {
    "user_id,age\nu1,30\nu2,20\n": True,
    "u1,30\nu2,20\nu3,25\n": False,
    "source,target\n0,1\n0,2\n": True,
    "0,1\n0,2\n1,2\n": False,
    "0,1,2\n1,2,7\n": False,
    "5,5\n1,2\n": False,
    "0 1\n0 2\n": False,
    "u1,i7\nu1,i9\nu2,i7\n": False,
    "who,what\nu1,i7\nu1,i9\n": True,
    "name,city\nann,rome\nbob,oslo\n": True,
    "ann,rome\nbob,oslo\ncid,rome\n": False,
    "id\na\nb\n": True,
    "7\n8\n9\n": False,
    "id\n7\n": True,
    ",0,1,2,3\n0,0.5,0.1,2.0,1.0\n1,0.5,0.1,2.0,1.0\n": True,
    "id,0,1,2,3\nu1,0.5,0.1,2.0,1.0\nu2,0.5,0.1,2.0,1.0\n": True,
    "country,2019,2020\nAT,5,6\nDE,7,8\n": True,
    "ann,30\nbob,41\n": False,
    "AT,5,6\nDE,7,8\n": False,
    "day,n\n2024-01-01,3\n": True,
    "2024-01-01,3\n2024-01-02,4\n": False,
    "key\n123e4567-e89b-12d3-a456-426614174000\n": True,
    "123e4567-e89b-12d3-a456-426614174001\n123e4567-e89b-12d3-a456-426614174000\n": False,
    "u1,,NA\nu2,3,\n": False,
    "q1,q2\na1,b2\nc3,d4\n": True,
    "sku,price\n": True,
    "7,1.5\n": False,
    "": False,
}


@pytest.mark.parametrize("text", HEADERS)
def test_the_first_row_is_names_or_values(text: str) -> None:
    _, rows = split_rows(text.splitlines(keepends=True), " " if " " in text else None)
    assert has_header(rows) is HEADERS[text]


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ("a,b\n1,2\n", ","),
        ("a;b\n1,5;2,5\n", ";"),
        ("a\tb\n1,x,y\t2\n", "\t"),
        ("a|b\n1|2\n", "|"),
        ('a,"b;c",d\n1,"2;3",4\n', ","),
        ("id\nx\n", ","),
        ("", ","),
    ],
)
def test_the_delimiter_is_the_one_that_most_rows_have_in_common(text: str, delimiter: str) -> None:
    assert split_rows(text.splitlines(keepends=True), None)[0] == delimiter
