"""Rules of README.md and docs/: the names in them exist, shell blocks say whether they run, and no page is left out."""

import ast
import re
from collections.abc import Iterator

from tools.rules.repository import Finding, Repository

README_WORDS = (700, 1000)
ARCHITECTURE = "docs/architecture.md"
DEFINED = r"\b(def|class|struct) {0}\b|\b{0}\(|^\s*{0}\b.* = |^\s*{0}:"  # a definition of a name


def _pages(repository: Repository) -> list[str]:
    """README.md, CONTRIBUTING.md and the pages of the site."""
    return repository.named("README.md", "CONTRIBUTING.md", "docs/*.md")


def _line(text: str, start: int) -> int:
    """The number of the line that holds a character."""
    return text.count("\n", 0, start) + 1


def _beside(page: str, place: str) -> str:
    """A path from the root, for a path that a page names relative to itself."""
    return f"{page.rpartition('/')[0] or '.'}/{place}"


def _table(repository: Repository, file: str, name: str) -> dict[str, object]:
    """The dictionary of constants that a module assigns to a name; an empty one if it does not."""
    for node in repository.tree(file).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            table: dict[str, object] = ast.literal_eval(node.value)
            return table
    return {}


def readme_is_a_front_page(repository: Repository) -> Iterator[Finding]:
    """README.md has a number of words that is typical of a front page."""
    low, high = README_WORDS
    words = len(repository.text("README.md").split())
    if not low <= words <= high:
        yield Finding("README.md", 1, f"{words} words; expected {low} to {high}")


def shell_blocks_say_whether_they_run(repository: Repository) -> Iterator[Finding]:
    """A shell block is "```shell run", or "```shell REASON" with one of the REASONS in docs/blocks.py."""
    says = {"run", *_table(repository, "docs/blocks.py", "REASONS")}
    for page in _pages(repository):
        opened = 0
        for number, line in enumerate(repository.text(page).splitlines(), 1):
            if opened:
                opened = 0 if line.strip() == "```" else opened
            elif line.startswith("```"):
                opened = number
                language, _, rest = line.removeprefix("```").partition(" ")
                if language in ("bash", "sh", "console") or (language == "shell" and rest.strip() not in says):
                    yield Finding(page, number, f"{line}: expected ```shell and one of {', '.join(sorted(says))}")
        if opened:
            yield Finding(page, opened, "this block has no end")


def links_lead_somewhere(repository: Repository) -> Iterator[Finding]:
    """A link of a page leads to a file of the repository, or to https."""
    for page in [*_pages(repository), *repository.named("lab/LOG.md")]:
        text = repository.text(page)
        for link in re.finditer(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not link[1].startswith("https://") and not repository.exists(_beside(page, link[1])):
                yield Finding(page, _line(text, link.start()), f"{link[1]} does not exist")


def files_on_pages_exist(repository: Repository) -> Iterator[Finding]:
    """Source files that a page names exist; decisions may name former ones, and names in capitals are placeholders."""
    for page in _pages(repository):
        if page.startswith("docs/decisions/"):
            continue
        text = repository.text(page)
        for place in re.finditer(r"(?:^|[\s`(])((?:pipejax|configs|tests|lab|tools)/[\w/]+\.(?:py|cc|json))\b", text):
            stem = place[1].rpartition("/")[2].partition(".")[0]
            if not stem.isupper() and not repository.exists(place[1]):
                yield Finding(page, _line(text, place.start(1)), f"{place[1]} does not exist")


def architecture_names_what_exists(repository: Repository) -> Iterator[Finding]:
    """Each row of "Where is ...?" names files that exist and names that these define."""
    text = repository.text(ARCHITECTURE)
    rows = list(re.finditer(r"^\| .*\? \| (.*) \|$", text, re.MULTILINE))
    if not rows:
        yield Finding(ARCHITECTURE, 1, "no row names where something is")
    for row in rows:
        ticked = re.findall(r"`([^`]+)`", row[1])
        places = [place.rstrip("/") for place in ticked if "/" in place]
        missing = [place for place in places if not repository.exists(place)]
        beside = [_beside(place, x) for x in ticked if re.fullmatch(r"\w+\.py", x) for place in places]
        beside += [f"{place}/__init__.py" for place in places]
        code = "".join(repository.text(place) for place in (*places, *beside) if repository.named(place))
        names = [x for x in ticked if re.fullmatch(r"\w+", x)]
        missing += [x for x in names if not re.search(DEFINED.format(x), code, re.MULTILINE)]
        for name in missing:
            yield Finding(ARCHITECTURE, _line(text, row.start()), f"{name} does not exist there")
        if not places:
            yield Finding(ARCHITECTURE, _line(text, row.start()), "the row names no file")


def results_are_on_their_page(repository: Repository) -> Iterator[Finding]:
    """The pages with results show each file of lab/benchmarks/results, but for gpu.json, and no other."""
    page, folder = "docs/speed.md", "lab/benchmarks/results/"
    text = "".join(repository.text(name) for name in (page, "docs/gpu.md", "docs/compared.md"))
    names = {name.removeprefix(folder) for name in repository.named(folder + "*.json")} - {"gpu.json"}
    shown = set(re.findall(r"^```\{results\} (.+)$", text, re.MULTILINE))
    for name in sorted(names ^ shown):
        yield Finding(page, 1, f"{name} is not shown" if name in names else f"{name} does not exist")


def every_page_is_in_the_contents(repository: Repository) -> Iterator[Finding]:
    """docs/index.md or the index of decisions lists each page."""
    contents = repository.text("docs/index.md") + repository.text("docs/decisions/index.md")
    for page in repository.named("docs/*.md"):
        name = page.removeprefix("docs/").removesuffix(".md")
        if "/" not in name and name != "index" and not re.search(rf"^{name}$", contents, re.MULTILINE):
            yield Finding(page, 1, "the page is in no table of contents")


def picture_shows_every_folder(repository: Repository) -> Iterator[Finding]:
    """docs/rooms.py draws each folder of pipejax, and `grid`, into docs/rooms.svg, and nothing else."""
    script, picture = "docs/rooms.py", repository.text("docs/rooms.svg")
    folders = {file.split("/")[1] for file in repository.named("pipejax/*/__init__.py")}
    drawn = _table(repository, script, "ROOMS")
    for name in sorted((folders | {"grid"}) ^ drawn.keys()):
        yield Finding(script, 1, f"ROOMS lacks {name}" if name in folders else f"pipejax has no {name}")
    for name in sorted(drawn):
        if f">{name}</text>" not in picture:
            yield Finding("docs/rooms.svg", 1, f"{name} is missing; run python {script}")


RULES = (
    readme_is_a_front_page,
    shell_blocks_say_whether_they_run,
    links_lead_somewhere,
    files_on_pages_exist,
    architecture_names_what_exists,
    results_are_on_their_page,
    every_page_is_in_the_contents,
    picture_shows_every_folder,
)
