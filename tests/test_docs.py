"""Programs in docs/: the runner of shell blocks, the reference of keys and public names, the picture of folders."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import blocks
import pytest
import reference
import rooms

import pipejax
from pipejax import config
from pipejax.testing import BACKBONE_REQUIREMENTS, METHOD_REQUIREMENTS

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = [field.name for field in dataclasses.fields(config.Config) if field.name not in config.SETTINGS]


def test_runner_finds_shown_and_hidden_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("words\n\n```shell run\ntrue\n```\n\n<!-- run\nls\n-->\n\n```shell gpu\nfalse\n```\n")
    assert [tuple(block) for block in blocks.blocks(page)] == [
        ("page.md:3", "run", "true\n", True),
        ("page.md:7", "run", "ls\n", False),
        ("page.md:11", "gpu", "false\n", True),
    ]


def test_config_reference_has_every_key() -> None:
    page = (ROOT / "docs" / "config-reference.md").read_text()
    for section in ["", *SECTIONS]:
        prefix = f"{section}." if section else ""
        fields = dataclasses.fields(reference.section(section)) if section else ()
        rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", reference.table(section), re.MULTILINE))
        assert {prefix + field.name for field in fields} | ({"name"} if not section else set()) <= set(rows)
        without_comment = [key for key, row in rows.items() if not row.rpartition("| ")[2].strip()]
        assert not without_comment
        assert f"```{{config-section}} {section}".rstrip() + "\n" in page, section


def test_api_reference_has_every_public_name() -> None:
    text = reference.public_names()
    found = re.findall(r"^\.\. auto(\w+):: pipejax\.(\w+)$", text, re.MULTILINE)
    assert sorted(name for _, name in found) == sorted(pipejax.__all__)
    assert sorted(pipejax.__all__) == [name for name in dir(pipejax) if not name.startswith("__")]
    kinds = {"load": "function", "Backbone": "class", "Method": "class", "UserError": "exception", "testing": "module"}
    assert kinds.items() <= {name: kind for kind, name in found}.items()
    page = (ROOT / "docs" / "api.md").read_text()
    assert "```{public-names}\n" in page
    assert not {*re.findall(r":: pipejax\.(\w+)$", page, re.MULTILINE)} & {*pipejax.__all__}, "described twice"


@pytest.mark.parametrize("piece, table", [("method", METHOD_REQUIREMENTS), ("backbone", BACKBONE_REQUIREMENTS)])
def test_rules_of_checks_are_listed(piece: str, table: Any) -> None:
    found = re.findall(r"^- \*\*(.+?)\*\*: ([^\n]+\.)$", reference.requirements(piece), re.MULTILINE)
    assert found == [(requirement.name, requirement.text) for requirement in table] and len(dict(found)) == len(found)
    assert (
        f"```{{requirements}} {piece}\n```\n"
        in (ROOT / "docs" / {"method": "methods.md", "backbone": "backbones.md"}[piece]).read_text()
    )


def test_members_in_the_api_reference_exist() -> None:
    for name, lines in reference.OPTIONS.items():
        listed = [line.removeprefix(":members:") for line in lines if line.startswith(":members:")]
        members = re.findall(r"\w+", " ".join(listed))
        assert [member for member in members if not hasattr(getattr(pipejax, name), member)] == [], name


def test_config_reference_gives_default_range_and_comment() -> None:
    assert "| `train.dropout` | `0.1` | a number, at least 0, less than 1 | " in reference.table("train")
    assert "| `grid.delay` | `1` | a whole number, at least 0, at most 2^15 | " in reference.table("grid")
    assert '| `grid.row_names` | none | a list of texts, such as ["date:", "party:"] | ' in reference.table("grid")
    assert "| `data.separator` | `' ; '` | text | " in reference.table("data")
    assert "| `train.tensorboard` | `false` | true or false | " in reference.table("train")


def test_picture_omits_arrows_that_follow_from_others() -> None:
    edges: dict[str, set[str]] = {"a": {"b", "c", "system"}, "b": {"c"}, "c": set(), "system": set()}
    assert rooms.needed(edges) == [("a", "b"), ("b", "c")]
