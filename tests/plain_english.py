"""Check that docs, docstrings, errors, `--help` and table heads are plain English.

A page is a Markdown file, a command's help, or a Python file's docstrings, errors or table heads. On
average its sentences have at most 18 words, and never over 35. None has a withdrawn word.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CODE = ("streamrl", "sim", "executor", "benchmarks", "examples")
DOCS = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "llms.txt", "docs/**/*.md")
# In these files every text of four words or more is part of a message: functions pass them on.
MESSAGES = re.compile(r"(streamrl/)?(runfile|doctor|(sim|executor)/(checkup|back_ends))\b")
TABLES = re.compile(r"streamrl/(cli|report|doctor)/")
MOST_MEAN, MOST_WORDS, MOST_FIRST_LINE = 18, 35, 12
BULLET = re.compile(r"\s*([-*+]|\d+[.)])\s+")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
ENTRY = re.compile(r" {4}[*\w.]+( \([^)]*\))?: ")
NO_PROSE = re.compile(r"\s*(Examples?: ?|\$ )+(streamrl|python|make|pip) |\s*(>>> |\.\.\. )")
CODE_BLOCK = re.compile(r"^(( *).*:):\n(?:\n|\2 +.*\n?)+", re.MULTILINE)
CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*(\s\"[^\"]*\")?\)")
MARKUP = re.compile(r"<?https?://[^\s)>]*[^\s)>.,;:]>?|</?\w[^>]*>|\*\*")
SENTENCE_END = re.compile(r"(?<!\.)[.!?][\"')\]]*(?=\s)(?!(?<=etc\.)\s+[a-z])")
SHORT_FORM = re.compile(r"\b(e\.g|i\.e|vs|cf|al|approx|resp|Fig|Eq|Sec|incl)\.$")
FIGURE = re.compile(r".*\d.*|[^\w`]+|[num]?s|[KMGT]i?B|min|h|to|of|x|and")
ERROR_CALL = re.compile(
    r"\w*Error|_?[Ff]inding|Failed|Disagreement|_?(warning|error|exception|complain|lose|kill)"
)
HEAD_CALL = re.compile(r"Table|TextTable|PageTable|add_column")
Values = dict[str, list[ast.AST]]  # what a name may stand for


class Sentence(NamedTuple):
    """One sentence, list item, heading or table cell, and the line on which it begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """Return the number of words; a code span or a placeholder counts as one."""
        return sum(any(c.isalnum() or c in "`{" for c in word) for word in self.text.split())


