"""The pages: what they show can be run or says why not, their links lead somewhere, and no config key is left out."""

import dataclasses
import re
from pathlib import Path

import blocks
import pytest
import reference
import rooms

import pipejax
from pipejax import config

ROOT = Path(__file__).resolve().parent.parent
PAGES = blocks.pages()
SECTIONS = [field.name for field in dataclasses.fields(config.Config) if not field.metadata]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_is_a_front_page() -> None:
    assert 700 <= len((ROOT / "README.md").read_text().split()) <= 1000


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_shell_blocks_are_run_or_say_why_not(page: Path) -> None:
    fences = re.findall(r"^```(?:shell|bash|sh|console)", page.read_text(), re.MULTILINE)
    found = list(blocks.blocks(page))
    assert len([block for block in found if block.shown]) == len(fences)
    assert all(block.says == "run" or block.says in blocks.REASONS for block in found)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "lab" / "LOG.md"], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    if page.parent.name == "decisions":
        return  # they tell of what was, too
    places = re.findall(r"(?:^|[\s`(])((?:pipejax|configs|tests|lab)/[\w/]+\.(?:py|cc|json))\b", page.read_text())
    assert not [place for place in places if not Path(place).stem.isupper() and not (ROOT / place).exists()]


def test_what_the_architecture_says_where_to_find_is_there() -> None:
    rows = re.findall(r"^\| .*\? \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) > 12
    for row in rows:
        ticked = re.findall(r"`([^`]+)`", row)
        places = [ROOT / x for x in ticked if "/" in x]
        assert places and all(place.exists() for place in places), row
        beside = [place.parent / x for x in ticked if re.fullmatch(r"\w+\.py", x) for place in places]
        beside += [place / x for x in ticked if x == "__init__.py" for place in places]
        text = "".join(file.read_text() for file in (*places, *beside) if file.is_file())
        names = [x for x in ticked if re.fullmatch(r"\w+", x)]
        defined = r"\b(def|class|struct) {0}\b|\b{0}\(|^\s*{0}\b.* = |^\s*{0}:"
        assert not [x for x in names if not re.search(defined.format(x), text, re.MULTILINE)], row


def test_speed_page_has_every_result_file() -> None:
    text = (ROOT / "docs" / "speed.md").read_text()
    names = {path.name for path in (ROOT / "lab" / "benchmarks" / "results").glob("*.json")} - {"gpu.json"}
    assert set(re.findall(r"^```\{results\} (.+)$", text, re.MULTILINE)) == names and "```{gpu-results}" in text


def test_every_page_is_in_the_contents() -> None:
    text = (ROOT / "docs" / "index.md").read_text() + (ROOT / "docs" / "decisions" / "index.md").read_text()
    top = [page.stem for page in PAGES if page.parent == ROOT / "docs" and page.stem != "index"]
    assert not [page for page in top if not re.search(rf"^{page}$", text, re.MULTILINE)]


def test_the_runner_finds_shown_and_hidden_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("words\n\n```shell run\ntrue\n```\n\n<!-- run\nls\n-->\n\n```shell gpu\nfalse\n```\n")
    assert [tuple(block) for block in blocks.blocks(page)] == [
        ("page.md:3", "run", "true\n", True),
        ("page.md:7", "run", "ls\n", False),
        ("page.md:11", "gpu", "false\n", True),
    ]


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_the_config_reference_has_every_key(section: str) -> None:
    prefix = f"{section}." if section else ""
    keys = [prefix + field.name for field in dataclasses.fields(reference.section(section))] if section else ["name"]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", reference.table(section), re.MULTILINE))
    assert set(keys) <= set(rows)
    assert all(row.rpartition("| ")[2].strip() for row in rows.values()), "a key without a comment beside it"
    page = (ROOT / "docs" / "config-reference.md").read_text()
    assert f"```{{config-section}} {section}".rstrip() + "\n" in page


def test_the_api_reference_has_every_public_name() -> None:
    text = reference.public_names()
    found = re.findall(r"^\.\. auto(\w+):: pipejax\.(\w+)$", text, re.MULTILINE)
    assert sorted(name for _, name in found) == sorted(pipejax.__all__)
    assert sorted(pipejax.__all__) == [name for name in dir(pipejax) if not name.startswith("__")]
    kinds = {"load": "function", "Backbone": "class", "Method": "class", "UserError": "exception", "testing": "module"}
    assert kinds.items() <= {name: kind for kind, name in found}.items()
    page = (ROOT / "docs" / "api.md").read_text()
    assert "```{public-names}\n" in page
    assert not {*re.findall(r":: pipejax\.(\w+)$", page, re.MULTILINE)} & {*pipejax.__all__}, "described twice"


@pytest.mark.parametrize("name", reference.OPTIONS)
def test_members_that_the_api_reference_names_exist(name: str) -> None:
    listed = [line.removeprefix(":members:") for line in reference.OPTIONS[name] if line.startswith(":members:")]
    assert all(hasattr(getattr(pipejax, name), member) for line in listed for member in re.findall(r"\w+", line))


def test_a_row_of_the_config_reference() -> None:
    assert "| `train.dropout` | `0.1` | a number, at least 0, less than 1 | " in reference.table("train")
    assert "| `grid.delay` | `1` | a whole number, at least 0, at most 2^15 | " in reference.table("grid")
    assert '| `grid.row_names` | none | a list of texts, such as ["date:", "party:"] | ' in reference.table("grid")
    assert "| `data.separator` | `' ; '` | text | " in reference.table("data")
    assert "| `train.tensorboard` | `false` | true or false | " in reference.table("train")


def test_the_picture_shows_every_room() -> None:
    packages = {path.name for path in (ROOT / "pipejax").iterdir() if (path / "__init__.py").exists()}
    assert packages | {"grid"} == set(rooms.ROOMS)
    assert all(f">{room}</text>" in (ROOT / "docs" / "rooms.svg").read_text() for room in rooms.ROOMS)


def test_the_picture_leaves_out_what_follows() -> None:
    edges: dict[str, set[str]] = {"a": {"b", "c", "system"}, "b": {"c"}, "c": set(), "system": set()}
    assert rooms.needed(edges) == [("a", "b"), ("b", "c")]
