"""Each rule of tools/rules finds a violation in a small repository, and accepts the same repository without it."""

import pytest

from tools.rules import RULES, Repository, broken, imports, pages, requirements, sizes, text
from tools.rules.repository import ROOT, Rule, matches

PROJECT = """[project]
dependencies = ["jax>=0.10", "numpy>=2"]
[project.optional-dependencies]
train = ["optax>=0.2"]
metrics = []
data = ["pipejax[metrics]"]
"""
PINS = "jax==0.10.2\nnumpy==2.4.0\noptax==0.2.8\n"
BLOCKS = 'REASONS = {"gpu": "needs a GPU"}\n'

METHODS = "".join(f"    def {{0}}{i}(self): ...\n" for i in range(11))

# For each rule: a violation, the same files without it, and the place of the violation.
CASES: list[tuple[Rule, dict[str, str], dict[str, str], str]] = [
    (
        imports.every_module_has_a_layer,
        {"pipejax/attic.py": ""},
        {"pipejax/grid.py": ""},
        "pipejax/attic.py:1",
    ),
    (
        imports.imports_go_downwards,
        {"pipejax/grid.py": "\nfrom pipejax import training\n", "pipejax/training/__init__.py": ""},
        {"pipejax/grid.py": "", "pipejax/training/__init__.py": "from pipejax import grid\n"},
        "pipejax/grid.py:2",
    ),
    (
        imports.core_imports_nothing_outside,
        {"pipejax/testing.py": "def f():\n    import pipejax.backbones.umt5\n", "pipejax/backbones/umt5.py": ""},
        {"pipejax/registry.py": "UMT5 = 'pipejax.backbones.umt5'\n", "pipejax/backbones/umt5.py": ""},
        "pipejax/testing.py:2",
    ),
    (
        imports.outer_folders_are_named_in_registries,
        {"pipejax/testing.py": "\nSERVE = 'pipejax.apps.serving:serve'\n", "pipejax/apps/serving/__init__.py": ""},
        {"pipejax/registry.py": "SERVE = 'pipejax.apps.serving:serve'\n", "pipejax/apps/serving/__init__.py": ""},
        "pipejax/testing.py:2",
    ),
    (
        imports.outer_folders_are_named_in_registries,
        {"pipejax/data/text.py": "import pipejax.apps.markup\n", "pipejax/apps/markup.py": ""},
        {"pipejax/apps/probe/page.py": "import pipejax.apps.markup\n" * 6, "pipejax/apps/markup.py": ""},
        "pipejax/data/text.py:1",
    ),
    (
        imports.outer_folders_are_named_in_registries,
        {"pipejax/registry.py": "NAME = 'pipejax.apps.teach'\n" * 6, "pipejax/apps/teach/__init__.py": ""},
        {"pipejax/registry.py": "NAME = 'pipejax.apps.teach'\n" * 5, "pipejax/apps/teach/__init__.py": ""},
        "pipejax/registry.py:6",
    ),
    (
        imports.outer_folders_are_named_in_registries,
        {"pipejax/testing.py": "\nUMT5 = 'pipejax.backbones.umt5:UMT5'\n", "pipejax/backbones/umt5.py": ""},
        {"pipejax/moved.py": "\nUMT5 = 'pipejax.backbones.umt5:UMT5'\n", "pipejax/backbones/umt5.py": ""},
        "pipejax/testing.py:2",
    ),
    (
        imports.nothing_imports_testing,
        {"pipejax/data.py": "\nimport pipejax.testing.methods\n", "pipejax/testing/methods.py": ""},
        {"pipejax/testing/__init__.py": "import pipejax.testing.methods\n", "pipejax/testing/methods.py": ""},
        "pipejax/data.py:2",
    ),
    (
        imports.few_names_in_the_package,
        {f"pipejax/{i}.py": "" for i in range(imports.NAMES_AT_MOST + 1)},
        {f"pipejax/{i}.py": "" for i in range(imports.NAMES_AT_MOST)},
        "pipejax:1",
    ),
    (
        imports.no_import_cycle,
        {"pipejax/data/a.py": "import pipejax.data.b\n", "pipejax/data/b.py": "import pipejax.data.a\n"},
        {"pipejax/data/a.py": "import pipejax.data.b\n", "pipejax/data/b.py": ""},
        "pipejax/data/",
    ),
    (
        imports.modules_kept_apart,
        {"pipejax/config/files.py": "from pipejax.model import t5\n", "pipejax/model/t5.py": "import jax\n"},
        {"pipejax/config/files.py": "from pipejax.model import t5\n", "pipejax/model/t5.py": "def f():\n import jax\n"},
        "pipejax/config/files.py:1",
    ),
    (
        imports.modules_kept_apart,
        {"pipejax/decoding/rows.py": "def f():\n  import pipejax.data.text\n", "pipejax/data/text.py": ""},
        {"pipejax/decoding/rows.py": "import pipejax.system\n", "pipejax/system/__init__.py": ""},
        "pipejax/decoding/rows.py:1",
    ),
    (
        imports.json_is_read_in_one_module,
        {"pipejax/data/lines.py": "import json\n\nrecord = json.loads('{}')\n"},
        {"pipejax/system/strict_json.py": "import json\n\nrecord = json.loads('{}')\n"},
        "pipejax/data/lines.py:3",
    ),
    *(
        (
            imports.libraries_stay_in_their_modules,
            {"pipejax/grid.py": line},
            {"pipejax/model/t5.py": line},
            f"pipejax/grid.py:{line.count(chr(10)) + 1}",
        )
        for line in [
            "import flax; flax.linen.Dense(3)",
            "from flax import linen",
            "from flax.linen import Dense",
            "def f():\n  import flax.linen as nn",
            "importlib.import_module('flax.linen')",
        ]
    ),
    (
        imports.tests_import_no_test,
        {"tests/test_a.py": "import test_b\n", "tests/test_b.py": ""},
        {"tests/test_a.py": "import support.b\n", "tests/support/b.py": ""},
        "tests/test_a.py:1",
    ),
    (
        imports.tests_import_no_test,
        {"tests/support/b.py": "\ndef test_b(): ...\n"},
        {"tests/support/b.py": "\ndef make_b(): ...\n"},
        "tests/support/b.py:2",
    ),
    (
        imports.only_lab_imports_lab,
        {"tests/test_a.py": "import lab.demo\n"},
        {"lab/tests/test_a.py": "import lab.demo\n"},
        "tests/test_a.py:1",
    ),
    (
        text.docstrings_name_their_subject,
        {"pipejax/a.py": 'class A:\n  """What it is."""\n'},
        {"pipejax/a.py": 'class A:\n  """However."""\n  def _f(self):\n    """What it does."""\n'},
        "pipejax/a.py:1",
    ),
    (
        text.file_names_say_something,
        {"lab/utils.py": ""},
        {"lab/demo.py": ""},
        "lab/utils.py:1",
    ),
    (
        sizes.classes_and_functions_are_small,
        {
            "pipejax/decoding/base.py": "class Base:\n" + METHODS.format("a"),
            "pipejax/decoding/rows.py": "\nclass Rows(base.Base):\n" + METHODS.format("b"),
        },
        {
            "pipejax/decoding/base.py": "class Base:\n" + METHODS.format("a"),
            "pipejax/decoding/rows.py": "\nclass Rows(base.Base):\n" + METHODS.format("a"),
        },
        "pipejax/decoding/rows.py:2",
    ),
    (
        sizes.classes_and_functions_are_small,
        {"pipejax/offline/records.py": "\ndef f(x):\n    return " + " and ".join(["[i for i in x if i]"] * 8)},
        {"pipejax/offline/records.py": "\ndef f(x):\n    return " + " and ".join(["[i for i in x if i]"] * 7)},
        "pipejax/offline/records.py:2",
    ),
    (
        sizes.classes_and_functions_are_small,
        {"pipejax/inference/generator.py": "\nclass Generator:\n    pass\n"},
        {"pipejax/inference/generator.py": "\nclass Another:\n    pass\n"},
        "pipejax/inference/generator.py:2",
    ),
    (
        text.assertions_can_fail,
        {"tests/test_a.py": "assert 1 + 1 == 2\n"},
        {"tests/test_a.py": "assert f() == 2\n"},
        "tests/test_a.py:1",
    ),
    (
        text.assertions_can_fail,
        {"lab/tests/test_a.py": "\nassert (f(), 'a message')\n"},
        {"lab/tests/test_a.py": "\nassert f(), 'a message'\n"},
        "lab/tests/test_a.py:2",
    ),
    *(
        (
            text.methods_are_not_compared,
            {"pipejax/data/a.py": line},
            {"pipejax/methods/a.py": line},
            "pipejax/data/a.py:1",
        )
        for line in ["if name == 'pipelined': ...", "TABLE = {'sequential': 1}", "isinstance(strategy, Rows)"]
    ),
    (
        requirements.requirements_are_pinned,
        {"requirements.txt": "jax==0.10.2\nnumpy>=2\n"},
        {"requirements.txt": "jax==0.10.2\njax[cuda13]\n", "requirements/test.txt": "-r ../requirements.txt\n"},
        "requirements.txt:2",
    ),
    (
        requirements.requirements_are_pinned,
        {"requirements/test.txt": "-r peers/onnx.txt\n", "requirements/peers/onnx.txt": ""},
        {"requirements/test.txt": "-r docs.txt\n", "requirements/docs.txt": ""},
        "requirements/test.txt:1",
    ),
    (
        requirements.versions_are_pinned_once,
        {"requirements.txt": "numpy==2.4.0\n", "requirements/test.txt": "Numpy==2.4.0\n"},
        {"requirements.txt": "numpy==2.4.0\n", "requirements/peers/onnx.txt": "numpy==2.3.0\n"},
        "requirements/test.txt:1",
    ),
    (
        requirements.compilers_have_the_version_of_jax,
        {
            "requirements.txt": PINS,
            "requirements/programs.txt": "jax-cuda12-plugin==0.10.2\njax-cuda12-pjrt==0.10.1\n",
        },
        {
            "requirements.txt": PINS,
            "requirements/programs.txt": "jax-cuda12-plugin==0.10.2\njax-cuda12-pjrt==0.10.2\n",
        },
        "requirements/programs.txt:2",
    ),
    (
        requirements.requirements_are_those_of_the_project,
        {"pyproject.toml": PROJECT, "requirements.txt": PINS + "torch==2.13.0\n"},
        {"pyproject.toml": PROJECT, "requirements.txt": PINS},
        "requirements.txt:4",
    ),
    (
        requirements.requirements_are_those_of_the_project,
        {"pyproject.toml": PROJECT, "requirements.txt": "jax==0.10.2\nnumpy==2.4.0\n"},
        {"pyproject.toml": PROJECT, "requirements.txt": PINS},
        "requirements.txt:1",
    ),
    (
        requirements.pins_are_within_bounds,
        {"pyproject.toml": PROJECT, "requirements.txt": "numpy==1.26.4\n"},
        {"pyproject.toml": PROJECT, "requirements.txt": "numpy==2.4.0\n"},
        "requirements.txt:1",
    ),
    (
        requirements.demo_needs_only_requirements,
        {"requirements.txt": PINS, "lab/demo.py": "import os\nimport pytest\n"},
        {"requirements.txt": PINS, "lab/demo.py": "import os\nimport jax\n"},
        "lab/demo.py:2",
    ),
    (
        requirements.extras_are_imported_with_their_names,
        {"pyproject.toml": PROJECT, "pipejax/training/a.py": "\nimport optax\n"},
        {"pyproject.toml": PROJECT, "pipejax/training/a.py": "with extra('train', 'training'):\n  import optax\n"},
        "pipejax/training/a.py:2",
    ),
    (
        requirements.extras_are_imported_with_their_names,
        {"pyproject.toml": PROJECT, "pipejax/training/a.py": "with extra('data', 'a table'):\n  import optax\n"},
        {"pyproject.toml": PROJECT, "pipejax/training/a.py": "with extra('train', 'training'):\n  import optax\n"},
        "pipejax/training/a.py:2",
    ),
    (
        pages.readme_is_a_front_page,
        {"README.md": "word " * 1001},
        {"README.md": "word " * 1000},
        "README.md:1",
    ),
    *(
        (
            pages.shell_blocks_say_whether_they_run,
            {"docs/blocks.py": BLOCKS, "docs/a.md": f"words\n\n{fence}\nls\n```\n"},
            {
                "docs/blocks.py": BLOCKS,
                "docs/a.md": "```shell run\nls\n```\n\n```shell gpu\nls\n```\n\n```python\n```\n",
            },
            "docs/a.md:3",
        )
        for fence in ["```bash run", "```shell", "```shell tpu"]
    ),
    (
        pages.shell_blocks_say_whether_they_run,
        {"docs/blocks.py": BLOCKS, "README.md": "```shell run\nls\n"},
        {"docs/blocks.py": BLOCKS, "README.md": "```shell run\nls\n```\n"},
        "README.md:1",
    ),
    (
        pages.links_lead_somewhere,
        {"docs/a.md": "words\n[b](../b.md)\n"},
        {"docs/a.md": "words\n[b](../b.md#title) [c](https://c) [d](.)\n", "b.md": ""},
        "docs/a.md:2",
    ),
    (
        pages.files_on_pages_exist,
        {"docs/a.md": "words\nin `pipejax/grid.py`\n"},
        {"docs/a.md": "in `pipejax/data/NAME.py`", "docs/decisions/1.md": "in `pipejax/grid.py`"},
        "docs/a.md:2",
    ),
    (
        pages.architecture_names_what_exists,
        {"docs/architecture.md": "\n| where? | `f` in `pipejax/grid.py` |\n", "pipejax/grid.py": "def g(): ...\n"},
        {"docs/architecture.md": "\n| where? | `g` in `pipejax/grid.py` |\n", "pipejax/grid.py": "def g(): ...\n"},
        "docs/architecture.md:2",
    ),
    (
        pages.architecture_names_what_exists,
        {"docs/architecture.md": "| where? | `pipejax/data/` |\n"},
        {"docs/architecture.md": "| where? | `pipejax/data/` |\n", "pipejax/data/text.py": ""},
        "docs/architecture.md:1",
    ),
    (
        pages.results_are_on_their_page,
        {"docs/speed.md": "```{results} a.json\n", "lab/benchmarks/results/b.json": ""},
        {
            "docs/speed.md": "```{results} a.json\n",
            "lab/benchmarks/results/a.json": "",
            "lab/benchmarks/results/gpu.json": "",
        },
        "docs/speed.md:1",
    ),
    (
        pages.every_page_is_in_the_contents,
        {"docs/index.md": "training\n", "docs/training.md": "", "docs/speed.md": ""},
        {"docs/index.md": "training\n", "docs/training.md": ""},
        "docs/speed.md:1",
    ),
    (
        pages.picture_shows_every_folder,
        {"docs/rooms.py": "ROOMS = {'grid': 1}", "docs/rooms.svg": ">grid</text>", "pipejax/model/__init__.py": ""},
        {"docs/rooms.py": "ROOMS = {'grid': 1}", "docs/rooms.svg": ">grid</text>", "pipejax/grid.py": ""},
        "docs/rooms.py:1",
    ),
    (
        pages.picture_shows_every_folder,
        {"docs/rooms.py": "ROOMS = {'grid': 1}", "docs/rooms.svg": ">data</text>"},
        {"docs/rooms.py": "ROOMS = {'grid': 1}", "docs/rooms.svg": ">grid</text>"},
        "docs/rooms.svg:1",
    ),
]


@pytest.mark.parametrize("rule, bad, good, place", CASES, ids=[rule.__name__ for rule, *_ in CASES])
def test_rule_finds_the_bad_example(rule: Rule, bad: dict[str, str], good: dict[str, str], place: str) -> None:
    found = broken(Repository(bad), (rule,))
    assert found and all(line.startswith(place) and line.endswith(f"({rule.__name__})") for line in found)
    assert broken(Repository(good), (rule,)) == []


def test_every_rule_has_a_bad_example() -> None:
    assert {rule for rule, *_ in CASES} == set(RULES)


def test_patterns_of_import_rules_match_modules() -> None:
    modules = Repository.read(ROOT).modules
    layers = {pattern for patterns in imports.LAYERS for pattern in patterns}
    for pattern in [*layers, *(source for source, _ in imports.NON_EDGES), *sum(imports.KEPT_IN.values(), ())]:
        assert any(matches(module, (pattern,)) for module in modules), pattern
    assert {target for _, target in imports.NON_EDGES if target.startswith("pipejax")} <= modules.keys()
