"""student.json, in which a run of `pipejax teach --student` names the model that its small T5 drafts for."""

from pathlib import Path

from pipejax.system import strict_json
from pipejax.system.cli import note
from pipejax.system.errors import UserError
from pipejax.system.files import look

STUDENT = "student.json"  # the name of the file in the run directory


def shared_encoder(directory: str | Path) -> str:
    """Returns the fingerprint of the encoder that a small T5 shares with the model it drafts for; "" if none is shared.

    Raises:
      UserError: student.json in the run directory cannot be read.
    """
    path = Path(directory) / STUDENT
    if look(path) != "file":
        return ""
    try:
        found = strict_json.loads(path.read_text(encoding="utf-8"))["encoder_fp"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        expected = '"encoder_fp", the fingerprint of the encoder that the T5 shares, or ""'
        raise UserError(path, found="no such statement", expected=expected) from error
    return str(found)


def report_own_encoder(directory: str | Path) -> None:
    """Reports that a converted small T5 has its own encoder, if the small T5 of the run shares its encoder."""
    if shared_encoder(directory):
        note(f"{directory}: {STUDENT} is not converted; the converted T5 drafts with its own copy of the encoder")
