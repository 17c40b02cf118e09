"""`pipejax push` against an endpoint of the hub's API that keeps all uploads."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from pipejax import checkpoint
from pipejax.apps.hub import push_command
from pipejax.convert import huggingface
from pipejax.system.errors import UserError
from support import oracle, tiny

PARAMS = oracle.random_params(tiny.MODEL, np.random.default_rng(5))


class Hub(HTTPServer):
    """Records the names of created models, and the committed files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = False


class Answers(BaseHTTPRequestHandler):
    """The calls of the hub's API that an upload makes."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        """Writes no log."""

    def do_POST(self) -> None:
        """Creates a model, tells how files are to be sent, or accepts a commit."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuses:
            self.say({"error": "you may not"}, 403)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.say({"url": "https://huggingface.co/owner/name", "name": "owner/name"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.say({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del self.server.files[line["value"]["path"]]
                elif line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.say({"commitUrl": f"https://huggingface.co/owner/name/commit/{40 * '0'}", "commitOid": 40 * "0"})
        else:
            self.say({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        """Lists the files of the model."""
        if self.server.refuses:
            self.say({"error": "you may not"}, 403)
        elif "/tree/" in self.path:
            self.say([{"type": "file", "path": name, "size": 3, "oid": 40 * "0"} for name in self.server.files])
        else:
            self.say({"id": "owner/name", "sha": 40 * "0", "siblings": []})

    def say(self, found: Any, code: int = 200) -> None:
        """Answers with JSON."""
        text = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    original = huggingface_hub.HfApi

    def here(**options: Any) -> Any:
        return original(endpoint=address, token="secret", **options)

    monkeypatch.setattr(huggingface_hub, "HfApi", here)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipelined run."""
    directory = tmp_path_factory.mktemp("push") / "run"
    checkpoint.save_params(directory, tiny.RUN_ON_ONE, PARAMS, tokenizer_source=tokenizer_files)
    return directory


def test_without_yes_nothing_is_uploaded(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert push_command.main([str(run), "owner/name"]) == 0
    out, err = capsys.readouterr()
    assert "  model.safetensors\n" in out and "  custom_generate/generate.py\n" in out
    assert "owner/name: nothing was uploaded; --yes uploads these files" in err
    assert "owner/name: its README.md names no license; --license names one" in err
    assert push_command.main([str(run), "owner/name", "--license", "mit"]) == 0
    assert "license" not in capsys.readouterr().err
    assert not hub.created and not hub.files


def test_uploaded_files_equal_output_of_to_hf(
    hub: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push_command.main([str(run), "owner/name", "--yes", "--private"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("/owner/name")
    [created] = hub.created
    assert created["name"] == "name" and created["organization"] == "owner"
    assert created.get("private") is True or created.get("visibility") == "private"
    huggingface.to_hf(run, tmp_path / "name")
    files = {
        str(path.relative_to(tmp_path / "name")): path for path in (tmp_path / "name").rglob("*") if path.is_file()
    }
    assert hub.files == {name: path.read_bytes() for name, path in files.items()}


def test_files_of_an_earlier_model_are_deleted(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only files of a model that are not written again are deleted; README.md, notes and other folders are kept."""
    hub.files = dict.fromkeys(("README.md", "notes.txt", "other/model.safetensors", "model.safetensors"), b"old")
    old = ("adapter_config.json", "model-00001-of-00002.safetensors", "custom_generate/more.py", "vocab.txt")
    hub.files |= dict.fromkeys(old, b"old")
    assert push_command.main([str(run), "owner/name", "--yes"]) == 0
    assert f"owner/name: files of an earlier model are deleted: {', '.join(old)}" in capsys.readouterr().err
    assert not {*old} & {*hub.files} and hub.files["other/model.safetensors"] == hub.files["notes.txt"] == b"old"
    assert hub.files["model.safetensors"] != b"old"


def test_refusal_raises_one_line(hub: Hub, run: Path) -> None:
    hub.refuses = True
    with pytest.raises(
        UserError, match=r"^owner/name: cannot be uploaded \(403, no right to do so: `hf auth login` .*\)$"
    ):
        push_command.main([str(run), "owner/name", "--yes"])
    for name in ("name", "owner/na me", "a/b/c"):
        with pytest.raises(UserError, match=rf"^{name}: found .*; expected OWNER/NAME$"):
            push_command.main([str(run), name])
