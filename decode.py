"""Decodes a file: `python decode.py --checkpoint runs/demo --input IN --output OUT`; `pipejax decode` is the same."""

from pipejax.offline.decode_command import main as main
from pipejax.system import cli

if __name__ == "__main__":
    cli.run(main)
