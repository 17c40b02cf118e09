"""Models of the hub by name and revision, and refusals, with the hub's client and a local hub."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import numpy as np
import pytest

import pipejax
from pipejax import checkpoint
from pipejax.convert.__main__ import main as convert
from pipejax.convert.huggingface import locate, write_hf
from pipejax.data import hub, tokenizer
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from support import oracle, tiny

COMMITS = {"main": "a" * 40, "old": "b" * 40, "refs/pr/1": "c" * 40, "v1.0": "b" * 40}


class Answers(BaseHTTPRequestHandler):
    """Serves the models below `root`, with a directory for each commit of some/t5, and refuses other names."""

    protocol_version = "HTTP/1.1"
    root: Path
    asked: list[str]

    def log_message(self, *_: object) -> None:
        """Writes no log."""

    def do_HEAD(self) -> None:
        """Answers like GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Sends the facts of a model, or one of its files."""
        self.asked.append(self.path)
        found = re.fullmatch(r"/api/models/(some/[\w-]+)(?:/revision/(\S+))?", self.path.partition("?")[0])
        if found:
            name, revision = found[1], (found[2] or "main").replace("%2F", "/")
            if name == "some/broken":
                self.say(b"{}", 500)
            elif name == "some/forbidden":
                self.say(b"{}", 403)
            elif name not in ("some/t5", "some/gated"):
                # The hub returns this for https and an unknown name.
                self.say(b"{}", 401, {"X-Error-Code": "RepoNotFound"})
            elif revision not in {**COMMITS, **dict.fromkeys(COMMITS.values())}:
                self.say(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
            else:
                sha = COMMITS.get(revision, revision)
                names = [path.name for path in (self.root / sha).iterdir()]
                facts = {"id": name, "sha": sha, "siblings": [{"rfilename": x} for x in names]}
                self.say(json.dumps(facts).encode())
        elif tree := re.match(r"/api/models/some/[\w-]+/tree/(\w+)(/\w+)?", self.path):
            here = self.root / COMMITS.get(tree[1], tree[1])
            files = [] if tree[2] else [{"type": "file", "path": x.name, "size": 1, "oid": "0"} for x in here.iterdir()]
            self.say(json.dumps(files).encode())
        elif found := re.fullmatch(r"/some/t5/resolve/(\S+)/([\w.]+)", self.path):
            sha = COMMITS.get(found[1].replace("%2F", "/"), found[1])
            if not (file := self.root / sha / found[2]).is_file():
                self.say(b"{}", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
                return
            content = file.read_bytes()
            self.say(content, headers={"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": sha})
        else:
            self.say(b"{}", 403, {"X-Error-Code": "GatedRepo"})

    def say(self, content: bytes, code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Sends an answer."""
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def asked(tokenizer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub with other weights of some/t5 in each commit; the list of requested paths."""
    for seed, sha in enumerate(sorted({*COMMITS.values()})):
        params = oracle.random_params(tiny.MODEL, np.random.default_rng(seed))
        write_hf(tiny.MODEL, params, tmp_path / "hub" / sha, tokenizer_files)
    paths = list[str]()
    handler = type("Here", (Answers,), {"root": tmp_path / "hub", "asked": paths})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", constants.ENDPOINT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "downloads"))
    monkeypatch.setenv("PIPEJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.chdir(tmp_path)
    yield paths
    server.shutdown()
    server.server_close()


def weights_of(run: Path | str) -> str:
    return str(checkpoint.fingerprint.digest(checkpoint.open_run(run).arrays["params"]))


REFUSED = {
    "some/gated": "a gated model: ask for access on its page, then `hf auth login`",
    "some/unknown": "unknown or private: look at the spelling, or `hf auth login`",
    "some/t5@nope": "no such revision; its page lists branches, tags and commits",
    "some/unknown@main": "unknown or private: ",
    "some/forbidden": "403, no right to do so: `hf auth login` with a token that may",
}


class NotHere:
    """Replaces transformers, which does not know this hub and would send other requests."""

    AutoTokenizer = None
    seen: ClassVar[list[dict[str, object]]] = []

    @classmethod
    def from_pretrained(cls, name: str, **given: object) -> None:
        cls.seen.append({"name": name, **given})
        raise OSError("not here")


NotHere.AutoTokenizer = NotHere  # type: ignore[assignment]


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_recommend_a_command(name: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, for a model and for a tokenizer, has more than a status of HTTP."""
    with pytest.raises(
        UserError, match=rf"^{name}: found neither a directory nor a reachable hub id \({REFUSED[name]}"
    ):
        locate(name)
    monkeypatch.setattr(tokenizer, "import_transformers", lambda: NotHere)
    if name != "some/gated":  # a model whose facts are public
        with pytest.raises(UserError, match=rf"^{name}: found neither .* \({REFUSED[name]}"):
            Tokenizer.load(name)


def test_other_failures_are_reported_unchanged(asked: list[str]) -> None:
    with pytest.raises(UserError, match="500"):
        locate("some/broken")


@pytest.mark.parametrize(
    "revision, sha", [("", "a"), ("main", "a"), ("old", "b"), ("v1.0", "b"), ("refs/pr/1", "c"), ("b" * 40, "b")]
)
def test_each_revision_has_its_own_weights(revision: str, sha: str, asked: list[str], tmp_path: Path) -> None:
    """Both spellings work, and the name is the model's."""
    assert convert(["from-hf", str(tmp_path / "hub" / (sha * 40)), str(tmp_path / "expected")]) == 0
    spelled = "some/t5" + f"@{revision}" * bool(revision)
    assert convert(["from-hf", spelled, str(tmp_path / "one")]) == 0
    assert convert(["from-hf", "some/t5", str(tmp_path / "two"), "--revision", revision]) == 0
    assert weights_of(tmp_path / "one") == weights_of(tmp_path / "two") == weights_of(tmp_path / "expected")
    assert checkpoint.open_run(tmp_path / "one").config.name == "t5"


def test_revisions_are_opened_and_kept_apart(asked: list[str], tmp_path: Path) -> None:
    found = [
        pipejax.load("some/t5").origin["params_fp"],
        pipejax.load("some/t5", revision="old").origin["params_fp"],
        pipejax.load("some/t5@refs/pr/1").origin["params_fp"],
    ]
    for sha, fingerprint in zip("abc", found, strict=True):
        assert pipejax.load(tmp_path / "hub" / (sha * 40)).origin["params_fp"] == fingerprint
    assert len({*found}) == 3
    asked.clear()
    assert pipejax.load("some/t5@old").origin["params_fp"] == found[1] and not asked, "the kept one needs no hub"


def test_a_path_has_no_revisions(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / "some-t5").mkdir()
    line = r"^\S*some-t5: found a path with the revision old; expected a hub id"
    with pytest.raises(UserError, match=line):
        pipejax.load(tmp_path / "some-t5", revision="old")
    with pytest.raises(UserError, match=line):
        convert(["from-hf", "some-t5", str(tmp_path / "out"), "--revision", "old"])
    shutil.copytree(tmp_path / "hub" / COMMITS["main"], tmp_path / "my@t5")  # a directory of that name
    assert convert(["from-hf", "my@t5", str(tmp_path / "out")]) == 0
    assert checkpoint.open_run(tmp_path / "out").config.name == "my@t5" and not asked


def test_tokenizer_revision_is_passed_to_transformers(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "import_transformers", lambda: NotHere)
    NotHere.seen.clear()
    with pytest.raises(UserError, match=r"^some/t5@old: found neither .* \(not here\)"):
        Tokenizer.load("some/t5@old")
    common = {"name": "some/t5", "revision": "old", "trust_remote_code": False}
    assert NotHere.seen == [{**common, "local_files_only": True}, common]
    assert [path.partition("?")[0] for path in asked] == ["/api/models/some/t5/revision/old"]


@pytest.mark.slow
def test_a_tokenizer_of_a_revision(asked: list[str]) -> None:
    assert Tokenizer.load("some/t5@old").encode("the river")
    assert all("/main" not in path for path in asked if "/resolve/" in path or "/revision/" in path)


@pytest.mark.parametrize(
    "source, found",
    [
        ("t5-small", ("t5-small", {})),
        ("google/t5-v1_1-base@main", ("google/t5-v1_1-base", {"revision": "main"})),
        ("a/b@refs/pr/3", ("a/b", {"revision": "refs/pr/3"})),
        *((name, None) for name in ("a/b@", "@main", "a/b/c", "./a/b", "~/a", "/a/b", "a/b@x@y", "a/b@x y", "../a")),
    ],
)
def test_names_with_revisions_are_split(source: str, found: object) -> None:
    assert hub.split_revision(source) == found
