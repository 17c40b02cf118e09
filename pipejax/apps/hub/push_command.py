"""The command `pipejax push CHECKPOINT OWNER/NAME`: uploads a run to the Hugging Face hub as a model."""

import fnmatch
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipejax import config
from pipejax.convert import description, generation
from pipejax.convert.description import add_origin
from pipejax.convert.huggingface import AUXILIARY, TOKENIZER_FILES, to_hf
from pipejax.data import hub
from pipejax.system.cli import Parser, note, run
from pipejax.system.errors import UserError, first_line

OF_MODEL = (  # patterns of the files of a model, beside those in custom_generate/
    *("model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "adapter_*", generation.FILE),
    *(description.FILE, AUXILIARY, *TOKENIZER_FILES),
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="pipejax push",
        description="converts a run as `pipejax convert to-hf` does, and uploads it to the Hugging Face hub with --yes",
    )
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint or run directory")
    parser.add_argument("name", metavar="OWNER/NAME", help="OWNER/NAME of the model on the hub; created if absent")
    parser.add_argument("--yes", action="store_true", help="upload the files; without this flag they are only listed")
    parser.add_argument("--private", action="store_true", help="create a new model as private")
    parser.add_argument("--best", action="store_true", help="use the step of the best evaluation instead of the newest")
    parser.add_overrides()
    add_origin(parser)
    args = parser.parse_args(argv)
    config.backbone(args.overrides)
    check_name(args.name)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / args.name.rpartition("/")[2]
        given = {"best": args.best, "base_model": args.base_model, "scores": args.scores, "license": args.license}
        size = to_hf(args.source, directory, **given)
        if not args.license:
            note(f"{args.name}: its README.md names no license; --license names one")
        print(f"{args.name}: {size}")
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            print(f"{file.stat().st_size:>13,}  {file.relative_to(directory)}")
        if args.yes:
            print(upload(directory, args.name, private=args.private))
        else:
            note(f"{args.name}: nothing was uploaded; --yes uploads these files")
    return 0


def check_name(name: str) -> None:
    """Raises a UserError unless the name, including an owner, is valid on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(name, found=f"an invalid name ({first_line(error)})", expected="OWNER/NAME") from error
    if "/" not in name:
        raise UserError(name, found="a name without an owner", expected="OWNER/NAME")


def upload(directory: Path, name: str, *, private: bool) -> str:
    """Uploads a directory as a model of this name; returns its address.

    Files of an earlier model that would be read with the new model are deleted, and the log names them.

    Raises:
      UserError: the hub refuses the upload.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi(library_name="pipejax")
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        old = [file for file in api.list_repo_files(name) if is_of_model(file) and not (directory / file).exists()]
        if old:
            note(f"{name}: files of an earlier model are deleted: {', '.join(old)}")
        message = "Upload by pipejax"
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=message, delete_patterns=old or None)
    except Exception as error:  # the hub client and its HTTP libraries raise many kinds of exceptions
        raise UserError(name, f"cannot be uploaded ({hub.reason(error)})") from error
    return str(address)


def is_of_model(file: str) -> bool:
    """Returns whether transformers or pipejax reads a file of a repository with this path as a part of a model."""
    return file.startswith("custom_generate/") or any(fnmatch.fnmatchcase(file, pattern) for pattern in OF_MODEL)


if __name__ == "__main__":
    run(main)
