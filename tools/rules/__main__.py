"""Checks the rules of this repository: one line for each violation; the exit status is 1 if there is any."""

import sys

from tools.rules import broken
from tools.rules.repository import ROOT, Repository

if __name__ == "__main__":
    lines = broken(Repository.read(ROOT))
    print(*lines, sep="\n" if lines else "")
    sys.exit(bool(lines))
