"""The checker of plain English: how it splits text into sentences, and each of its rules."""

import ast
import re
import sys

import pytest

from tests import plain_english
from tests.plain_english import (
    ERROR_CALL,
    HEAD_CALL,
    ROOT,
    Page,
    Sentence,
    called_texts,
    check,
    file_pages,
    read_docstring,
    read_markdown,
    read_pages,
    read_withdrawn,
    split_sentences,
)


def texts(sentences):
    return [each.text for each in sentences]


def page_of(*sentences, **settings):
    return Page(
        "docs", "page.md", [Sentence(n, text) for n, text in enumerate(sentences, 1)], **settings
    )


def test_sentences_end_at_full_stops_and_not_at_colons_or_short_forms():
    text = (
        "Stop (e.g. here); go on: yes. vLLM runs! Is 0.5 left? Prompts, tokens, etc. are counted."
    )
    assert texts(split_sentences(text)) == [
        "Stop (e.g. here); go on: yes.",
        "vLLM runs!",
        "Is 0.5 left?",
        "Prompts, tokens, etc. are counted.",
    ]


def test_each_sentence_has_the_line_on_which_it_begins():
    text = "One is\nhere. Two\nis `a\nb` here.\nThree is there."
    assert [each.line for each in split_sentences(text, line=10)] == [10, 11, 14]


def test_code_spans_are_one_word_and_targets_of_links_none():
    sentence = next(
        split_sentences(
            'Set `a = 1. B` in [the file](docs/a.md "the title") (https://x.y/z - now).'
        )
    )
    assert sentence.words == 6


def test_markdown_is_split_at_headings_items_cells_and_empty_lines_without_code():
    text = """# A heading
A paragraph
on two lines.
- an item
  of two lines
1. another

    code is after an item, so this is prose

| key | what `a|b` does |
|---|---:|
| 12.5 % | first<br>second |

> a quote

```
no prose here
```

    no prose either
<!-- a comment
here --> The end
"""
    assert [(each.line, each.text) for each in read_markdown(text)] == [
        (1, "A heading"),
        (2, "A paragraph on two lines."),
        (4, "an item of two lines"),
        (6, "another"),
        (8, "code is after an item, so this is prose"),
        (10, "key"),
        (10, "what `a¦b` does"),
        (12, "first"),
        (12, "second"),
        (14, "a quote"),
        (22, "The end"),
    ]


def test_docstrings_lose_code_and_formulas_and_split_entries():
    text = """Return the time.

    It is a sum::

        seconds = tokens / rate
        and more code

    with a formula

      t = a * n + b

    Args:
        tokens: of a step,
            all of them.
        rate (float): tokens a second.

    Returns:
        Seconds of one step.

    >>> time(1, 2)
    Example: streamrl simulate run.toml
    """
    assert texts(read_docstring(text)) == [
        "Return the time.",
        "It is a sum:",
        "with a formula",
        "of a step, all of them.",
        "tokens a second.",
        "Seconds of one step.",
    ]


SOURCE = '''"""A module."""

HINT = "write another value"

def fail(key, value):
    text = (
        f"{key} must be small, "
        f"got {value + 1}"
    )
    if value:
        raise ValueError(f"{key} is wrong: {HINT}")
    print("This is no error")
    return Finding("a-name", text)

def lay_out():
    for title in ("first head", "second head"):
        table.add_column(title, style="no head", justify="right")
'''


def test_errors_are_texts_of_raised_and_named_calls_with_placeholders_as_words():
    found = called_texts(ast.parse(SOURCE), ERROR_CALL, least=2)
    assert found == {(7, "{…} must be small, got {…}"), (11, "{…} is wrong: {…}")}
    assert max(each.words for each in found) == 6


def test_constants_and_helpers_that_errors_are_made_of_are_read():
    tree = ast.parse(
        'HINT = "write another value"\n'
        "def text_of(key):\n    return f'{key} is not known here'\n"
        "def fail(key):\n    raise ValueError(text_of(key), HINT)\n"
    )
    assert texts(sorted(called_texts(tree, ERROR_CALL, least=2))) == [
        "write another value",
        "{…} is not known here",
    ]


