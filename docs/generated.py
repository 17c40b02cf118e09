"""Sphinx extension: what the pages take from the code when the site is built, so that it cannot grow old.

It adds these directives:

    config-section: every key of a section, with its range, its default, and the comment beside it in the schema
    public-names: what `import pipejax` gives, by autodoc
    requirements: the rules by which `pipejax.testing` checks a method or a backbone
    command-help: what a command says of itself
    results: the table of a file in lab/benchmarks/results
    gpu-results: the tables of what lab/benchmarks/gpu.sh measured, or a line that there are none
    faults: the table of docs/reliability.json
    executed: code that is run, in one session for each page, with what it prints below it
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import blocks
import reference
import results
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import pipejax
from lab.benchmarks import gpu_tables
from lab.faults import __main__ as faults
from pipejax import testing
from pipejax.config import sections


class ConfigSection(SphinxDirective):
    """A table of the keys of a section of the config; the argument "" stands for those above all sections."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table."""
        self.env.note_dependency(reference.__file__)
        self.env.note_dependency(sections.__file__)
        return self.parse_text_to_nodes(reference.table(self.arguments[0] if self.arguments else ""))


class PublicNames(SphinxDirective):
    """The public names of pipejax, each with its signature and description."""

    def run(self) -> list[nodes.Node]:
        """The descriptions."""
        self.env.note_dependency(reference.__file__)
        self.env.note_dependency(pipejax.__file__)
        return self.parse_text_to_nodes(reference.public_names())


class Requirements(SphinxDirective):
    """The rules by which `pipejax.testing` checks a piece; the argument is "method" or "backbone"."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The list."""
        self.env.note_dependency(reference.__file__)
        self.env.note_dependency(testing.methods.__file__)
        self.env.note_dependency(testing.backbones.__file__)
        return self.parse_text_to_nodes(reference.requirements(self.arguments[0]))


class CommandHelp(SphinxDirective):
    """What `pipejax COMMAND --help` prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The text; another one whenever the command has changed, which only a new run can tell."""
        self.env.note_reread()
        command = [sys.executable, "-m", "pipejax", *self.arguments[0].split(), "--help"]
        done = subprocess.run(
            command, cwd=blocks.ROOT, env=os.environ | {"COLUMNS": "90"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ExtensionError(f"{' '.join(command[1:])}: {done.stderr}")
        return [nodes.literal_block(done.stdout, done.stdout, language="text")]


class Results(SphinxDirective):
    """The table of a file in lab/benchmarks/results, with the command and the machine below it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table."""
        self.env.note_dependency(str(results.DIRECTORY / self.arguments[0]))
        self.env.note_dependency(results.__file__)
        return self.parse_text_to_nodes(results.page(self.arguments[0]))


class GpuResults(SphinxDirective):
    """The tables of what `lab/benchmarks/gpu.sh` measured; without its file, a line that there are none."""

    def run(self) -> list[nodes.Node]:
        """The tables."""
        path = gpu_tables.RESULTS
        self.env.note_dependency(str(path))
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        return self.parse_text_to_nodes("\n".join(gpu_tables.page(found)))


class Faults(SphinxDirective):
    """The table of what `lab.faults` found, from docs/reliability.json."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        path = blocks.ROOT / "docs" / "reliability.json"
        self.env.note_dependency(str(path))
        return self.parse_text_to_nodes(faults.table(json.loads(path.read_text(encoding="utf-8"))))


class Executed(SphinxDirective):
    """A block of Python or shell that is run when the site is built; what it prints follows it.

    With `:lines: REGEX` only the printed lines that match it.
    """

    required_arguments = 1
    option_spec: ClassVar = {"lines": directives.unchanged}
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The code, marked for `execute`."""
        self.env.note_dependency(__file__)
        code = "\n".join(self.content)
        block = nodes.literal_block(code, code, language=self.arguments[0])
        block["executed"], block["lines"] = True, self.options.get("lines", "")
        return [block]


# Reads [[language, code], ...] and writes what each printed; stops at the first that fails.
SESSION = """
import contextlib, io, json, subprocess, sys
names, printed = {}, []
for language, code in json.load(open(sys.argv[1])):
    if language == "shell":
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], stdout=-1, stderr=-2, text=True)
        if done.returncode:
            sys.exit(done.stdout)
        printed.append(done.stdout)
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, "a block of the page", "exec"), names)
        printed.append(out.getvalue())
json.dump(printed, open(sys.argv[2], "w"))
"""


def execute(app: Sphinx, document: nodes.document) -> None:
    """Runs the marked blocks of a page in an empty folder, in one session, and puts below each what it printed.

    Raises:
      ExtensionError: a block failed.
    """
    marked = [node for node in document.findall(nodes.literal_block) if node.get("executed")]
    if not marked:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = blocks.environment(folder)
        given, printed = folder / ".given.json", folder / ".printed.json"
        given.write_text(json.dumps([[node["language"], node.astext()] for node in marked]))
        command = [sys.executable, "-c", SESSION, str(given), str(printed)]
        done = subprocess.run(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise ExtensionError(f"{app.env.docname}: a block failed\n{done.stderr}")
        for node, output in zip(marked, json.loads(printed.read_text()), strict=True):
            output = "\n".join(line for line in output.splitlines() if re.search(node["lines"], line))
            if output.strip():
                below = nodes.literal_block(output.rstrip(), output.rstrip(), language="text", classes=["output"])
                node.parent.insert(node.parent.index(node) + 1, below)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("config-section", ConfigSection)
    app.add_directive("public-names", PublicNames)
    app.add_directive("requirements", Requirements)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("results", Results)
    app.add_directive("gpu-results", GpuResults)
    app.add_directive("faults", Faults)
    app.add_directive("executed", Executed)
    app.connect("doctree-read", execute)
    return {"parallel_read_safe": False, "env_version": 1}