@dataclass
class Page:
    """Text that is checked as a whole."""

    area: str
    path: str
    sentences: list[Sentence]
    first_line: Sentence | None = None  # of a command's help
    violations: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Return the mean number of words in a sentence."""
        return sum(each.words for each in self.sentences) / len(self.sentences)

    def __str__(self) -> str:
        size, longest = len(self.sentences), max(each.words for each in self.sentences)
        words = f"{size:6} sentences, mean {self.mean:4.1f}, longest {longest:3}"
        return f"{words}, {len(self.violations):3} violations: {self.area} {self.path}"


def read_withdrawn() -> list[tuple[re.Pattern[str], str]]:
    """Return the withdrawn patterns, each with what to write instead."""
    text = Path(__file__).with_name("withdrawn_words.txt").read_text()
    lines = re.findall(r"(?m)^(?!#)([^\t\n]+)\t*(.*)$", text)
    return [(re.compile(pattern, re.IGNORECASE), remedy) for pattern, remedy in lines]


def check(page: Page, withdrawn: list[tuple[re.Pattern[str], str]]) -> Iterator[str]:
    """Yield a line for each violation: place, rule, text and words."""

    def line(at: Sentence, rule: str, words: float) -> str:
        return f"{page.path}:{at.line}: {rule}: {at.text} ({words:g} words)"

    if page.mean > MOST_MEAN:
        yield line(Sentence(1, f"all {page.area}"), f"mean over {MOST_MEAN}", round(page.mean, 1))
    if page.first_line and (words := page.first_line.words) > MOST_FIRST_LINE:
        yield line(page.first_line, f"help begins with over {MOST_FIRST_LINE}", words)
    for each in page.sentences:
        if each.words > MOST_WORDS:
            yield line(each, f"over {MOST_WORDS}", each.words)
        prose = re.sub(r"`[^`]*`|\{[^}]*\}", "`", each.text)
        for pattern, remedy in withdrawn:
            if match := pattern.search(prose):
                yield line(each, f"withdrawn {match.group()!r}, write {remedy!r}", each.words)


def split_sentences(text: str, line: int = 1) -> Iterator[Sentence]:
    """Yield the sentences of one block of prose: code spans as one word, links without target."""
    text = MARKUP.sub("", LINK.sub(r"\1", CODE_SPAN.sub(_as_one_word, text)))
    start = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text)), len(text)]:
        if end < len(text) and SHORT_FORM.search(text[start:end]):
            continue
        sentence = text[start:end].lstrip()
        at, start = line + text[: end - len(sentence)].count("\n"), end
        words = sentence.split()
        if not all(FIGURE.fullmatch(re.sub(r"`[^`]*`", "0", word)) for word in words):
            yield Sentence(at, " ".join(words))


def _as_one_word(match: re.Match[str]) -> str:
    return "`" + re.sub(r"\s+", "␣", match[2]).replace("|", "¦") + "`" + "\n" * match[2].count("\n")


def read_markdown(text: str, line: int = 1) -> Iterator[Sentence]:
    """Yield the sentences of Markdown: paragraphs, headings, list items and table cells."""
    block, at, fenced, in_list = list[str](), line, False, False
    text = re.sub(r"(?s)<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text)
    for number, row in enumerate([*text.split("\n"), ""], start=line):
        is_fence = row.lstrip().startswith(("```", "~~~"))
        is_indented = not block and not in_list and row.startswith("    ")
        is_prose = bool(row.strip()) and not (fenced or is_fence or is_indented)
        row = re.sub(r"^\s*>\s?", "", row)
        bullet = BULLET.match(row) if is_prose else None
        in_list = bool(bullet) or (in_list and row[:1] in {"", " "})
        alone = is_prose and row.startswith(("|", "#"))
        if not is_prose or alone or bullet:
            yield from split_sentences("\n".join(block), at)
            block = []
        fenced ^= is_fence
        if alone:
            row = CODE_SPAN.sub(_as_one_word, row.lstrip("# ")).replace("\\|", "¦")
            for cell in re.split(r"\||<br ?/?>", row):
                yield from split_sentences(cell, number)
        elif is_prose and not re.match(r"\[[^\]]+\]: ", row):
            at = at if block else number
            block.append(row[bullet.end() :] if bullet else row)


def read_docstring(text: str, line: int = 1) -> Iterator[Sentence]:
    """Yield the sentences of a Google-style docstring, without its code and formulas."""
    text = CODE_BLOCK.sub(lambda it: it[1] + "\n" * it[0].count("\n"), inspect.cleandoc(text))
    rows, in_section = text.split("\n"), False
    for place, row in enumerate(rows):
        in_section = bool(SECTION.match(row)) or (in_section and row[:1] in {"", " "})
        if NO_PROSE.match(row) or is_formula(row) or SECTION.match(row):
            rows[place] = ""
        elif in_section:
            rows[place] = ENTRY.sub("- ", row).strip()
    yield from read_markdown("\n".join(rows), line)


def is_formula(row: str) -> bool:
    """Return whether a line is an indented formula: an operator, and few words of letters."""
    terms = CODE_SPAN.sub("x", row).split()
    words = [term for term in terms if re.fullmatch(r"\(?[A-Za-z-]{3,}[).,:;]*", term)]
    return row[:2] == "  " and bool({*"=≤≥<>*/+"} & {*terms}) and len(words) * 2 < len(terms)


def texts_in(node: ast.AST, names: Values, depth: int = 3) -> Iterator[Sentence]:
    """Yield the texts within code but docstrings; a placeholder of an f-string is one word."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="justify" | "overflow" | "style"):
            return
        case ast.Constant(value=str(text)):
            yield Sentence(node.lineno, text)
        case ast.JoinedStr(values=parts):
            texts = [str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in parts]
            yield Sentence(node.lineno, "".join(texts))
            return
        case ast.Name(id=name) if depth:
            for value in names.get(name, []):
                yield from texts_in(value, names, depth - 1)
    for each in ast.iter_child_nodes(node):
        yield from texts_in(each, names, depth)


def values_of(nodes: Iterable[ast.AST]) -> Values:
    """Return what is assigned to names, what they loop over, and the bodies of functions."""
    found: Values = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).extend(node.body)
        elif value := getattr(node, "iter", None) or getattr(node, "value", None):
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                found.setdefault(getattr(target, "id", ""), []).append(value)
    return found


def called_texts(tree: ast.Module, pattern: re.Pattern[str], least: int) -> set[Sentence]:
    """Return the texts of at least so many words that calls of such names have as arguments."""
    found, seen, top = set[Sentence](), set[ast.expr](), values_of(tree.body)
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    for scope in (*functions, tree):  # outer functions come before those within them
        nodes = list(ast.walk(scope))
        calls = {each for each in nodes if pattern.fullmatch(_callee(each))}
        raised = {getattr(each, "exc", None) for each in nodes if pattern is ERROR_CALL}
        new = {each for each in calls | raised if isinstance(each, ast.expr)} - seen
        names = {**top, **values_of(nodes)} if new else top
        found |= {text for call in new for text in texts_in(call, names) if text.words >= least}
        seen |= new
    return found