def test_table_heads_are_read_through_loops():
    assert texts(sorted(called_texts(ast.parse(SOURCE), HEAD_CALL, least=1))) == [
        "first head",
        "second head",
    ]


def test_a_python_file_has_docstrings_below_fields_and_no_ellipsis(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        'class A:\n    x: int\n    """Most steps."""\n    ...\nprint("no docstring")\n'
    )
    docstrings, errors, heads = file_pages(tmp_path / "a.py")
    assert docstrings.sentences == [(3, "Most steps.")]
    assert errors.sentences == heads.sentences == []


@pytest.mark.parametrize(("words", "num_violations"), [(35, 0), (36, 1)])
def test_no_sentence_has_over_35_words(words, num_violations):
    page = page_of("word " * words, *["short"] * 3)
    found = list(check(page, []))
    assert len(found) == num_violations
    assert all(re.match(r"page.md:1: over 35: .*\(36 words\)$", each) for each in found)


@pytest.mark.parametrize(("words", "num_violations"), [(18, 0), (19, 1)])
def test_the_mean_of_a_page_is_at_most_18_words(words, num_violations):
    found = list(check(page_of("word " * (words - 1), "word " * (words + 1)), []))
    assert len(found) == num_violations
    assert all(each.startswith("page.md:1: mean over 18: ") for each in found)


@pytest.mark.parametrize(("words", "num_violations"), [(12, 0), (13, 1)])
def test_help_begins_with_at_most_12_words(words, num_violations):
    page = page_of("short", first_line=Sentence(7, "word " * words))
    found = list(check(page, []))
    assert len(found) == num_violations
    assert all(each.startswith("page.md:7: help begins with over 12: ") for each in found)


def test_withdrawn_words_are_found_in_any_case_and_not_in_code():
    withdrawn = read_withdrawn()
    page = page_of(
        "Nurseries start it.", "The `prefork_server` and {prefork_server} start it.", "Nurse it."
    )
    (found,) = check(page, withdrawn)
    assert found.startswith("page.md:1: withdrawn 'Nurseries', write 'prefork server': ")


def test_every_withdrawn_pattern_has_a_remedy():
    withdrawn = read_withdrawn()
    assert len(withdrawn) > 10
    assert all(remedy for _, remedy in withdrawn)


def test_pages_of_help_belong_to_the_files_of_their_commands():
    pages = [page for page in read_pages([ROOT / "streamrl/cli"]) if page.area == "help"]
    by_path = {page.path: page for page in pages}
    assert {"streamrl/cli/main.py", "streamrl/cli/plan.py", "streamrl/cli/ranker.py"} <= set(
        by_path
    )
    assert all(page.first_line and page.first_line.words for page in pages)
    assert len(by_path["streamrl/cli/simulate.py"].sentences) > 10


def test_paths_restrict_what_is_read_and_each_file_is_read_once():
    pages = read_pages([ROOT / "README.md", ROOT / "sim"])
    read = [(page.area, page.path) for page in pages]
    assert ("docs", "README.md") in read
    assert len(read) == len(set(read)) > 10
    assert all(path == "README.md" or "sim/" in path for _, path in read)


def test_a_path_that_does_not_exist_is_refused():
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        read_pages([ROOT / "no-such-file.md"])


def test_help_that_cannot_be_read_is_a_violation(monkeypatch):
    def fail():
        raise ImportError("no module")
        yield

    monkeypatch.setattr(plain_english, "help_pages", fail)
    pages = read_pages([ROOT / "streamrl/cli/main.py"])
    (line,) = [line for page in pages for line in page.violations]
    assert line == "streamrl/cli/main.py:1: help cannot be read: no module"


@pytest.mark.parametrize(("text", "status"), [("Short text.", 0), ("word " * 36, 1)])
def test_the_exit_status_says_whether_anything_breaks_a_rule(
    text, status, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(text)
    monkeypatch.setattr(sys, "argv", ["plain_english", "--list", "--summary"])
    assert plain_english.main() == status
    printed = capsys.readouterr().out
    assert ("README.md:1: over 35: word" in printed) == bool(status)
    assert "     1 sentences, mean" in printed