def _callee(node: ast.AST) -> str:
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def help_pages() -> Iterator[Page]:
    """Yield a page for the help of `streamrl` and of each command."""
    import typer.main
    from typer.core import TyperCommand, TyperGroup

    from streamrl.cli.main import app, main

    def walk(command: object, context: typer.Context | None) -> Iterator[Page]:
        command = getattr(command, "load", lambda: command)()  # import a lazy command
        assert isinstance(command, TyperCommand | TyperGroup)
        code = inspect.unwrap(command.callback or main).__code__
        line, path = code.co_firstlineno, Path(code.co_filename).resolve().relative_to(ROOT)
        text = inspect.cleandoc(command.help or "").replace("\b", "")
        parts = [text, *(getattr(option, "help", None) or "" for option in command.params)]
        parts += [short for _, short in getattr(command, "table", {}).values()]
        sentences = [Sentence(line, each.text) for part in parts for each in read_docstring(part)]
        yield Page("help", str(path), sentences, Sentence(line, text.partition("\n")[0]))
        if isinstance(command, TyperGroup):
            inside = typer.Context(command, parent=context)
            for name in command.list_commands(inside):
                yield from walk(command.get_command(inside, name), inside)

    yield from walk(typer.main.get_command(app), None)


def file_pages(path: Path) -> Iterator[Page]:
    """Yield the pages of one file."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    if path.suffix in {".md", ".txt"}:
        yield Page("docs", name, list(read_markdown(text)))
        return
    tree = ast.parse(text, name)
    alone = [each.value for each in ast.walk(tree) if isinstance(each, ast.Expr)]
    texts = [text for it in alone if isinstance(it, ast.Constant) for text in texts_in(it, {})]
    heads = called_texts(tree, HEAD_CALL, least=1) if TABLES.match(name) else set()
    messages = called_texts(tree, ERROR_CALL, least=2)
    if MESSAGES.match(name):
        messages |= {text for text in texts_in(tree, {}) if text.words > 3}
    for area, found in (("docstrings", texts), ("errors", messages), ("table heads", heads)):
        prose = [each for line, text in sorted(found) for each in read_docstring(text, line)]
        yield Page(area, name, prose)


def read_pages(within: Iterable[Path] = ()) -> list[Page]:
    """Return the pages of these files and folders, or of all; links to folders are not followed."""
    tops = [path.resolve(strict=True) for path in within] or [ROOT]
    docs = [path for pattern in DOCS for path in ROOT.glob(pattern)]
    code = {path.resolve() for top in CODE for path in (ROOT / top).resolve().rglob("*.py")}
    files = [path for path in (*docs, *sorted(code)) if any(map(path.is_relative_to, tops))]
    pages = [page for path in files for page in file_pages(path)]
    if any(path.is_relative_to(ROOT / "streamrl/cli") for path in files):
        try:
            pages += [page for page in help_pages() if ROOT / page.path in files]
        except Exception as error:  # whatever importing a command raises
            line = f"streamrl/cli/main.py:1: help cannot be read: {error}"
            pages.append(Page("help", "no command", [Sentence(1, line)], violations=[line]))
    return [page for page in pages if page.sentences]


def main() -> int:
    """Print what breaks the rules; return 1 if anything does."""
    parser = argparse.ArgumentParser(prog="python -m tests.plain_english", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="Check only these files or folders.")
    parser.add_argument("--list", action="store_true", help="Print worst pages and violations.")
    parser.add_argument("--summary", action="store_true", help="Print a line for each area.")
    options = parser.parse_args()
    pages, withdrawn = read_pages(options.paths), read_withdrawn()
    for page in pages:
        page.violations += check(page, withdrawn)
    violations = [line for page in pages for line in page.violations]
    if options.list:
        print("Worst pages:", *sorted(pages, key=lambda page: -page.mean)[:10], sep="\n")
        print("Violations:", *violations, sep="\n")
    for area in dict.fromkeys(page.area for page in pages) if options.summary else ():
        of_area = [page for page in pages if page.area == area]
        whole = Page(area, "", [each for page in of_area for each in page.sentences])
        whole.violations = [line for page in of_area for line in page.violations]
        print(whole)
    print(f"{len(violations)} violations on {len(pages)} pages (--list prints each)")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
